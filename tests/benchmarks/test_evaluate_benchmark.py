"""The parts of `benchmarks/evaluate.py` that can be checked without measuring. No timings."""

import asyncio
import collections
import importlib
import json
import math
from pathlib import Path

import pytest

from holdfast.core.errors import BadUse
from holdfast.evaluate.types.suite import load_suite

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_the_suite_is_the_same_for_a_seed_and_has_every_kind(part, monkeypatch, tmp_path):
    suite60 = part("evaluation.suite60")
    monkeypatch.setattr(suite60, "_make_models", lambda *_: None)
    one, two, other = (
        suite60.make_suite(tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert len(one.tasks) == 60
    assert one.tasks == two.tasks
    assert one.tasks != other.tasks
    assert collections.Counter(task.kind for task in one.tasks) == dict(suite60.KINDS)
    documents = sorted(task.documents for task in one.tasks)
    assert sum(documents[-15:]) > sum(documents) / 2, "a quarter of the tasks has most of the work"
    for name in ("choice_01_test.jsonl", "generate_04_train.jsonl"):
        assert (one.task_folder / name).read_bytes() == (two.task_folder / name).read_bytes()
    loaded = load_suite(str(one.toml))
    assert [entry.name for entry in loaded.entries] == [task.name for task in one.tasks]
    assert [entry.chat_template for entry in loaded.entries] == [
        task.chat_template for task in one.tasks
    ]
    fewshot = [
        json.loads(path.read_text()).get("num_fewshot", 0)
        for path in one.task_folder.glob("*.yaml")
    ]
    assert sum(shots > 0 for shots in fewshot) > 10


def test_a_few_tasks_are_of_all_kinds(part, monkeypatch, tmp_path):
    suite60 = part("evaluation.suite60")
    monkeypatch.setattr(suite60, "_make_models", lambda *_: None)
    assert {task.kind for task in suite60.make_suite(tmp_path, tasks=4).tasks} == {
        kind for kind, _ in suite60.KINDS
    }


def test_the_papers_trials_hold_every_sample_once(part):
    miniature, paper = part("evaluation.miniature"), part("evaluation.paper")
    mini = miniature.miniature(tasks=12).on(4)
    trials, predicted_s = paper.plan(mini)
    seen = collections.Counter(
        (task, place)
        for trial in trials
        for task, first, last in trial.parts
        for place in range(first, last)
    )
    assert set(seen.values()) == {1}
    assert len(seen) == sum(len(task) for task in mini.workload.tasks)
    heavy = [trial.metric_s for trial in trials]
    assert heavy == sorted(heavy, reverse=True), "what has long metrics starts first"
    assert max(heavy) <= paper.LONGEST_METRIC_S * mini.pace
    assert predicted_s > mini.cluster.engine_start_s


def test_jobs_of_metrics_wait_for_their_trial_and_for_a_slot(part):
    paper = part("evaluation.paper")
    assert paper._with_metrics([(1.0, 5.0), (2.0, 5.0), (9.0, 0.0)], jobs=2) == 9.0
    assert paper._with_metrics([(1.0, 5.0), (2.0, 5.0)], jobs=1) == 11.0


def test_an_emulated_second_is_shorter_and_nothing_else(part):
    miniature = part("evaluation.miniature")
    slow, fast = miniature.miniature(pace=1.0), miniature.miniature(pace=0.1)
    assert [len(task) for task in slow.workload.tasks] == [
        len(task) for task in fast.workload.tasks
    ]
    for whole, tenth in (
        (slow.cluster.engine_start_s, fast.cluster.engine_start_s),
        (slow.cluster.curve.alone_s(100, 100), fast.cluster.curve.alone_s(100, 100)),
        (slow.cluster.fetch_s(1e6), fast.cluster.fetch_s(1e6)),
        (sum(slow.workload.tasks[-1].metric_s), sum(fast.workload.tasks[-1].metric_s)),
    ):
        assert math.isclose(tenth, whole / 10, rel_tol=1e-6)


def test_storage_serves_ranges_and_counts_them(part, tmp_path):
    storage = part("evaluation.storage")
    (tmp_path / "weights").write_bytes(bytes(range(200)))

    async def ask(port, *lines):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(("\r\n".join(lines) + "\r\nConnection: close\r\n\r\n").encode())
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer.partition(b"\r\n\r\n")

    async def everything():
        ranges = storage.RangeServer(tmp_path, 0.0)
        server = await asyncio.start_server(ranges.attend, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            head, _, body = await ask(port, "GET /weights HTTP/1.1", "Range: bytes=10-19")
            assert head.startswith(b"HTTP/1.1 206")
            assert b"Content-Range: bytes 10-19/200" in head
            assert body == bytes(range(10, 20))
            assert (await ask(port, "HEAD /weights HTTP/1.1"))[2] == b""
            assert (await ask(port, "GET /none HTTP/1.1"))[0].startswith(b"HTTP/1.1 404")
            assert (await ask(port, "GET /../secret HTTP/1.1"))[0].startswith(b"HTTP/1.1 404")
            assert (await ask(port, "GET /.sent HTTP/1.1"))[2] == b"10"

    asyncio.run(everything())


def test_numbers_that_differ_in_one_bit_are_found(part):
    differences = part("evaluation.stock").differences
    theirs = {"t": {"acc,none": 0.1, "acc_stderr,none": "N/A", "p,none": math.nan}}
    assert differences({"t": dict(theirs["t"])}, theirs) == []
    assert (
        len(differences({"t": {**theirs["t"], "acc,none": math.nextafter(0.1, 1.0)}}, theirs)) == 1
    )
    assert len(differences({}, theirs)) == 3


def test_a_machine_that_permits_no_sandbox_is_told_in_a_row(part, monkeypatch, tmp_path, capsys):
    sandbox, machine = part("evaluation.sandbox"), part("common.machine")

    def refuses(*_):
        raise BadUse("Generated code cannot be run safely on this machine (why).")

    monkeypatch.setattr(sandbox, "Sandbox", refuses)
    for quick, met in ((True, None), (False, False)):
        quiet = machine.Quiet(patience_s=0, window_s=0)
        (row,) = sandbox.rows(tmp_path, quiet, quick=quick, rounds=1, seed=0)
        assert (row.measure, row.ours, row.met) == (
            "hostile programs contained: this machine permits no sandbox",
            None,
            met,
        )
    assert (
        "No hostile program was run. Generated code cannot be run safely" in capsys.readouterr().err
    )


def test_parts_keep_the_rows_of_others_and_a_part_that_fails_its_own(part, monkeypatch, tmp_path):
    parts, table = part("common.parts"), part("common.table")
    file = tmp_path / "rows.json"
    row = {
        "measure": "bound: m",
        "ours": 1,
        "peer": None,
        "limit": None,
        "unit": "s",
        "must": None,
        "met": None,
    }
    other = {**row, "measure": "scale: m"}
    file.write_text(json.dumps([row, other]))

    def rows_of(name, folder):
        assert folder.is_dir()
        yield table.Row(measure="first", ours=1.0, unit="s")
        if name == "bound":
            raise ValueError("it broke")

    monkeypatch.setattr(parts, "kill_descendants", lambda: None)
    failures = []
    rows = parts.run_parts(["bound", "stream"], rows_of, file=file, failures=failures)
    assert [(one.measure, one.met) for one in rows] == [
        ("bound: first", None), ("bound: ran to its end", False), ("stream: first", None),
    ]  # fmt: skip
    assert failures == ["FAILED: bound: it broke"]
    assert json.loads(file.read_text()) == [other, *(one.to_json() for one in rows)]
    parts.run_parts(["stream"], rows_of, file=tmp_path / "new" / "rows.json", failures=failures)
    assert len(json.loads((tmp_path / "new" / "rows.json").read_text())) == 1
