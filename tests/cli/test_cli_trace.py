"""`holdfast trace` in process: its output, its files, and its errors."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys

import duckdb
import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, HoldfastError


def holdfast(*arguments, fails=None):
    """Run the command; return its output, or with `fails` the error that it raised."""
    found = CliRunner().invoke(cli, ["trace", *map(str, arguments)], catch_exceptions=True)
    if fails is not None:
        assert isinstance(found.exception, fails), found.output
        return str(found.exception)
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """A folder with a small twin of Kalos and its telemetry."""
    folder = tmp_path_factory.mktemp("twin")
    said = holdfast(
        "twin", "--like", "kalos", "-n", 600, "-o", folder, "--telemetry", 300, "--gpus", 8
    )
    assert said == f"Twin: {folder / 'trace_kalos.csv'} (600 jobs)\n"
    return folder


@pytest.fixture(scope="module")
def jobs(twin):
    return twin / "trace_kalos.csv"


def test_a_twin_is_the_same_for_the_same_seed(jobs, tmp_path):
    answer = json.loads(
        holdfast("twin", "--like", "kalos", "-n", 600, "-o", tmp_path, "--telemetry", 0, "--json")
    )
    assert (answer["schema"], answer["jobs"], answer["seed"]) == ("holdfast.trace.twin", 600, 0)
    assert (tmp_path / "trace_kalos.csv").read_bytes() == jobs.read_bytes()
    holdfast(
        "twin",
        "--like",
        "kalos",
        "-n",
        600,
        "-o",
        tmp_path / "other",
        "--seed",
        1,
        "--telemetry",
        0,
    )
    assert (tmp_path / "other" / "trace_kalos.csv").read_bytes() != jobs.read_bytes()


def test_a_trace_of_ones_own_can_have_a_twin(jobs, tmp_path):
    answer = json.loads(holdfast("twin", "--like", jobs, "-n", 300, "-o", tmp_path, "--json"))
    assert answer["jobs"] == 300
    assert "300" in holdfast("check", answer["path"])


@pytest.fixture(scope="module")
def metrics(twin, tmp_path_factory):
    """A folder with three metrics of the twin; workers read each in a process of its own."""
    folder = tmp_path_factory.mktemp("metrics")
    for name in ("GPU_UTIL", "POWER_USAGE", "SM_ACTIVE"):
        shutil.copy(twin / "utilization" / "kalos" / f"{name}.csv", folder)
    return folder


@pytest.fixture(scope="module")
def report(jobs, metrics, tmp_path_factory):
    """A report that one process wrote: its folder, and what the command printed."""
    folder = tmp_path_factory.mktemp("alone") / "report"
    return folder, holdfast("report", jobs, "--metrics", metrics, "-o", folder, "--pue", 1.1)


def test_a_report_is_written_and_says_what_to_do(report):
    output, said = report
    assert said.endswith(f"Report: {output / 'index.html'}\n")
    findings = json.loads((output / "findings.json").read_text())
    assert findings["schema"] == "holdfast.trace.findings"
    first = findings["actions"][0]
    assert f"Kalos-SYNTHETIC, to do 1: {first['do']} {first['why']}\n" in said
    assert len(findings["actions"]) == said.count(", to do ") == 3
    assert "1.1" in (output / "index.html").read_text()
    assert {path.suffix for path in (output / "figures").iterdir()} == {".svg"}
    assert (output / "data" / "gpu_job_duration.csv").exists()


@pytest.mark.slow
def test_workers_give_the_same_numbers_as_one_process_and_name_what_was_left_out(
    jobs, metrics, report, tmp_path
):
    lines = jobs.read_text().splitlines(keepends=True)
    parts = tmp_path / "jobs"
    parts.mkdir()
    for number in range(2):
        (parts / f"part-{number}.csv").write_text(lines[0] + "".join(lines[1 + number :: 2]))
    spread_over = ("--on", "local", "--parts", tmp_path / "parts")
    output = tmp_path / "spread"
    options = ("--metrics", metrics, "-o", output, "--pue", 1.1, "--json")
    answer = json.loads(holdfast("report", parts, *options, *spread_over))
    alone, spread = (
        json.loads((folder / "findings.json").read_text()) for folder in (report[0], output)
    )
    assert spread["findings"] == alone["findings"]
    same = {name: value for name, value in alone["numbers"].items() if name in spread["numbers"]}
    assert len(same) > 200
    assert {name: spread["numbers"][name] for name in same} == pytest.approx(same, nan_ok=True)

    assert answer["page"] == str(output / "index.html")
    assert "no nodes" in answer["left_out"]["fragmentation"]
    assert {"id", "sentence", "value", "unit", "study", "holds", "why"} == set(
        answer["findings"][0]
    )


def test_reasons_of_failures_are_joined(jobs, twin, tmp_path):
    reasons = twin / "reasons_kalos.csv"
    assert reasons.read_text().startswith("job_id,reason,category\n")
    failed = json.loads(
        holdfast("query", "SELECT job_id FROM jobs WHERE state = 'FAILED' LIMIT 2", jobs, "--json")
    )
    (one,), (two,) = failed["rows"]
    given = tmp_path / "why.csv"
    given.write_text(f"job_id,reason\n{one},NVLinkError\n{two},TypeError\n")
    question = "SELECT job_id, reason FROM jobs WHERE reason IS NOT NULL ORDER BY reason"
    answer = json.loads(holdfast("query", question, jobs, "--reasons", given, "--json"))
    assert answer["rows"] == [[one, "NVLinkError"], [two, "TypeError"]]
    assert "reason-given" in holdfast("check", jobs, "--reasons", f"Kalos-SYNTHETIC={given}")


def test_checks_are_told_and_strict_ones_fail(jobs, tmp_path):
    assert "no contradictions found" in holdfast("check", jobs)
    twice = tmp_path / "trace_kalos.csv"
    lines = jobs.read_text().splitlines(keepends=True)
    twice.write_text("".join([*lines, lines[1]]))
    answer = json.loads(holdfast("check", twice, "--json"))
    assert [(note["check"], note["rows"], note["action"]) for note in answer["notes"]] == [
        ("repeated-job-id", 1, "dropped")
    ]
    assert "repeated-job-id" in holdfast("check", twice)
    assert CliRunner().invoke(cli, ["trace", "check", "--strict", str(twice)]).exit_code == 1
    assert CliRunner().invoke(cli, ["trace", "check", "--strict", str(jobs)]).exit_code == 0


@pytest.mark.parametrize(
    ("gpus", "code"),
    [((1, 1), 0), ((1, 0), 4), ((0, 1), 4), ((0, 0), 4), ((1, None), 0), ((None, None), 0)],
)
def test_a_source_without_gpu_jobs_is_told_beside_one_that_has_them(tmp_path, gpus, code):
    """`None` is a source without a field of GPUs."""
    sources = [tmp_path / f"{name}.txt" for name in ("one", "two")]
    for path, each in zip(sources, gpus, strict=True):
        asked = ("|AllocTRES", f"|gres/gpu={each}") if each is not None else ("", "")
        path.write_text(
            f"JobID|State|Submit{asked[0]}\n1|COMPLETED|2024-03-01T10:00:00{asked[1]}\n"
        )
    found = CliRunner().invoke(cli, ["trace", "check", "--json", *map(str, sources)])
    assert found.exit_code == code, found.output
    notes = [one for one in json.loads(found.stdout)["notes"] if one["check"] == "no-gpus"]
    assert [note["cluster"] for note in notes] == [
        path.stem for path, each in zip(sources, gpus, strict=True) if each == 0
    ]


def test_a_converted_trace_answers_the_same(jobs, twin, tmp_path):
    store = tmp_path / "store"
    holdfast("convert", jobs, "--metrics", twin / "utilization" / "kalos", "-o", store)
    question = "SELECT state, count(*) AS n, sum(gpu_time_s) AS gpu_time_s FROM jobs GROUP BY state ORDER BY state"
    holdfast("convert", jobs, "-o", tmp_path / "jobs-alone")
    said = holdfast("check", jobs, "--metrics", tmp_path / "jobs-alone", fails=BadUse)
    assert "is a converted trace without telemetry" in said
    assert holdfast("query", question, store, "--csv") == holdfast("query", question, jobs, "--csv")
    samples = holdfast(
        "query", "SELECT count(*) AS n FROM samples", store, "--metrics", store, "--json"
    )
    assert json.loads(samples)["rows"][0][0] > 0


def test_a_query_answers_people_and_programs(jobs):
    question = "SELECT count(*) AS n, count(*) FILTER (is_gpu) AS gpu FROM jobs"
    with jobs.open() as file:
        gpus = [float(row["gpu_num"]) for row in csv.DictReader(file)]
    expected = [len(gpus), sum(gpu > 0 for gpu in gpus)]
    assert json.loads(holdfast("query", question, jobs, "--json"))["rows"] == [expected]
    assert list(csv.reader(io.StringIO(holdfast("query", question, jobs, "--csv"))))[1] == list(
        map(str, expected)
    )
    assert str(expected[1]) in holdfast("query", question, jobs)


def test_a_query_changes_and_reads_nothing_else(jobs, tmp_path):
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    for statement in (
        "DROP VIEW jobs",
        f"SELECT * FROM read_csv('{secret}')",
        "SELECT 1; SELECT 2",
        "SELEC 1",
    ):
        said = holdfast("query", statement, jobs, fails=BadUse)
        assert said.count("\n") <= 4


@pytest.mark.parametrize("form", ["sia", "helios", "tiresias", "tethys", "swf"])
def test_jobs_are_exported_for_simulators(jobs, tmp_path, form):
    path = tmp_path / "out"
    holdfast("export", jobs, "--to", form, "-o", path)
    assert len(path.read_text().splitlines()) > 100


def test_what_an_export_leaves_out_is_said(jobs, tmp_path):
    with jobs.open() as file:
        left_out = sum(not float(row["gpu_num"]) for row in csv.DictReader(file))
    said = holdfast("export", jobs, "--to", "swf", "-o", tmp_path / "out")
    assert (
        said
        == f"Written: {tmp_path / 'out'} ({600 - left_out} jobs, {left_out} without GPUs or a known time left out)\n"
    )


def test_one_job_is_one_job(jobs, tmp_path):
    one = tmp_path / "trace_kalos.csv"
    one.write_text("".join(jobs.read_text().splitlines(keepends=True)[:2]))
    assert holdfast("check", one) == "1 job; no contradictions found.\n"


def test_what_is_written_is_told_in_json(jobs, tmp_path):
    said = json.loads(holdfast("convert", jobs, "-o", tmp_path / "store", "--json"))
    assert said["path"] == str(tmp_path / "store")
    said = json.loads(holdfast("export", jobs, "--to", "swf", "-o", tmp_path / "out", "--json"))
    assert (said["path"], said["format"]) == (str(tmp_path / "out"), "swf")
    assert said["jobs"] + said["left_out"] == 600


def test_an_output_is_checked_before_anything_is_read(tmp_path):
    told = holdfast("report", tmp_path / "nope.csv", "-o", "/proc/x", fails=BadUse)
    assert told.startswith("Nothing can be written at /proc/x: ")


def test_the_forms_are_listed():
    answer = json.loads(holdfast("formats", "--json"))
    assert {
        "acme",
        "philly",
        "helios",
        "pai",
        "openb",
        "slurm",
        "kubernetes",
        "kueue",
        "holdfast",
    } <= set(answer["forms"])
    assert {"GPU_UTIL", "SM_ACTIVE", "POWER_USAGE"} <= {
        metric["name"] for metric in answer["metrics"]
    }
    assert "sacct" in holdfast("formats")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "nowhere.csv"], "nowhere.csv"),
        (["check", "JOBS", "--capacity", "many"], "many"),
        (["check", "JOBS", "--zone", "Mars/Olympus"], "Mars/Olympus"),
        (["check", "JOBS", "--since", "someday"], "someday"),
        (["check", "JOBS", "--format", "nqs"], "nqs"),
        (["check", "JOBS", "--metrics", "nowhere"], "nowhere"),
        (
            ["report", "JOBS", "--compare", "Kalos-SYNTHETIC=JOBS", "-o", "x"],
            "compared with itself",
        ),
        (["twin", "--like", "nothing", "-o", "x"], "nothing"),
        (["check", "JOBS", "--reasons", "nowhere.csv"], "There is no file nowhere.csv"),
        (
            ["check", "JOBS", "--reasons", "Kalos-SYNTHETIC="],
            "'Kalos-SYNTHETIC=' has no value for Kalos",
        ),
        (
            ["check", "JOBS", "--metrics", "Kalos-SYNTHETIC="],
            "'Kalos-SYNTHETIC=' has no value for Kalos",
        ),
        (
            ["check", "JOBS", "--metrics", "JOBS"],
            "its name is not the name of a metric. Name it after the metric",
        ),
        (["query", "JOBS", "SELECT 1"], "Give the SELECT first"),
        (["query", "SELECT * FROM samples", "JOBS"], "no individual samples. Give a store"),
    ],
)
def test_mistakes_are_named_with_a_next_step(arguments, said, jobs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = holdfast(
        *(argument.replace("JOBS", str(jobs)) for argument in arguments), fails=HoldfastError
    )
    assert said in error
    assert error.rstrip().endswith((".", "`", "?"))
    assert list(tmp_path.iterdir()) == []


def test_json_is_json_whatever_the_cells(jobs):
    sql = "SELECT 'nan'::DOUBLE AS a, 'inf'::DOUBLE AS b, [1.5, NULL] AS c, {'d': '-inf'::DOUBLE} AS d, NULL AS e"

    def refused(word):
        raise AssertionError(f"{word} is no JSON")

    answer = json.loads(holdfast("query", sql, jobs, "--json"), parse_constant=refused)
    assert answer["rows"] == [[None, None, [1.5, None], {"d": None}, None]]


def test_a_list_is_one_field_of_csv_and_what_is_missing_is_shown_as_nothing(jobs):
    rows = list(
        csv.reader(io.StringIO(holdfast("query", "SELECT [1, 2] AS a, 3 AS b", jobs, "--csv")))
    )
    assert rows == [["a", "b"], ["[1, 2]", "3"]]
    assert "nan" not in holdfast("query", "SELECT NULL::DOUBLE AS a, 1 AS b", jobs)


def test_a_wrong_query_is_one_sentence(jobs):
    said = holdfast("query", "SELECT nope FROM jobs", jobs, fails=BadUse)
    assert '"nope" not found' in said
    assert "\n" not in said
    assert "LINE 1" not in said


def test_a_span_that_holds_no_job_is_a_mistake(jobs, tmp_path):
    for command in (("check",), ("report", "-o", tmp_path / "report"), ("query", "SELECT 1")):
        said = holdfast(*command, jobs, "--since", "2090-01-01", fails=BadUse)
        assert said.startswith("No job was submitted since 2090-01-01.")
    assert not (tmp_path / "report").exists()
    said = holdfast("check", jobs, "--since", "2023-06-02", "--until", "2023-06-02", fails=BadUse)
    assert said.startswith("until (2023-06-02) is not after since (2023-06-02).")


def test_a_folder_that_is_no_report_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    said = holdfast("report", tmp_path / "mine.txt", "-o", tmp_path, fails=BadUse)
    assert "is not a report of holdfast" in said


@pytest.mark.parametrize("signal_sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_database_works_leaves_no_scratch_folder_and_no_traceback(
    jobs, tmp_path, signal_sent
):
    endless = "SELECT count(*) FROM range(10000000) a, range(10000000) b WHERE a.range || b.range LIKE '%x%'"
    child = f"""
import os, sys, threading
from holdfast.trace.trace import Trace
real = Trace.query
def query(self, sql, *parameters):
    if sql == {endless!r}:
        threading.Timer(0.3, os.kill, (os.getpid(), {int(signal_sent)})).start()
    return real(self, sql, *parameters)
Trace.query = query
from holdfast.cli.main import main
sys.argv = ["holdfast", "trace", "query", {endless!r}, {str(jobs)!r}]
main()
"""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found = subprocess.run(
        [sys.executable, "-c", child], env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert found.returncode == 130
    assert "Traceback" not in found.stderr
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("IOException", 'Could not write file "x": No space left on device', "The disk is full"),
        ("OutOfMemoryException", "failed to allocate 2 GiB", "--memory"),
    ],
)
def test_what_the_engine_runs_out_of_is_said(jobs, monkeypatch, kind, said, expected):
    def query(*_):
        raise getattr(duckdb, kind)(said)

    monkeypatch.setattr("holdfast.trace.trace.Trace.query", query)
    assert expected in holdfast("check", jobs, fails=HoldfastError)


@pytest.mark.parametrize("option", ["--map", "--types"])
def test_a_file_that_is_not_there_is_named(jobs, tmp_path, option):
    found = CliRunner().invoke(cli, ["trace", "check", str(jobs), option, str(tmp_path / "nope")])
    assert found.exit_code == 2
    assert "does not exist" in found.output
