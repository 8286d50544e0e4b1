"""Test that compression keeps the root line, stays small and drops routine output."""

import random

import pytest
from failures import FAILURES

from holdfast.diagnose.explain.compress import LIMIT_BYTES, compress, worth_reading
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.logs.filters import parse_filters
from holdfast.diagnose.rules.packaged import packaged_rules


def compressed(path, **options):
    files = find_files([path]).files
    return compress(files, scan(files, packaged_rules()), **options)


@pytest.fixture(scope="session")
def noisy(dev_cases):
    return [(case, compressed(case["noisy"])) for case in dev_cases]


def test_a_line_that_states_the_root_is_kept_in_every_noisy_case(noisy):
    lost = [
        case["id"]
        for case, small in noisy
        if not {one.line for one in small.lines} & set(case["noisy_root_lines"])
    ]
    assert lost == []


def test_the_text_is_small_enough_for_a_model(noisy):
    assert max(len(small.text.encode()) for _, small in noisy) <= LIMIT_BYTES == 8192


def test_a_byte_stands_for_two_hundred(noisy):
    assert (
        sum(small.bytes_in for _, small in noisy)
        / sum(len(small.text.encode()) for _, small in noisy)
        >= 200
    )


def test_kept_lines_are_lines_of_the_log(noisy):
    for case, small in noisy:
        lines = case["noisy"].read_text(errors="replace").split("\n")
        assert small.bytes_in == case["noisy"].stat().st_size
        for one in small.lines:
            assert one.text[:40].strip() in lines[one.line - 1], (case["id"], one)


CHATTER = [
    f"[rank{number % 4}]: gathered bucket {number} of {number % 17} in {number * 7 % 91} ms"
    for number in range(8000)
]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_root_stays_wherever_it_stands(tmp_path, failure, place):
    at = int(place * len(CHATTER))
    lines = CHATTER[:at] + failure.woven(random.Random(2)) + CHATTER[at:]
    (tmp_path / "job.log").write_text("\n".join(lines))
    small = compressed(tmp_path)
    assert any(failure.root in one.text for one in small.lines)
    assert len(small.text.encode()) <= max(700, small.bytes_in / 200)


def test_what_no_rule_knows_and_is_seldom_stays(tmp_path):
    odd = "the flux capacitor of shard 7 is unaligned"
    (tmp_path / "job.log").write_text("\n".join([*CHATTER, odd, *CHATTER]))
    assert odd in compressed(tmp_path).text


def test_lines_that_differ_in_numbers_are_one_with_a_count(tmp_path):
    lines = [f"[rank{rank}]: RuntimeError: bucket {rank} is torn" for rank in range(64)]
    (tmp_path / "job.log").write_text("\n".join(CHATTER + lines))
    small = compressed(tmp_path)
    (one,) = [one for one in small.lines if "is torn" in one.text]
    assert one.count == 64
    assert f"{one.line} x64: " in small.text


def test_a_short_log_is_kept_whole(tmp_path):
    lines = ["starting", "reading shard 3", "KeyError: 'a'"]
    (tmp_path / "job.log").write_text("\n".join(lines))
    assert [one.text for one in compressed(tmp_path).lines] == lines


def test_files_have_headings_and_their_own_numbers(tmp_path):
    (tmp_path / "a.log").write_text("starting\nValueError: b\n")
    (tmp_path / "b.log").write_text("KeyError: 'a'\n")
    text = compressed(tmp_path).text
    assert text.splitlines() == [
        f"== {tmp_path}/a.log", "1: starting", "2: ValueError: b", f"== {tmp_path}/b.log", "1: KeyError: 'a'",
    ]  # fmt: skip


def test_a_line_that_files_share_is_cited_by_the_number_that_its_file_has(tmp_path):
    for name, before in (("a.log", 4), ("b.log", 2)):
        (tmp_path / name).write_text("step\n" * before + "odd words about the lattice\n")
    (shared,) = [one for one in compressed(tmp_path).lines if "lattice" in one.text]
    assert (shared.file, shared.line, shared.count) == (f"{tmp_path}/b.log", 3, 2)


def test_a_limit_is_kept(tmp_path):
    lines = [
        f"{'abcdefghij'[number % 10]}{'xyzuvw'[number % 6] * (number // 10)} failed"
        for number in range(300)
    ]
    (tmp_path / "job.log").write_text("\n".join(lines * 5))
    for limit in (300, 2000, 8192):
        small = compressed(tmp_path, limit_bytes=limit)
        assert 0 < len(small.text.encode()) <= limit


def test_long_lines_are_shortened(tmp_path):
    (tmp_path / "job.log").write_text("\n".join(["KeyError: '" + "ü" * 90_000 + "'", *CHATTER]))
    small = compressed(tmp_path)
    assert "KeyError" in small.text
    assert len(small.text.encode()) <= LIMIT_BYTES


def test_learned_filters_drop_what_they_know(tmp_path):
    odd = "the flux capacitor of shard 7 is unaligned"
    (tmp_path / "job.log").write_text("\n".join([*CHATTER, odd, "KeyError: 'a'"]))
    learned = parse_filters(
        "x",
        "[{id: flux, pattern: '^the flux capacitor', source: good runs, match: ['the flux capacitor x']}]",
    )
    text = compressed(tmp_path, learned=learned).text
    assert odd not in text
    assert "KeyError" in text


def test_a_filter_cannot_drop_the_root(tmp_path):
    (tmp_path / "job.log").write_text("\n".join([*CHATTER, "KeyError: 'a'"]))
    learned = parse_filters("x", "[{id: all, pattern: '.', source: a bad model, match: ['x']}]")
    assert "KeyError" in compressed(tmp_path, learned=learned).text


def test_nothing_to_compress(tmp_path):
    (tmp_path / "job.log").write_text("")
    small = compressed(tmp_path)
    assert (small.lines, small.bytes_in, small.text) == ((), 0, "")


def test_many_shapes_take_little_memory(tmp_path):
    import tracemalloc

    draw = random.Random(1)
    with (tmp_path / "job.log").open("w") as file:
        for _ in range(6000):
            file.write(f"{draw.getrandbits(4000):x}\n")
    files = find_files([tmp_path]).files
    tracemalloc.start()
    try:
        compress(files, [])
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 50 << 20


def test_a_model_is_asked_only_where_rules_leave_doubt(dev_answers):
    sure = [answer for _, answer in dev_answers["clean"] if answer.confidence > 0.8]
    assert sure
    assert not any(worth_reading(answer) for answer in sure if answer.reason != "Unknown")
