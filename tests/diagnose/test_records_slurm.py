"""Test `sacct --json` of several Slurm versions, with the job's logs or alone."""

import json

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.logs.files import Reading, find_files
from holdfast.diagnose.logs.records import record_lines

KEY_ERROR = "Traceback (most recent call last):\n  File \"/job/t.py\", line 8, in f\n    g()\nKeyError: 'a'\n"


def number(value):
    return {"set": value is not None, "infinite": False, "number": value or 0}


def of_21_08(state, code=0, signal=None, nodes="gn[17-18]", name=4711):
    """Return a record of data parser dbv0.0.37 or 0.0.38: plain values, step ids in parts."""
    ended = {"status": "SIGNALED" if signal else "ERROR", "return_code": code}
    if signal:
        ended["signal"] = {"signal_id": signal, "name": "KILL"}
    return {
        "job_id": name,
        "name": "train",
        "nodes": nodes,
        "exit_code": ended,
        "state": {"current": state, "reason": "None"},
    }


def step_21_08(state, name, **given):
    step = of_21_08(state, **given)
    nodes = {"count": 2, "range": step.pop("nodes")}
    return {**step, "nodes": nodes, "step": {"job_id": 4711, "id": name, "name": name}}


def of_24_05(state, code=0, signal=None, nodes="gn[17-18]", name=4711, **changes):
    """Return a record of data parser 0.0.40 or later: lists of words, objects for numbers."""
    return {
        "array": {"job_id": 0, "task_id": number(None)},
        "exit_code": {
            "status": ["SIGNALED" if signal else "ERROR"],
            "return_code": number(code),
            "signal": {"id": number(signal), "name": "KILL" if signal else ""},
        },
        "failed_node": "",
        "het": {"job_id": 0, "job_offset": number(None)},
        "job_id": name,
        "name": "train",
        "nodes": nodes,
        "state": {"current": state if isinstance(state, list) else [state], "reason": "None"},
        **changes,
    }


def step_24_05(state, name, **given):
    step = of_24_05(state, **given)
    nodes = {"count": 2, "range": step.pop("nodes"), "list": ["gn17", "gn18"]}
    return {
        **step,
        "nodes": nodes,
        "state": step["state"]["current"],
        "step": {"id": f"4711.{name}", "name": name},
    }


FORMS = {"21.08": (of_21_08, step_21_08), "24.05": (of_24_05, step_24_05)}
both = pytest.mark.parametrize(("job", "step"), FORMS.values(), ids=FORMS)


@pytest.fixture
def write(tmp_path):
    def written(*jobs, indent=1):
        path = tmp_path / "sacct.json"
        path.write_text(
            json.dumps(
                {"meta": {"Slurm": {"release": "24.05.3"}}, "jobs": jobs, "errors": []},
                indent=indent,
            )
        )
        return path

    return written


def said(path):
    files = find_files([path]).files
    records, logs = record_lines(list(files), Reading())
    assert not logs
    return [line for lines in records.values() for line in lines]


@both
@pytest.mark.parametrize(
    ("state", "reason", "helps"),
    [
        ("NODE_FAIL", "NodeFailure", True),
        ("BOOT_FAIL", "NodeFailure", True),
        ("OUT_OF_MEMORY", "OutOfMemoryError", False),
        ("TIMEOUT", "Others", True),
        ("DEADLINE", "Others", True),
        ("PREEMPTED", "Others", True),
    ],
)
def test_the_state_of_a_job_is_its_cause(write, job, step, state, reason, helps):
    found = diagnose(write(job(state)))
    assert (found.reason, found.restart_helps) == (reason, helps)
    assert found.root_line.file.endswith("sacct.json")


@both
def test_the_cited_line_is_where_the_state_stands(write, job, step):
    path = write(job("COMPLETED", name=1), job("NODE_FAIL", name=2))
    found = diagnose(path)
    assert "NODE_FAIL" in path.read_text().splitlines()[found.root_line.line - 1]


@both
def test_each_step_has_a_line_of_its_own(write, job, step):
    path = write(
        job("FAILED", 1) | {"steps": [step("FAILED", "batch", code=1), step("FAILED", "0", code=1)]}
    )
    lines = said(path)
    assert len(lines) == 3
    assert len({line.number for line in lines}) == 3
    for line in lines:
        assert "FAILED" in path.read_text().splitlines()[line.number - 1]


@both
def test_the_signal_that_ended_a_step_is_said(write, job, step):
    lines = said(write(job("FAILED") | {"steps": [step("FAILED", "0", signal=9)]}))
    assert "exit_code=0:9" in lines[1].text
    assert "gn" in lines[1].text


@both
def test_a_job_that_completed_says_so_and_its_steps_say_nothing(write, job, step):
    path = write(job("COMPLETED") | {"steps": [step("COMPLETED", "batch")]})
    (line,) = said(path)
    assert "state=COMPLETED" in line.text
    found = diagnose(path)
    assert (found.outcome, found.action) == ("completed", "none")
    assert "COMPLETED" in path.read_text().splitlines()[found.end_line.line - 1]


@both
@pytest.mark.parametrize("state", ["RUNNING", "PENDING"])
def test_what_did_not_fail_says_nothing(write, job, step, state):
    assert said(write(job(state) | {"steps": [step(state, "batch")]})) == []
    assert diagnose(write(job(state))).reason == "Unknown"


@both
def test_a_failed_state_does_not_hide_what_the_log_says(write, job, step, tmp_path):
    (tmp_path / "rank-1.log").write_text(KEY_ERROR)
    write(
        job("FAILED", 1)
        | {"steps": [step("FAILED", "0", code=1), step("CANCELLED", "1", signal=9)]}
    )
    found = diagnose(tmp_path)
    assert (found.reason, found.scope) == ("KeyError", {"rank": 1})


@both
def test_a_lost_node_explains_what_the_ranks_say(write, job, step, tmp_path):
    (tmp_path / "rank-1.log").write_text(
        KEY_ERROR.replace("KeyError: 'a'", "RuntimeError: Connection reset by peer")
    )
    write(job("NODE_FAIL") | {"steps": [step("NODE_FAIL", "0", signal=9)]})
    assert diagnose(tmp_path).reason == "NodeFailure"


def test_several_states_at_once(write):
    found = diagnose(write(of_24_05(["NODE_FAIL", "REQUEUED"])))
    assert found.reason == "NodeFailure"


def test_the_node_that_failed_is_named(write):
    found = diagnose(write(of_24_05("NODE_FAIL", failed_node="gn18")))
    assert found.scope.get("node") == "gn18"


def test_of_an_array_job_every_task_counts(write):
    array = {"job_id": 100, "task_id": number(3)}
    found = diagnose(
        write(of_24_05("COMPLETED", name=101), of_24_05("OUT_OF_MEMORY", name=103, array=array))
    )
    assert found.reason == "OutOfMemoryError"


def test_of_a_heterogeneous_job_every_part_counts(write):
    parts = [of_24_05(state, name=200 + at, het={"job_id": 200, "job_offset": number(at)}) for at, state in
             enumerate(["CANCELLED", "NODE_FAIL"])]  # fmt: skip
    assert diagnose(write(*parts)).reason == "NodeFailure"


def test_on_one_line(write):
    found = diagnose(write(of_24_05("NODE_FAIL"), indent=None))
    assert (found.reason, found.root_line.line) == ("NodeFailure", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": None},
        {"state": 3},
        {"state": {"current": None}},
        {"state": {"current": [None, 3]}},
        {"exit_code": None},
        {"exit_code": 9},
        {"exit_code": "0:9"},
        {"exit_code": {"signal": 9, "return_code": "x"}},
        {"exit_code": {"signal": None, "return_code": None}},
        {"nodes": None},
        {"nodes": 3},
        {"nodes": {"list": None}},
        {"steps": {"0": "x"}},
        {"steps": [None, 3, "x", {}]},
        {"steps": [{"state": "FAILED", "step": "4711.0", "nodes": []}]},
        {"steps": [{"state": ["FAILED"], "step": None, "exit_code": []}]},
        {"job_id": {"a": 1}},
    ],
    ids=str,
)
def test_odd_values_are_no_crash(write, changes):
    diagnose(write(of_24_05("FAILED") | changes, of_24_05("NODE_FAIL")))
    assert (
        diagnose(write(of_24_05("FAILED") | changes, of_24_05("NODE_FAIL"))).reason == "NodeFailure"
    )


@pytest.mark.parametrize("jobs", ['[3, null, "x", []]', "[]", "null", "{}", "3"])
def test_odd_lists_of_jobs(tmp_path, jobs):
    (tmp_path / "sacct.json").write_text(f'{{"jobs": {jobs}}}')
    assert diagnose(tmp_path).reason == "Unknown"
