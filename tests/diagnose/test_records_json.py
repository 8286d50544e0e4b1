"""Test JSON logs: torch elastic's error files, journal, containers, loggers, broken JSON."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.diagnose import diagnose

STACK = "Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"
XID = "NVRM: Xid (PCI:0000:4e:00): 79, pid=7301, name=python, GPU has fallen off the bus."


def write(path, *entries):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


# --- torch elastic -------------------------------------------------------------------------------


def elastic(stack=STACK):
    """Return a record as torch's `elastic/multiprocessing/errors/error_handler.py` writes one."""
    return {
        "message": {
            "message": "KeyError: 'a'",
            "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"},
        }
    }


def test_an_error_file_tells_exception_and_rank(tmp_path):
    write(tmp_path / "none_x7ab" / "attempt_0" / "3" / "error.json", elastic())
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 3})
    assert found.root_line.line == 1


def test_the_error_file_and_the_log_of_a_rank_tell_one_failure(tmp_path):
    write(tmp_path / "attempt_0" / "3" / "error.json", elastic())
    (tmp_path / "attempt_0" / "3" / "stderr.log").write_text(STACK)
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 3})
    assert found.alternatives == ()


def test_an_error_file_of_a_peer_is_not_the_root(tmp_path):
    """Test a peer's error file that is older than the root's."""
    lost = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:5"
    write(
        tmp_path / "attempt_0" / "0" / "error.json", elastic(STACK.replace("KeyError: 'a'", lost))
    )
    write(tmp_path / "attempt_0" / "1" / "error.json", elastic())
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 1})


def test_an_error_file_whose_message_is_a_text(tmp_path):
    write(tmp_path / "error.json", {"message": "KeyError: 'a'"})
    assert diagnose(tmp_path).reason == "KeyError"


@pytest.mark.parametrize(
    "message",
    [
        None,
        3,
        [],
        {},
        {"extraInfo": 3},
        {"extraInfo": []},
        {"extraInfo": "x"},
        {"extraInfo": {"py_callstack": 3}},
        {"message": None},
    ],
    ids=str,
)
def test_odd_error_files_are_no_crash(tmp_path, message):
    write(tmp_path / "error.json", {"message": message})
    write(tmp_path / "attempt_0" / "1" / "error.json", elastic())
    assert diagnose(tmp_path).reason == "KeyError"


# --- journalctl -o json --------------------------------------------------------------------------


def journal(message, **fields):
    return {
        "__REALTIME_TIMESTAMP": "1700000000000000",
        "_HOSTNAME": "gn17",
        "_TRANSPORT": "kernel",
        "SYSLOG_IDENTIFIER": "kernel",
        "PRIORITY": "3",
        "MESSAGE": message,
        **fields,
    }


def test_the_kernels_journal_names_gpu_and_host(tmp_path):
    log = write(tmp_path / "journal.json", journal("usb 1-1: new device"), journal(XID))
    found = diagnose(log)
    assert (found.reason, found.root_line.line) == ("NodeFailure", 2)
    assert found.scope == {"gpu": "0000:4e:00", "node": "gn17"}


def test_a_journal_of_one_entry(tmp_path):
    assert diagnose(write(tmp_path / "journal.json", journal(XID))).reason == "NodeFailure"


def test_a_message_that_is_no_text_comes_as_numbers(tmp_path):
    log = write(
        tmp_path / "journal.json", journal("fine"), journal(list(b"\x1b[31m" + XID.encode()))
    )
    assert diagnose(log).reason == "NodeFailure"


def test_a_message_that_is_too_long_is_null(tmp_path):
    log = write(tmp_path / "journal.json", journal(None), journal([None, -1, 999]), journal(XID))
    assert diagnose(log).root_line.line == 3


def test_a_message_of_several_lines(tmp_path):
    log = write(
        tmp_path / "journal.json",
        journal("started", _TRANSPORT="stdout"),
        journal(STACK, _TRANSPORT="stdout"),
    )
    found = diagnose(log)
    assert (found.reason, found.root_line.line) == ("KeyError", 2)


# --- containers ----------------------------------------------------------------------------------


def docker(line, stream="stderr"):
    return {"log": line, "stream": stream, "time": "2026-01-01T00:00:00.000000000Z"}


def test_dockers_json_lines_keep_tracebacks_and_ranks(tmp_path):
    lines = [
        docker("step 1 loss 2.1\n", "stdout"),
        *(docker(line) for line in STACK.splitlines(keepends=True)),
    ]
    write(tmp_path / "rank-3.log", *lines)
    found = diagnose(tmp_path)
    assert (found.reason, found.root_line.line, found.scope) == ("KeyError", 5, {"rank": 3})


def test_dockers_json_lines_with_ranks_of_their_own(tmp_path):
    lines = [docker(f"[rank5]: {line}") for line in STACK.splitlines(keepends=True)]
    assert diagnose(write(tmp_path / "abc-json.log", *lines)).scope == {"rank": 5}


def test_dockers_log_of_one_line(tmp_path):
    assert (
        diagnose(write(tmp_path / "abc-json.log", docker("KeyError: 'a'\n"))).reason == "KeyError"
    )


def test_errors_that_dockers_steps_follow_were_survived(tmp_path):
    steps = [docker(f"step {step} loss 2.1\n") for step in range(1, 9)]
    error = [docker(line) for line in STACK.splitlines(keepends=True)]
    assert diagnose(write(tmp_path / "a.log", *steps[:3], *error, *steps[3:])).reason == "Unknown"
    assert diagnose(write(tmp_path / "a.log", *steps, *error)).reason == "KeyError"


def test_lines_of_the_container_runtime_interface(tmp_path):
    """Test `/var/log/pods/…/0.log`, with time, stream and a tag before each line."""
    log = tmp_path / "0.log"
    log.write_text(
        "".join(f"2026-01-01T00:00:00.000000000Z stderr F {line}\n" for line in STACK.splitlines())
    )
    found = diagnose(log)
    assert (found.reason, found.root_line.line) == ("KeyError", 4)


# --- loggers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        {"level": "error", "msg": "training failed\n" + STACK},
        {"level": "ERROR", "message": "training failed", "exc_info": STACK},
        {"levelname": "ERROR", "message": STACK, "rank": 3},
    ],
    ids=["in the message", "beside it", "alone"],
)
def test_a_traceback_within_an_entry_of_a_json_logger(tmp_path, entry):
    steps = [{"level": "info", "message": f"step {step} loss 2.1"} for step in range(4)]
    found = diagnose(write(tmp_path / "rank-3.log", *steps, entry))
    assert (found.reason, found.root_line.line, found.scope) == ("KeyError", 5, {"rank": 3})


def test_an_entry_that_is_an_error_by_its_level_alone(tmp_path):
    """Test words that no rule matches, at the level of an error."""
    quiet = [{"level": "info", "message": f"opening shard {number}"} for number in range(4)]
    found = diagnose(
        write(
            tmp_path / "job.log", *quiet, {"level": "fatal", "message": "the lease of shard 7 went"}
        )
    )
    assert (found.reason, found.root_line.line) == ("Unknown", 5)


@pytest.mark.parametrize("level", ["error", "ERROR", "critical", "FATAL"])
def test_the_level_does_not_hide_what_is_said(tmp_path, level):
    quiet = [{"level": "info", "message": f"opening shard {number}"} for number in range(4)]
    found = diagnose(
        write(tmp_path / "job.log", *quiet, {"level": level, "message": "KeyError: 'a'"})
    )
    assert (found.reason, found.root_text) == ("KeyError", "KeyError: 'a'")


def test_an_error_in_words_that_no_rule_knows_is_found_as_in_a_plain_log(tmp_path):
    """Test the equivalent of the line `ERROR coordinator gave up`."""
    quiet = [{"level": "info", "msg": f"opening shard {number}"} for number in range(4)]
    found = diagnose(
        write(tmp_path / "job.log", *quiet, {"level": "error", "msg": "coordinator gave up"})
    )
    assert (found.reason, found.root_line.line) == ("Unknown", 5)


def test_a_line_of_json_is_cited_once(tmp_path):
    """Test a line that contains a chain of tracebacks."""
    chain = (
        STACK
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + STACK.replace("'a'", "'b'")
    )
    quiet = [{"level": "info", "message": f"opening shard {number}"} for number in range(4)]
    found = diagnose(write(tmp_path / "job.log", *quiet, {"level": "error", "message": chain}))
    assert found.reason == "KeyError"
    for cited in (found.root_lines, found.evidence):
        assert [(one.file, one.line) for one in cited] == [(str(tmp_path / "job.log"), 5)]


def test_numbers_of_lines_are_those_of_an_editor(tmp_path):
    """Test separators other than the line feed, which end no line."""
    odd = '{"level": "info", "message": "a\u2028b\x0bc\x85d"}\n'
    log = tmp_path / "rank-0.log"
    log.write_text(odd * 4 + json.dumps({"level": "error", "message": STACK}) + "\n")
    assert diagnose(log).root_line.line == 5


def test_packed_json_lines(tmp_path):
    """Test logs as Docker rotates them."""
    lines = "".join(json.dumps(docker(line)) + "\n" for line in STACK.splitlines(keepends=True))
    (tmp_path / "abc-json.log.1.gz").write_bytes(gzip.compress(lines.encode()))
    found = diagnose(tmp_path)
    assert (found.reason, found.root_line.line) == ("KeyError", 4)


def test_many_json_lines_take_little_memory(tmp_path, measured):
    log = tmp_path / "abc-json.log"
    line = (json.dumps(docker("x" * 200 + " ordinary\n")) + "\n").encode()
    with log.open("wb") as file:
        for _ in range(20):
            file.write(line * ((1 << 20) // len(line)))
        file.write(
            "".join(
                json.dumps(docker(line)) + "\n" for line in STACK.splitlines(keepends=True)
            ).encode()
        )
    reason, _, grown_mib = measured(log)
    assert reason == "KeyError"
    assert grown_mib < 100


def test_a_large_json_file_takes_little_memory(tmp_path, measured):
    (tmp_path / "sacct.json").write_text('{"jobs": [' + "[[]]," * 4_000_000 + "[]]}")
    (tmp_path / "rank-0.log").write_text(STACK)
    reason, _, grown_mib = measured(tmp_path)
    assert reason == "KeyError"
    assert grown_mib < 250


def test_lines_of_text_among_json_stay(tmp_path):
    """Test the plain output of a library, and of Python at its exit."""
    log = tmp_path / "rank-0.log"
    log.write_text('{"level": "info", "message": "start"}\n' * 9 + STACK)
    found = diagnose(log)
    assert (found.reason, found.root_line.line) == ("KeyError", 13)


@pytest.mark.parametrize(
    "first",
    ["[rank0]: starting", "[2026-01-01 00:00:00,100] [INFO] start", "{not json", "[]", "{}"],
)
def test_a_plain_log_that_begins_like_json_stays_one(tmp_path, first):
    log = tmp_path / "rank-0.log"
    log.write_text(first + '\nsent {"message": "hi"}\n{"message": "hi"}\n' + STACK)
    found = diagnose(log)
    assert (found.reason, found.root_line.line) == ("KeyError", 7)


# --- broken --------------------------------------------------------------------------------------

BROKEN = {
    "number": b'{"message": "x"}\n5\n',
    "text": b'{"MESSAGE": "x"}\n"MESSAGE"\n',
    "null": b'{"MESSAGE": "x"}\nnull\n',
    "digits": b'{"message": ' + b"1" * 5000 + b"}",
    "digits in a line": b'{"message": "x"}\n{"message": ' + b"1" * 5000 + b"}\n",
    "deep": b'{"message": ' + b"[" * 200_000,
    "deep object": b'{"message": ' * 50_000,
    "cut": b'{"jobs": [{"job_id": 1, "state": {"current": ["NODE_',
    "lone surrogate": b'{"message": "\\ud800"}\n{"message": "\\udfff"}\n',
    "zero": b'{"message": "a\\u0000b"}',
    "bad utf-8": b'{"message": "\xff\xfe"}',
    "infinite": b'{"jobs": [{"state": Infinity, "job_id": NaN}]}',
    "empty keys": b'{"": "", "message": ""}',
    "utf-16": '{"message": "x"}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"message": "x"}',
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_json_is_no_crash(tmp_path, data):
    (tmp_path / "a.json").write_bytes(data)
    (tmp_path / "b.log").write_bytes(data)
    (tmp_path / "rank-1.log").write_text(STACK)
    found = diagnose([tmp_path, tmp_path / "a.json"])
    assert (found.reason, found.scope) == ("KeyError", {"rank": 1})


def test_a_surrogate_in_the_root_can_be_printed(tmp_path):
    log = write(tmp_path / "a.json", {"log": "fine\n"}, {"log": "KeyError: '\ud800'\n"})
    found = diagnose(log)
    assert found.reason == "KeyError"
    json.dumps(found.to_json(), ensure_ascii=False).encode()
    assert found.fingerprint


KEYS = [
    "jobs",
    "message",
    "MESSAGE",
    "log",
    "msg",
    "state",
    "current",
    "steps",
    "step",
    "nodes",
    "exit_code",
    "signal",
]
_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["FAILED", STACK]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*KEYS, "extraInfo", "py_callstack", "_TRANSPORT", "_HOSTNAME"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(entries=st.lists(_json, min_size=1, max_size=3), indent=st.sampled_from([None, 1]))
def test_any_json_gets_an_answer(tmp_path_factory, entries, indent):
    log = tmp_path_factory.mktemp("log") / "a.log"
    log.write_text("\n".join(json.dumps(entry, indent=indent) for entry in entries))
    json.dumps(diagnose(log).to_json())


def test_json_behind_a_prefix_is_read_and_names_the_rank(tmp_path):
    said = json.dumps({"level": "error", "rank": 2, "msg": "training failed", "exc_info": STACK})
    (tmp_path / "job.log").write_text(f"2026-01-02T03:04:05.123456789Z stderr F {said}\n")
    found = diagnose(tmp_path)
    assert (found.reason, found.scope, found.root_text) == (
        "KeyError",
        {"rank": 2},
        "KeyError: 'a'",
    )


def test_ranks_that_log_json_in_turn_are_parted(tmp_path):
    """Test two ranks whose tracebacks alternate line by line."""
    stacks = {rank: STACK.replace("'a'", f"'of {rank}'").splitlines() for rank in (0, 1)}
    lines = [
        json.dumps({"rank": rank, "message": stack[at]})
        for at in range(len(STACK.splitlines()))
        for rank, stack in stacks.items()
    ]
    # Not all ranks fail in the same way.
    lines.append(json.dumps({"rank": 2, "message": "ValueError: another"}))
    (tmp_path / "job.log").write_text("\n".join(lines) + "\n")
    assert diagnose(tmp_path).scope == {"rank": [0, 1]}
