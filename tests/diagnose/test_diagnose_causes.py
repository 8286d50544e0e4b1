"""Test root, cascade, survived and teardown lines, printed in any order."""

import itertools
import json
import shutil

import pytest

from holdfast.core.errors import NotFound
from holdfast.diagnose import BrokenLoss, Diagnosis, Hang, JobContext, RankExit, diagnose

STEPS = "".join(f"step {step} loss {3 - step / 100:.3f}\n" for step in range(1, 38))
GLOO = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/job/train.py", line 6, in <module>
[rank0]:     dist.all_reduce(x)
[rank0]:   File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by \
peer [127.0.0.1]:54177. This is typically caused by a remote worker crashing.
"""
KEY = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 8, in <module>
[rank1]:     batch["missing"]
[rank1]: KeyError: 'missing'
terminate called without an active exception
"""
LAUNCHER = """\
W1121 01:54:32.555000 6362 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 4241 closing signal \
SIGTERM
E1121 01:54:32.574000 6362 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 1 \
(pid: 4242) of binary: python
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
  traceback : Signal 15 (SIGTERM) received by PID 4241
Root Cause (first observed failure):
  traceback : Signal 9 (SIGKILL) received by PID 4242
"""
AT = "2026-11-21T01:30:19.123Z holdfast: "
KILLED = AT + "rank 1 (pid 4242) was killed by SIGKILL after step 37; it ended first\n"
TEARDOWN = AT + "rank 0 (pid 4241) was killed by SIGTERM after step 37; teardown\n"
STOPPED = AT + (
    "no step for 3.2 s (limit 3.0 s) after step 42; rank 0 (pid 4241) is frozen: process state T (stopped)\n"
)


@pytest.fixture
def job(tmp_path):
    """Return a function that writes logs by name and diagnoses their folder."""

    def write_and_diagnose(context: JobContext | None = None, **logs: str) -> Diagnosis:
        for old in tmp_path.iterdir():
            old.unlink()
        for name, text in logs.items():
            (tmp_path / f"{name.replace('_', '-')}.log").write_text(text)
        return diagnose(tmp_path, context)

    return write_and_diagnose


def cited(diagnosis, role):
    return [one.text for one in diagnosis.evidence if one.role == role]


def test_the_peer_that_prints_its_loss_of_connection_is_not_the_root(job):
    found = job(rank_0=STEPS + GLOO, rank_1=STEPS + KEY, launcher=LAUNCHER.replace("-9", "-6"))
    assert (found.reason, found.category, found.action, found.restart_helps) == (
        "KeyError", "Script", "user_must_fix", False,
    )  # fmt: skip
    assert found.root_line.file.endswith("rank-1.log")
    assert found.root_line.line == 41
    assert found.root_line.text == "[rank1]: KeyError: 'missing'"
    assert found.scope == {"rank": 1}
    assert any("Connection closed by" in text for text in cited(found, "cascade"))
    assert any("closing signal SIGTERM" in text for text in cited(found, "teardown"))


@pytest.mark.parametrize(
    "parts", list(itertools.permutations([GLOO, KEY, LAUNCHER.replace("-9", "1")]))
)
def test_one_interleaved_log_in_any_order(job, parts):
    found = job(job=STEPS + "".join(parts))
    assert (found.reason, found.scope["rank"]) == ("KeyError", 1)


def test_tracebacks_of_two_ranks_line_by_line(job):
    woven = "".join(itertools.chain.from_iterable(
        itertools.zip_longest(GLOO.splitlines(True), KEY.splitlines(True), fillvalue="")
    ))  # fmt: skip
    assert job(job=woven).decided_by == ("python-key-error",)


def test_any_order_of_files_gives_the_same(tmp_path):
    paths = []
    for name, text in {
        "a": GLOO,
        "b": KEY,
        "launcher": LAUNCHER,
        "observer": KILLED + TEARDOWN,
    }.items():
        paths.append(tmp_path / f"{name}.log")
        paths[-1].write_text(text)
    answers = [diagnose(order).to_json() for order in itertools.permutations(paths)]
    assert all(answer == answers[0] for answer in answers)


def test_killed_rank(job):
    found = job(rank_0=STEPS + GLOO, rank_1=STEPS, launcher=LAUNCHER, observer=KILLED + TEARDOWN)
    assert (found.reason, found.category, found.action, found.restart_helps) == (
        "Others", "Infrastructure", "restart", True,
    )  # fmt: skip
    assert found.scope == {"rank": 1, "local_rank": 1}
    assert found.root_line.text == KILLED.strip()
    assert "dmesg" in found.mitigation
    assert TEARDOWN.strip() in cited(found, "teardown")


def test_killed_rank_without_an_observer(job):
    found = job(rank_0=STEPS + GLOO, rank_1=STEPS, launcher=LAUNCHER)
    assert (found.decided_by, found.scope) == (("launcher-killed",), {"local_rank": 1})


def test_what_peers_raise_after_a_kill_is_no_root(job):
    assert job(rank_0=KEY.replace("rank1", "rank0"), observer=KILLED).decided_by == (
        "observer-killed",
    )


def test_out_of_memory_killer_explains_the_kill_and_names_its_rank(job):
    kernel = (
        "[1234.5] Out of memory: Killed process 4242 (python) total-vm:9000kB, anon-rss:8000kB\n"
    )
    found = job(rank_0=GLOO, observer=KILLED + TEARDOWN, dmesg=kernel)
    assert (found.reason, found.restart_helps, found.scope) == (
        "OutOfMemoryError",
        False,
        {"rank": 1},
    )


def test_frozen_rank(job):
    stopped = STOPPED + AT + "rank 0 (pid 4241) was killed after it froze; teardown\n"
    found = job(rank_0=STEPS, rank_1=STEPS + GLOO.replace("rank0", "rank1"), observer=stopped)
    assert (found.reason, found.action, found.restart_helps, found.scope) == (
        "Others",
        "restart",
        True,
        {"rank": 0},
    )
    assert found.root_line.text == STOPPED.strip()
    behind = STOPPED.replace("process state T (stopped)", "it is behind the others at step 41")
    assert job(rank_0=STEPS, observer=behind).decided_by == ("observer-frozen-behind",)
    nobody = (
        AT + "no step for 30.2 s (limit 30.0 s) before the first step; no rank can be told apart\n"
    )
    assert job(rank_0=STEPS, observer=nobody).decided_by == ("observer-frozen-job",)


def test_context_alone_says_the_same_as_the_observer(tmp_path):
    exits = (
        RankExit(rank=0, pid=4241, at_monotonic_s=9.0, signal=15),
        RankExit(rank=1, pid=4242, at_monotonic_s=8.0, signal=9),
    )
    found = diagnose(tmp_path, JobContext(exits=exits, last_step=37, stopped_ranks=(0,)))
    assert (found.decided_by, found.scope, found.root_line) == (
        ("observer-killed",),
        {"rank": 1},
        None,
    )
    (tmp_path / "observer.log").write_text(KILLED)
    both = diagnose(tmp_path, JobContext(exits=exits, last_step=37))
    assert both.root_line is not None
    assert both.fingerprint == found.fingerprint
    hang = Hang(
        ranks=(0,), pids=(4241,), process_state="T", last_step=42, waited_s=3.2, limit_s=3.0
    )
    frozen = diagnose(tmp_path / "nothing", JobContext(hang=hang))
    assert frozen.decided_by == ("observer-frozen-stopped",)


LOADER = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/multiprocessing/queues.py", line 264, in _feed
    send_bytes(obj)
{}
"""


@pytest.mark.parametrize(
    "printed",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "RuntimeError: DataLoader worker (pid 4250) is killed by signal: Killed.",
        "FileNotFoundError: [Errno 2] No such file or directory",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), 900.0])
def test_what_a_job_prints_that_was_killed_for_its_loss_is_no_root(job, printed, value):
    """Test that no rank's end is the root: all ranks trained when the loss was found broken."""
    broken = BrokenLoss(value=value, step=171, first_step=170, usual=2.1)
    exits = tuple(
        RankExit(rank=rank, pid=4241 + rank, at_monotonic_s=5.0, signal=9) for rank in range(2)
    )
    context = JobContext(exits=exits, broken_loss=broken, last_step=171, stopped_ranks=(0, 1))
    rule = "observer-spike" if value == 900 else "observer-not-finite"
    for logs in ({}, {"rank_1": LOADER.format(printed)}):
        assert job(context, **logs).decided_by == (rule,), logs


def test_a_fault_of_the_hardware_still_explains_a_broken_loss(job):
    broken = BrokenLoss(value=float("nan"), step=171, first_step=170)
    kernel = (
        "[ 4213.1] NVRM: Xid (PCI:0000:b3:00): 48, pid=4242, name=python, DBE (double bit error)\n"
    )
    found = job(JobContext(broken_loss=broken), kernel=kernel)
    assert (found.reason, dict(found.scope)) == ("ECCError", {"gpu": "0000:b3:00"})


def test_an_exit_code_alone_is_unknown(job):
    found = job(
        rank_0=STEPS,
        observer=AT + "rank 0 (pid 7) exited with code 3 after step 37; it ended first\n",
    )
    assert (found.reason, found.restart_helps) == ("Unknown", True)
    assert found.confidence <= 0.3


def traceback(exception, path="/job/train.py"):
    return (
        f'Traceback (most recent call last):\n  File "{path}", line 8, in f\n    g()\n{exception}\n'
    )


def test_own_exception_classes(job):
    own = job(rank_0=STEPS + traceback("__main__.DataBad: shard 7 is corrupt"))
    assert (own.reason, own.category, own.action, own.restart_helps) == (
        "Others",
        "Script",
        "user_must_fix",
        False,
    )
    assert 0.5 < own.confidence < job(rank_0=STEPS + traceback("KeyError: 'a'")).confidence
    library = job(rank_0=traceback("acme.Odd: x", "/venv/lib/python3.11/site-packages/acme/a.py"))
    assert (library.reason, library.category, library.restart_helps) == (
        "Others",
        "Framework",
        True,
    )


def test_full_disk_under_a_failed_save(job):
    cause = traceback("OSError: [Errno 28] No space left on device: '/ckpt/.step-40.a1b2.tmp'")
    found = job(
        rank_0=STEPS
        + cause
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback("holdfast.core.errors.SaveFailed: step 40 was not saved.")
    )
    assert (found.reason, found.decided_by, found.restart_helps) == (
        "OSError",
        ("disk-full",),
        False,
    )
    assert found.root_line.text.startswith("OSError")


@pytest.mark.parametrize(
    ("first", "sentence", "second", "root"),
    [
        ("KeyError: 'a'", "The above exception was the direct cause of the following exception:", "ValueError: b",
         "KeyError"),
        ("KeyError: 'a'", "During handling of the above exception, another exception occurred:", "ValueError: b",
         "ValueError"),
        ("KeyError: 'a'", "During handling of the above exception, another exception occurred:", "RuntimeError: b",
         "KeyError"),
    ],
)  # fmt: skip
def test_chains(job, first, sentence, second, root):
    found = job(rank_0=traceback(first) + f"\n{sentence}\n\n" + traceback(second))
    assert found.reason == root
    assert found.alternatives == ()
    assert len(found.evidence) == 2


def test_the_original_of_a_loader_worker_is_the_root(job):
    text = (
        traceback(
            "KeyError: Caught KeyError in DataLoader worker process 0.",
            "/v/site-packages/torch/_utils.py",
        )
        + "Original "
        + traceback("KeyError: 'label'")
    )
    assert job(rank_0=text).root_line.text == "KeyError: 'label'"


def test_ignored_exceptions_are_not_roots(job):
    text = "Exception ignored in: <function Loader.__del__ at 0x7f>\n" + traceback(
        "AttributeError: gone"
    )
    assert job(rank_0=text).reason == "Unknown"


@pytest.mark.parametrize(
    "dialect",
    [
        "step {0} loss 2.1",
        " iteration   {0}/  1000 | consumed samples: 5 | elapsed time per iteration (ms): 3.1 | lm loss: 2.1E+00",
        "[titan] 2026-11-21 01:30:19 - root - INFO - step: {0}  loss:  2.1  memory: 1GiB  tps: 99",
        "[2026-11-21 01:30:19,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={0}, skipped=0, lr=[0.001]",
        " 12%|#2        | {0}/1000 [00:03<00:20,  4.1it/s]",
    ],
)
def test_errors_followed_by_steps_were_survived(job, dialect):
    error = traceback("ConnectionResetError: [Errno 104] Connection reset by peer")
    before, after = (
        "".join(dialect.format(step) + "\n" for step in steps)
        for steps in (range(1, 9), range(9, 12))
    )
    found = job(rank_0=before + error + after, rank_1=KEY)
    assert found.reason == "KeyError"
    assert any("ConnectionResetError" in text for text in cited(found, "recovered"))
    assert job(rank_0=before + error + after).reason == "Unknown"
    assert job(rank_0=before + after + error).reason == "ConnectionError"


def test_buffered_steps_below_the_traceback_do_not_hide_it(job):
    observer = AT + "rank 0 (pid 7) exited with code 1 after step 37; it ended first\n"
    assert job(rank_0=traceback("KeyError: 'a'") + STEPS, observer=observer).reason == "KeyError"


def test_rotated_parts_are_one_log(tmp_path):
    (tmp_path / "rank-0.log.1").write_text(traceback("ConnectionResetError: [Errno 104] x"))
    (tmp_path / "rank-0.log").write_text(STEPS)
    assert diagnose(tmp_path).reason == "Unknown"
    shutil.move(tmp_path / "rank-0.log.1", tmp_path / "rank-0.log.2")
    (tmp_path / "rank-0.log").write_text(traceback("KeyError: 'a'"))
    (tmp_path / "rank-0.log.1").write_text(STEPS)
    found = diagnose(tmp_path)
    assert (found.reason, found.scope, found.root_line.line) == ("KeyError", {"rank": 0}, 4)


def test_checkpoint_passed_over_is_a_warning(job):
    warning = "holdfast: passed over checkpoint /ckpt/step-40: OSError: checksum of __0_0.distcp differs\n"
    assert job(rank_0=warning + STEPS + traceback("KeyError: 'a'")).reason == "KeyError"
    assert job(rank_0=warning).reason == "Unknown"


def test_gpu_hardware_outweighs_what_follows_and_names_the_gpu(job):
    kernel = (
        "[4.1] NVRM: Xid (PCI:0000:B3:00): 79, pid=1, name=python, GPU has fallen off the bus.\n"
    )
    found = job(
        rank_0=GLOO, rank_1=traceback("RuntimeError: CUDA error: unknown error"), dmesg=kernel
    )
    assert (found.reason, found.action, found.scope) == (
        "NodeFailure", "exclude_and_restart", {"gpu": "0000:b3:00"},
    )  # fmt: skip
    assert [one.reason for one in found.alternatives] == ["CUDAError"]


def test_cascade_alone_is_its_own_reason_with_little_confidence(job):
    found = job(rank_0=GLOO)
    assert found.reason == "ConnectionError"
    assert found.confidence < 0.5


def test_the_same_root_on_all_ranks(job):
    found = job(rank_0=traceback("KeyError: 'a'"), rank_1=traceback("KeyError: 'a'"))
    assert found.scope == {}
    found = job(rank_0=traceback("KeyError: 'a'"), rank_1=traceback("KeyError: 'a'"), rank_2="")
    assert found.scope == {"rank": [0, 1]}
    assert len(found.root_lines) == 2


def test_json_is_plain_and_whole(job):
    answer = job(rank_0=STEPS + GLOO, rank_1=KEY).to_json()
    assert json.loads(json.dumps(answer)) == answer
    assert list(answer) == [
        "schema", "version", "id", "outcome", "end_line", "reason", "category", "root_line", "root_lines", "evidence",
        "scope", "action", "restart_helps", "mitigation", "confidence", "alternatives", "similar", "decided_by",
        "notes", "fingerprint",
    ]  # fmt: skip
    assert (answer["schema"], answer["version"]) == ("holdfast.diagnosis", 2)
    assert set(answer["root_line"]) == {"file", "line", "text"}
    assert {one["role"] for one in answer["evidence"]} == {"root", "cascade", "teardown"}


def test_fingerprint(job):
    again = (
        KILLED.replace("4242", "999")
        .replace("37", "12")
        .replace("01:30", "02:44")
        .replace("rank 1", "rank 0")
    )
    not_begun = KILLED.replace("after step 37", "before its first step")
    prints = {job(observer=text).fingerprint for text in (KILLED, again, not_begun)}
    assert len(prints) == 1
    full = "OSError: [Errno 28] No space left on device: '/ckpt/.step-{0}.{1}.tmp'"
    first, second = (
        job(rank_0=traceback(full.format(*at))).fingerprint for at in ((40, "a1b2"), (60, "zzqx"))
    )
    assert first == second
    prints |= {first, *(job(rank_0=traceback(f"KeyError: '{key}'")).fingerprint for key in "ab")}
    assert len(prints) == 4


def test_nothing_there():
    with pytest.raises(NotFound, match=r"no log at /nowhere/x\.log\. Give"):
        diagnose("/nowhere/x.log")


def test_a_rank_exit_has_a_code_or_a_signal():
    with pytest.raises(ValueError, match="exactly one"):
        RankExit(rank=0, pid=1, at_monotonic_s=0.0)


def test_a_rank_that_leaves_silently_explains_its_peers_loss(job):
    observer = AT + "rank 1 (pid 4242) exited with code 1 after step 37; it ended first\n"
    found = job(rank_0=STEPS + GLOO, rank_1=STEPS, observer=observer)
    assert (found.decided_by, found.scope) == (("observer-exited",), {"rank": 1})
    spoken = job(rank_0=STEPS + GLOO, rank_1=STEPS + KEY, observer=observer)
    assert spoken.decided_by == ("python-key-error", "observer-exited")


def test_who_reports_a_lost_peer_is_not_named_as_the_rank_at_fault(job):
    assert job(rank_0=GLOO).scope == {}


def test_one_step_of_the_same_rank_or_three_of_another_survive_an_error(job):
    error = traceback("ConnectionResetError: [Errno 104] x")
    own = "[rank0]: ".join(("", *(STEPS + error).splitlines(keepends=True)))
    assert job(job=own + "[rank0]: step 38 loss 1\n").reason == "Unknown"
    others = STEPS + error.replace("\n", "\n[rank1]: ").join(("[rank1]: ", "\n"))
    assert job(job=others + "step 38 loss 1\nstep 39 loss 1\n").reason == "ConnectionError"
    assert job(job=others + "step 38 loss 1\nstep 39 loss 1\nstep 40 loss 1\n").reason == "Unknown"


@pytest.mark.parametrize(
    ("root", "said"),
    [
        ("KeyError: 'tokens'", "KeyError: 'tokens'."),
        (
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
            "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        ),
        ("__main__.DataBad: shard 7 is corrupt", "__main__.DataBad: shard 7 is corrupt."),
        (
            "holdfast.core.errors.BadUse: `every` is 0; use 1.",
            "ArgumentError: `every` is 0; use 1.",
        ),
    ],
)
def test_the_summary_is_one_sentence(job, root, said):
    assert job(rank_0=STEPS + traceback(root)).summary == said


def test_a_users_package_may_be_installed_like_a_library(job):
    """Test that files beside the running script are the user's, even in installed packages."""
    installed = "/venv/lib/python3.11/site-packages"
    frames = f'Traceback (most recent call last):\n  File "{installed}/trainer/train.py", line 9, in <module>\n    main()\n'  # noqa: E501
    own = job(
        rank_0=f'{frames}  File "{installed}/trainer/data.py", line 3, in check\n    f()\ntrainer.data.Bad: shard 7\n'
    )
    assert (own.category, own.restart_helps) == ("Script", False)
    library = job(
        rank_0=f'{frames}  File "{installed}/acme/a.py", line 3, in call\n    f()\nacme.Odd: x\n'
    )
    assert (library.category, library.restart_helps) == ("Framework", True)
