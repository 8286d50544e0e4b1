"""Test that the launcher's prefix is learned from the log, removed, and identifies processes."""

import random

import pytest

from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.scan import Scan
from holdfast.diagnose.logs.files import LogFile
from holdfast.diagnose.logs.lines import clean_line, learn_prefixes
from holdfast.diagnose.logs.prefixes import Prefixes, learnt
from holdfast.diagnose.rules.packaged import packaged_rules

RANKS = 4
WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath"]
FAILED = [
    "Traceback (most recent call last):",
    '  File "/job/train.py", line 8, in <module>',
    "    main()",
    '  File "/job/train.py", line 3, in main',
    "    return settings['warmup']",
    "KeyError: 'warmup'",
]
ORDINARY = [
    "building the tokenizer",
    "  layers: 32",
    "  width: 4096",
    "+ export MODE=fast",
    "wandb: tracking the run",
    "[INFO] reading shard 12 of 80",
    "/usr/lib/python3.11/warnings.py:31: UserWarning: old",
    "  warnings.warn(message)",
    "saving /ckpt/step-30",
    "evaluation gives 12.1",
    *(f"step {step} loss {3 - step / 100:.2f}" for step in range(40)),
]
FORMS = {
    "skypilot": lambda r, n: (
        f"({'head' if r == 0 else f'worker{r}'}, rank={r}, pid={8000 + 37 * r}, ip=10.0.{r}.7) "
    ),
    "sagemaker": lambda r, n: f"[1,mpirank:{r},algo-{r + 1}]<stdout>:",
    "stern": lambda r, n: f"train-7d9f-{'abcd'[r]}x2k pytorch ",
    "stern with marks": lambda r, n: f"train-7d9f-{'abcd'[r]}x2k » pytorch │ ",
    "pdsh": lambda r, n: f"frontier{r:05d}: ",
    "mpirun": lambda r, n: f"[{r}]<stderr>: ",
    "ray": lambda r, n: f"(TrainWorker pid={900 + r * 13}, ip=10.1.0.{r}) ",
    "ray actor": lambda r, n: f"(Actor[w{r}] pid={900 + r * 13}@10.1.0.{r}) ",
    "gang": lambda r, n: f"<gang:{r}@cab-{r // 2}> ",
    "time and cabinet": lambda r, n: (
        f"2026-01-02 03:{n // 60 % 60:02d}:{n % 60:02d}.123 cab{r // 2}/{r} ~ "
    ),
    "clock, node, pid": lambda r, n: (
        f"03:{n // 60 % 60:02d}:{n % 60:02d}|node-{r // 2}|{4000 + r}|> "
    ),
    "plain words": lambda r, n: f"{WORDS[r]}: ",
    "two in one log": lambda r, n: "[driver] " if r % 2 else f"[w{r}] ",
    "keys": lambda r, n: f"job=77 role=trainer rank={r} >> ",
    "counter": lambda r, n: f"#{n:06d} host-{r} # ",
}


def fluent(rank, number, text):
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'[{rank}] kube.train-{rank}: [[1700{number:06d}.123456, {{}}], {{"log"=>"{quoted}"}}]'


def interleaved(seed=0):
    """Return the lines of all ranks, interleaved at random, as pairs of rank and text."""
    draw = random.Random(seed)
    left = {rank: list(ORDINARY) + FAILED * (rank == 2) for rank in range(RANKS)}
    found = []
    while any(left.values()):
        rank = draw.choice([rank for rank, lines in left.items() if lines])
        found.append((rank, left[rank].pop(0)))
    return found


def cleaned(lines):
    prefixes = Prefixes()
    learn_prefixes(prefixes, "\n".join(lines).encode())
    return [clean_line(line.encode(), 1, prefixes) for line in lines]


def diagnosed(lines, tmp_path, blocks=1):
    scan = Scan(packaged_rules())
    file = LogFile(path=tmp_path / "job.log", group="job", part=0, rank=None)
    size = -(-len(lines) // blocks)
    for start in range(0, len(lines), size):
        scan.block(file, ("\n".join(lines[start : start + size]) + "\n").encode(), start + 1)
    return conclude(scan.events())


@pytest.mark.parametrize("form", [*FORMS.values(), None], ids=[*FORMS, "fluent-bit"])
def test_a_line_is_what_it_was_before_its_prefix(form):
    lines = interleaved()
    written = [
        fluent(rank, number, text) if form is None else form(rank, number) + text
        for number, (rank, text) in enumerate(lines)
    ]
    assert [line.text for line in cleaned(written)] == [text for _, text in lines]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_processes_are_told_from_each_other(form):
    """Test identification by rank, host or other fields; pdsh, for example, names only the host."""
    lines = interleaved()
    written = [form(rank, number) + text for number, (rank, text) in enumerate(lines)]
    voices = {}
    for (rank, _), line in zip(lines, cleaned(written), strict=True):
        voices.setdefault((line.rank, line.local_rank, line.host, line.process), set()).add(rank)
    if form is not FORMS["two in one log"]:
        assert all(len(ranks) == 1 for ranks in voices.values())
    assert len(voices) >= 3


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_root_is_the_same_with_and_without_a_prefix(form, tmp_path):
    lines = interleaved(1)
    with_prefix = [form(rank, number) + text for number, (rank, text) in enumerate(lines)]
    plain = [text for rank, text in lines if rank == 2]
    found, alone = diagnosed(with_prefix, tmp_path), diagnosed(plain, tmp_path)
    assert alone.reason == "KeyError"
    assert (found.reason, found.root_text) == (alone.reason, alone.root_text)


def test_a_prefix_that_begins_later_is_learnt_from_a_later_block(tmp_path):
    before = [f"{word} is set up" for word in WORDS]
    lines = before + [f"<gang:{rank}@cab-1> {text}" for rank, text in interleaved(2)]
    assert diagnosed(lines, tmp_path, blocks=8).reason == "KeyError"


def test_a_prefix_is_learnt_from_a_log_that_is_read_line_by_line(tmp_path):
    lines = [f"<gang:{rank}@cab-1> {text}" for rank, text in interleaved(3)]
    assert diagnosed(lines, tmp_path, blocks=len(lines)).reason == "KeyError"


def test_the_rank_is_the_field_that_says_so():
    lines = [f"<gang:{rank}@cab-{rank // 2}> {text}" for rank, text in interleaved()]
    assert [line.rank for line in cleaned(lines)] == [rank for rank, _ in interleaved()]


def test_numbers_that_every_host_counts_from_0_are_local_ranks():
    lines = [f"<{rank % 2}@cab-{rank // 2}> {text}" for rank, text in interleaved()]
    found = cleaned(lines)
    assert {line.rank for line in found} == {None}
    assert {(line.host, line.local_rank) for line in found} == {
        ("cab-0", 0), ("cab-0", 1), ("cab-1", 0), ("cab-1", 1),
    }  # fmt: skip


@pytest.mark.parametrize(
    "lines",
    [
        [text for _, text in interleaved()],
        [f"iteration {at}: loss {3 - at / 1e3:.3f} on cab-{at % 8}" for at in range(500)],
        [f"ValueError: {'x' * at} is odd" for at in range(60)],
        [f"[INFO] {text}" for text in ("a", "b", "c")],
        [f"{at} {at * 2} {at * 3} float" for at in range(100)] + ["the end"],
        [f"  {word}: {at}" for at, word in enumerate(WORDS * 3)],
        [f"| {word:<40} |" for word in WORDS * 3],
        [f"[E817 x.cpp:{at}] {word} failed" for at, word in enumerate(WORDS)],
        [f" {at}%|{'█' * (at // 4)}| {at}/100 [00:{at % 60:02d}<00:10]" for at in range(100)],
    ],
    ids=[
        "no prefix",
        "progress",
        "exceptions",
        "few",
        "columns",
        "settings",
        "box",
        "source",
        "bar",
    ],
)
def test_what_a_program_says_is_no_prefix(lines):
    prefixes = Prefixes()
    learn_prefixes(prefixes, "\n".join(lines).encode())
    assert prefixes.patterns == ()


def test_severity_and_source_stay():
    lines = [f"cab-{rank} # INFO {text}" for rank, text in interleaved()]
    assert {line.text.split()[0] for line in cleaned(lines)} == {"INFO"}


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_are_learnt_from(seed):
    draw = random.Random(seed)
    prefixes = Prefixes()
    block = b"\n".join(
        bytes(draw.choices(b"[](){}<>:|= \"'\\\xe2\x94\x82a1-.", k=30)) for _ in range(200)
    )
    learn_prefixes(prefixes, block)
    for raw in block.split(b"\n"):
        clean_line(raw, 1, prefixes)
    assert learnt([]) == []
