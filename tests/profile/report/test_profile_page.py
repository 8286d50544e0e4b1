"""The page, in text and in a real browser; the object, against its schema; the command."""

import html
import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.profile.recording import Recording, Series, SeriesId, Span
from holdfast.profile.report import Job, comparison, summarize
from holdfast.profile.report.charts import POINTS_LIMIT, activity, thinned
from holdfast.profile.report.view import headline
from holdfast.profile.report.write import as_json, close_up_ns, render
from holdfast.profile.synthetic import (
    BEGIN_NS,
    write_evaluation,
    write_hierarchical_zero,
    write_three_d,
)
from holdfast.profile.writing import RecordingWriter

CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a run under 3D parallelism, with an incident.

    Beside it two recordings in folders.
    """
    home = tmp_path_factory.mktemp("home")
    write_three_d(RunPaths(home, "run-1").root / "profile", steps=4)
    write_hierarchical_zero(home / "zero", steps=2)
    write_evaluation(home / "evaluations" / "eval-1" / "profile")
    with Ledger.open(ledger_url(home)) as ledger:
        ledger.add_run(
            Run(run_id="run-1", state="done", command=["python"], options={}, cwd="/", host="h", pid=1,
                started_at_s=BEGIN_NS / 1e9)
        )  # fmt: skip
        ledger.add_incident(
            Incident(run_id="run-1", attempt=1, kind="exit", rank=0, step=2, fault_at_s=BEGIN_NS / 1e9 + 19.3,
                     detected_at_s=BEGIN_NS / 1e9 + 20, resumed_at_s=BEGIN_NS / 1e9 + 22.5,
                     diagnosis={"reason": "<b>ECCError"}, action="restart", explanation="")
        )  # fmt: skip
    return home


@pytest.fixture(scope="module")
def said(home):
    """The object that the command prints, with the page and the trace that it writes."""
    return json.loads(
        run(
            home,
            "run-1",
            "--compare",
            str(home / "zero"),
            "--perfetto",
            str(home / "t.pftrace"),
            "--json",
        )
    )


def run(home, *arguments):
    result = CliRunner(env={"HOLDFAST_HOME": str(home)}).invoke(
        cli, ["profile", "report", *arguments], standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture(scope="module")
def schema():
    text = (resources.files("holdfast.profile.report") / "profile.schema.json").read_text()
    found = json.loads(text)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_the_object_is_what_its_schema_describes(said, schema, home):
    jsonschema.validate(said, schema, cls=jsonschema.Draft202012Validator)
    known = set(schema["$defs"]["summary"]["properties"])
    assert set(said) == {*schema["properties"], *known}
    assert set(said["compared"]) == known
    for name in ("speed", "utilization", "idle", "energy"):
        assert set(said[name]) == set(schema["$defs"]["summary"]["properties"][name]["properties"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**said, "phases": None}, schema)
    empty = as_json(summarize(Recording(), name="empty"))
    around = {key: said[key] for key in ("schema", "version", "folder", "page")}
    nothing = {**around, **empty, "perfetto": None, "compared": None}
    jsonschema.validate(nothing, schema, cls=jsonschema.Draft202012Validator)


def test_the_command_finds_runs_folders_and_evaluations(said, home):
    assert said["name"] == "run-1"
    assert said["page"] == str(RunPaths(home, "run-1").report.with_name("profile.html"))
    assert Path(said["page"]).exists()
    assert Path(said["perfetto"]).read_bytes()
    assert said["idle"]["seconds_by_cause"]["incident"] > 0
    assert {one["detail"] for one in said["idle"]["valleys"]} == {"", "1: <b>ECCError"}
    evaluated = run(home, "eval-1")
    assert "GPU idle for 48.4" in evaluated
    assert (home / "evaluations" / "eval-1" / "profile.html").exists()
    output = home / "elsewhere" / "page.html"
    text = run(home, str(home / "evaluations" / "eval-1"), "-o", str(output))
    assert output.exists()
    assert text.startswith("eval-1: 29.5"), "named after the folder whose profile this is"


def test_the_terminal_has_the_answer_the_causes_and_the_comparison(home):
    text = run(home, "eval-1", "--compare", "eval-1").replace("\N{NO-BREAK SPACE}", " ")
    assert text.startswith(
        "eval-1: 29.5 % load and preprocess, 51.5 % inference, 19.0 % metric, GPU idle for 48.4 % of the time\n"
    )
    for part in ("load            65.0 s  (60.7 %)", "idle: metric", "+0.0 %", "Report: "):
        assert part in text
    folders = {"3d": RunPaths(home, "run-1").root / "profile", "zero": home / "zero"}
    three_d, zero = (
        summarize(Recording.read(folder), name=name, job=Job.read(folder / "job.toml"))
        for name, folder in folders.items()
    )
    assert (
        headline(three_d)
        .replace("\N{NO-BREAK SPACE}", " ")
        .startswith("44.1 % MFU (causal), 373 228 tokens/s, GPU idle for")
    )
    assert {row.name: row.change for row in comparison(three_d, zero)}["tokens/s"] == "+15.8 %"


def test_wrong_use_is_a_sentence_with_the_next_step(home, tmp_path):
    with pytest.raises(NotFound, match="holdfast run"):
        run(home, str(tmp_path))
    with pytest.raises(NotFound, match=r"There is no file .*job.toml"):
        run(home, "run-1", "--job", str(tmp_path / "job.toml"))
    with pytest.raises(BadUse, match="--job"):
        run(home, "eval-1", "--peak-tflops", "10")


def test_the_page_shows_the_figures_and_escapes_what_others_wrote(said):
    page = Path(said["page"]).read_text()
    body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))
    parts = ("Beside zero", "SM activity over time", "Two steps close up", "Idle valleys by cause",
                 "Memory by pipeline stage, beside the theory", "Memory over time, of the fullest rank", "stage 3",
                 "312 TFLOP/s, the vendor's data sheet for A100", "6·N + 12·L·H·Q·T",
                 "incident 1: <b>ECCError")  # fmt: skip
    assert [part for part in parts if part not in text] == []
    assert "<b>ECC" not in page
    assert not re.search(r"https?://", page)


def test_equal_recordings_give_equal_pages(home):
    folder = home / "evaluations" / "eval-1" / "profile"
    summary = summarize(Recording.read(folder), name="eval-1")
    assert render(summary) == render(summarize(Recording.read(folder), name="eval-1"))


def test_a_machine_without_a_gpu_has_a_page_that_names_what_is_missing(tmp_path):
    with RecordingWriter(tmp_path, node="$host$_1") as writer:
        writer.source("nvml", "libnvidia-ml.so.1 is not there")
        for at in range(1, 20):
            writer.sample(
                at * 10**9, {SeriesId("cpu_utilization", "proc"): 0.0 if at in (5, 6) else 50.0}
            )
    page = render(summarize(Recording.read(tmp_path), name="r"))
    assert (
        "No counter of a GPU was recorded. nvml: libnvidia-ml.so.1 is not there."
        in html.unescape(page)
    )
    assert "$host$_1" in page
    assert "CPU idle for" in page


def test_steps_that_are_shorter_than_a_sample_are_drawn_as_phases_alone(tmp_path):
    with RecordingWriter(tmp_path, node="a") as writer:
        for at in range(1, 10):
            writer.sample(at * 10**9, {SeriesId("process_cpu", "proc", rank=0): 50.0})
    with RecordingWriter(tmp_path, node="a", rank=0) as writer:
        for step in range(80):
            at_ns = step * 10**8
            writer.spans(
                step,
                [
                    ("forward", at_ns, at_ns + 4 * 10**7),
                    ("backward", at_ns + 4 * 10**7, at_ns + 10**8),
                ],
            )
    summary = summarize(Recording.read(tmp_path), name="r")
    window_ns = close_up_ns(summary)
    assert window_ns == (summary.steps[39].start_ns, summary.steps[40].end_ns)
    whole = activity(summary, name="whole", narrow=False)
    close = activity(summary, name="close", narrow=False, window_ns=window_ns)
    assert ">50<" in whole, "the axis of the curve"
    assert ">50<" not in close
    for phase in ("forward", "backward"):
        assert f"--phase-{phase}" in close


def test_a_rank_that_moved_is_drawn_on_each_node_in_its_own_time():
    def cpu(node, seconds):
        return Series(
            metric="process_cpu",
            unit="%",
            source="proc",
            node=node,
            device=None,
            rank=1,
            interval_s=1.0,
            times_ns=[second * 10**9 for second in seconds],
            values=[50.0] * len(seconds),
        )

    spans = [
        Span(phase="forward", start_ns=at, end_ns=at + 10**9, step=1, rank=1, node=node)
        for node, at in (("n2", 2 * 10**9), ("n3", 22 * 10**9))
    ]
    series = [cpu("n2", range(10)), cpu("n3", range(20, 30))]
    summary = summarize(Recording(series=series, spans=spans), name="moved")
    whole = html.unescape(activity(summary, name="x", narrow=False))
    part = html.unescape(
        activity(summary, name="y", narrow=False, window_ns=(21 * 10**9, 24 * 10**9))
    )
    assert "rank 1, n2" in whole
    assert "rank 1, n3" in whole
    assert "rank 1, n3" in part
    assert "rank 1, n2" not in part
    assert whole.count("--phase-forward") == 2, "one phase a node"


def test_thinned_curves_keep_the_lowest_and_the_highest():
    points = [(float(at), 1.0) for at in range(100_000)]
    points[777], points[50_001] = (777.0, 0.0), (50_001.0, 9.0)
    kept = thinned(points)
    assert len(kept) <= POINTS_LIMIT
    assert {(777.0, 0.0), (50_001.0, 9.0)} <= set(kept)
    assert kept == sorted(kept)


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Chromium")
def test_the_page_looks_right_on_a_desk_and_on_a_telephone_in_light_and_in_dark(said, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    address = Path(said["page"]).as_uri()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM))
        for width, scheme in ((1280, "light"), (390, "dark")):
            shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            complaints, requests = [], []
            shown.on("console", lambda message, into=complaints: into.append(message.text))
            shown.on("request", lambda request, into=requests: into.append(request.url))
            shown.goto(address)
            assert (complaints, requests) == ([], [address])
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            visible = shown.evaluate(
                "[...document.querySelectorAll('figure svg')].filter(e => e.getBoundingClientRect().width > 0).length"
            )
            assert visible == 6, "each drawing once"
            colour = shown.evaluate(
                "getComputedStyle(document.querySelector('.phase-data')).backgroundColor"
            )
            assert colour == {"light": "rgb(224, 161, 0)", "dark": "rgb(240, 197, 69)"}[scheme]
        browser.close()
