import json
import tracemalloc

import pytest
from normalised_rows import notes_of, read_file, unix_s

from holdfast.trace.errors import BadTrace
from holdfast.trace.sources import json_stream
from holdfast.trace.sources.json_stream import json_objects
from holdfast.trace.sources.slurm.sacct import SOURCE


def tres(gpus: int, kind: str = "") -> list[dict]:
    items = [
        {"type": "cpu", "name": None, "id": 1, "count": 16},
        {"type": "mem", "name": "", "id": 2, "count": 65536},
        {"type": "energy", "name": None, "id": 3, "count": None},
        {"type": "node", "name": "", "id": 4, "count": 2},
        {"type": "gres", "name": "gpu", "id": 1001, "count": gpus},
    ]
    return (
        [*items, {"type": "gres", "name": f"gpu:{kind}", "id": 1002, "count": gpus}]
        if kind
        else items
    )


def of_22_05(**changes) -> dict:
    """Make a job as data parser dbv0.0.38 prints it."""
    return {
        "account": "lab",
        "allocation_nodes": 2,
        "array": {
            "job_id": 0,
            "limits": {"max": {"running": {"tasks": 0}}},
            "task": None,
            "task_id": None,
        },
        "association": {"account": "lab", "cluster": "alpha", "partition": None, "user": "ann"},
        "cluster": "alpha",
        "time": {
            "elapsed": 240,
            "eligible": 100,
            "end": 400,
            "start": 160,
            "submission": 100,
            "suspended": 0,
        },
        "exit_code": {"status": "SUCCESS", "return_code": 0},
        "het": {"job_id": 0, "job_offset": None},
        "job_id": 7,
        "name": 'a|b "c"\n\u00fc',
        "nodes": "n[1-2]",
        "partition": "gpu",
        "state": {"current": "COMPLETED", "reason": "None"},
        "steps": [],
        "tres": {"allocated": tres(8), "requested": tres(8)},
        "user": "ann",
        **changes,
    }


def number(value: int | None) -> dict:
    return {"set": value is not None, "infinite": False, "number": value or 0}


def of_24_05(**changes) -> dict:
    """Make a job as data parser v0.0.41 prints it: lists of words, and objects for numbers."""
    return of_22_05(
        array={
            "job_id": 0,
            "limits": {"max": {"running": {"tasks": 0}}},
            "task": "",
            "task_id": number(None),
        },
        exit_code={
            "status": ["SUCCESS"],
            "return_code": number(0),
            "signal": {"id": number(None), "name": ""},
        },
        het={"job_id": 0, "job_offset": number(None)},
        state={"current": ["COMPLETED"], "reason": "None"},
        restart_cnt=0,
        **changes,
    )


@pytest.fixture
def write(tmp_path):
    def written(*jobs: dict, indent: int | None = 2) -> object:
        path = tmp_path / "jobs.json"
        meta = {"plugin": {"type": "openapi/dbv0.0.38", "name": "Slurm OpenAPI DB v0.0.38"}}
        path.write_text(
            json.dumps({"meta": meta, "errors": [], "jobs": jobs, "warnings": []}, indent=indent)
        )
        return path

    return written


@pytest.mark.parametrize("form", [of_22_05, of_24_05])
def test_a_job_of_each_version(write, form):
    path = write(form(tres={"allocated": tres(8, "a100"), "requested": tres(8)}))
    assert SOURCE.recognises(path)
    reading, (row,) = read_file(SOURCE, path)
    assert [unix_s(row.pop(name)) for name in ("submit_at", "start_at", "end_at")] == [
        100,
        160,
        400,
    ]
    assert row == {
        "cluster": "alpha", "job_id": "7", "attempt": 0, "name": 'a|b "c"\nü', "username": "ann", "pool": "gpu",
        "state": "COMPLETED", "reason": None, "exit_code": 0, "run_s": 240.0, "queue_s": 60.0,
        "reported_duration_s": 240.0, "gpu_num": 8.0, "node_num": 2, "cpu_num": 16.0, "mem_gb": 64.0,
        "gpu_model": "a100", "nodes": ["n1", "n2"], "zone_offset": "",
    }  # fmt: skip
    assert not reading.notes
    assert reading.clusters[0].name == "alpha"


@pytest.mark.parametrize(
    ("exit_code", "code"),
    [
        ({"status": "ERROR", "return_code": 3}, 3),
        (
            {
                "status": "SIGNALED",
                "return_code": None,
                "signal": {"signal_id": 9, "name": "Killed"},
            },
            137,
        ),
        (
            {
                "status": ["ERROR"],
                "return_code": number(3),
                "signal": {"id": number(None), "name": ""},
            },
            3,
        ),
        (
            {
                "status": ["SIGNALED"],
                "return_code": number(None),
                "signal": {"id": number(15), "name": "TERM"},
            },
            143,
        ),
        (
            {
                "status": ["PENDING"],
                "return_code": number(None),
                "signal": {"id": number(None), "name": ""},
            },
            None,
        ),
        (None, None),
    ],
)
def test_exit_codes_of_each_version(write, exit_code, code):
    _, (row,) = read_file(
        SOURCE, write(of_24_05() | {"exit_code": exit_code, "state": {"current": ["FAILED"]}})
    )
    assert (row["state"], row["exit_code"]) == ("FAILED", code)


def test_the_exit_code_that_22_05_loses_is_left_empty(write):
    reading, (row,) = read_file(
        SOURCE, write(of_22_05(state={"current": "FAILED", "reason": "NonZeroExitCode"}))
    )
    assert (row["exit_code"], row["reason"]) == (None, "NonZeroExitCode")
    assert notes_of(reading) == {"slurm-exit-code-lost": 1}


def test_the_start_that_early_versions_print_as_eligible_is_mended(write):
    time = {
        "elapsed": 240,
        "eligible": 120,
        "end": 400,
        "start": 120,
        "submission": 100,
        "suspended": 10,
    }
    reading, (row,) = read_file(SOURCE, write(of_22_05(time=time)))
    assert (unix_s(row["start_at"]), row["queue_s"], row["run_s"]) == (150, 50, 250)
    assert notes_of(reading) == {"slurm-eligible-as-start": 1}


def test_jobs_that_wait_run_or_never_ran(write):
    none = {"allocated": [], "requested": tres(4)}
    path = write(
        of_22_05(
            job_id=1, tres=none, nodes="None assigned", state={"current": "PENDING", "reason": "Priority"},
            time={"elapsed": 0, "eligible": 100, "end": 0, "start": 0, "submission": 100, "suspended": 0},
        ),
        of_22_05(
            job_id=2, state={"current": ["RUNNING", "COMPLETING"], "reason": "None"},
            time={"elapsed": 50, "eligible": 100, "end": 0, "start": 160, "submission": 100, "suspended": 0},
        ),
        of_22_05(
            job_id=3, tres=none, nodes="None assigned", state={"current": "CANCELLED", "reason": "None"},
            time={"elapsed": 0, "eligible": 100, "end": 300, "start": 300, "submission": 100, "suspended": 0},
        ),
    )  # fmt: skip
    reading, rows = read_file(SOURCE, path)
    assert [
        (row["state"], unix_s(row["start_at"]), unix_s(row["end_at"]), row["gpu_num"])
        for row in rows
    ] == [
        ("PENDING", None, None, 4),
        ("RUNNING", 160, None, 8),
        ("CANCELLED", None, 300, 4),
    ]
    assert notes_of(reading) == {"slurm-never-started": 1}


@pytest.mark.parametrize("offset", [1, number(1)])
def test_arrays_heterogeneous_jobs_steps_and_requeues(write, offset):
    requeued = {
        "elapsed": 20,
        "eligible": 500,
        "end": 620,
        "start": 600,
        "submission": 500,
        "suspended": 0,
    }
    path = write(
        of_22_05(job_id=1, array={"job_id": 5, "task_id": 0, "task": None}, steps=[{}, {}]),
        of_22_05(job_id=2, array={"job_id": 2, "task_id": None, "task": "0x1E"}),
        of_22_05(job_id=3, het={"job_id": 3, "job_offset": 0}),
        of_22_05(job_id=4, het={"job_id": 3, "job_offset": offset}),
        of_22_05(job_id=6, time=requeued),
        of_22_05(job_id=6, state={"current": "REQUEUED", "reason": "None"}),
    )
    reading, rows = read_file(SOURCE, path)
    assert [(row["job_id"], row["attempt"]) for row in rows] == [
        *(("1234"[i], 0) for i in range(4)),
        ("6", 0),
        ("6", 1),
    ]
    assert notes_of(reading) == {
        "slurm-steps": 2, "slurm-pending-arrays": 1, "slurm-heterogeneous": 2, "slurm-requeued": 1,
    }  # fmt: skip


def test_values_that_stand_for_none(write):
    items = [{"type": "gres", "name": "gpu", "id": 1001, "count": 0xFFFFFFFE}]
    _, (row,) = read_file(SOURCE, write(of_22_05(tres={"allocated": items, "requested": items})))
    assert (row["gpu_num"], row["cpu_num"]) == (0, None)


def test_a_job_of_another_form_is_told_with_its_line(write):
    path = write(of_22_05(), of_22_05(job_id=8, nodes="n[1"), of_22_05(job_id=9))
    line = next(
        number
        for number, text in enumerate(path.read_text().splitlines(), start=1)
        if '"account": "lab"' in text and number > 20 and "    " + text.strip() == text[2:]
    )
    with pytest.raises(BadTrace, match=r"job 8: expected .* every bracket closed") as caught:
        read_file(SOURCE, path)
    assert caught.value.line == line - 1
    _, rows = read_file(SOURCE, path, bad_rows="drop")
    assert [row["job_id"] for row in rows] == ["7", "9"]


def test_an_answer_without_jobs(write):
    with pytest.raises(BadTrace, match="holds no job"):
        read_file(SOURCE, write())


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.9, 0.999])
def test_a_document_that_is_cut_off(write, cut):
    path = write(of_22_05(), of_22_05(job_id=8))
    whole = path.read_text()
    path.write_text(whole[: int(len(whole) * cut)])
    with pytest.raises(BadTrace, match=r"jobs\.json, line \d+: .*cut off here"):
        read_file(SOURCE, path)


def objects(path, **changes):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setattr(json_stream, name, value)
        return list(json_objects(path, frozenset({"jobs"}), next_step="Do it again."))


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
@pytest.mark.parametrize("indent", [None, 2])
def test_objects_come_whole_however_the_file_is_cut_into_chunks(tmp_path, chunk, indent):
    items = [
        {"n": number, "text": 'x"]}\\' * (number % 5), "in": [{"jobs": [1]}, -1.5e3, None]}
        for number in range(40)
    ]
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(
            {"before": [1, {"jobs": 2}], "jobs": items, "after": {"x": 12345}}, indent=indent
        )
    )
    found = objects(path, CHUNK_CHARACTERS=chunk)
    assert [item for _, item in found] == items
    if indent:
        lines = path.read_text().splitlines()
        assert [lines[line - 1].strip() for line, _ in found] == ["{"] * 40
        assert [f'"n": {number}' in lines[line] for number, (line, _) in enumerate(found)] == [
            True
        ] * 40


def test_one_object_a_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"n": 1}\n\n{"n": 2}{"n": 3}\n{"jobs": [{"n": 4}, {"n": 5}]}\n[{"n": 6}]')
    assert objects(path, CHUNK_CHARACTERS=3) == [
        (1, {"n": 1}), (3, {"n": 2}), (3, {"n": 3}), (4, {"n": 4}), (4, {"n": 5}), (5, {"n": 6}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"jobs": [{"n": 1},\n{"n" 2}]}', "line 2: expected JSON: Expecting ':' delimiter"),
        ('{"jobs": [\n1]}', "line 2: expected objects in the list 'jobs'"),
        ("[1]", "line 1: expected objects"),
        ("x", "line 1: expected a JSON object or list"),
        ('{"jobs": [' + '{"a":' * 5000, "line 1: expected JSON that is not nested|cut off here"),
        ('{"a": 1\n', "line 2: expected JSON: it is cut off here"),
        ('{"a" 1}', "line 1: expected ':'"),
    ],
)
def test_what_is_no_json_is_told_with_its_line(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(BadTrace, match=message):
        objects(path)


def test_a_fault_in_the_middle_of_a_long_file_is_found_before_its_end(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"jobs": [{"n": oops}' + ', {"n": 1}' * 10000)
    with pytest.raises(BadTrace, match="line 1: expected JSON: Expecting value"):
        objects(path, CHUNK_CHARACTERS=100, LONGEST_OBJECT_CHARACTERS=1000)


def test_an_object_without_end_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"jobs": [{"n": "' + "x" * 100_000)
    with pytest.raises(BadTrace, match="expected objects of at most"):
        objects(path, CHUNK_CHARACTERS=100, LONGEST_OBJECT_CHARACTERS=10_000)


def test_a_long_list_is_not_held_whole(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as file:
        file.write('{"jobs": [')
        for number in range(20_000):
            file.write(f'{"," * bool(number)}{{"job_id": {number}, "text": "{"x" * 1000}"}}\n')
        file.write("]}")
    tracemalloc.start()
    try:
        count = sum(1 for _ in json_objects(path, frozenset({"jobs"}), next_step=""))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 20_000
    assert path.stat().st_size > 20e6 > 3 * peak
