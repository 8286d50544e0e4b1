import html
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import sample_runs

from holdfast.core import words
from holdfast.core.accounting import Point, summarize
from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Event
from holdfast.ui import write_report
from holdfast.ui.cards import incident_card
from holdfast.ui.headline import headline

CHROMIUM = Path("/usr/bin/chromium")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """A parsed page: its text, attributes and elements, and whether each element is closed."""

    def __init__(self, path):
        super().__init__()
        self.open, self.words, self.attributes, self.ids, self.elements = [], [], [], [], set()
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.words))


@pytest.fixture(scope="module")
def summaries(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
        sample_runs.stopped_run(ledger, home)
        sample_runs.reference_run(ledger, home)
        return [
            summarize(ledger, home, run_id) for run_id in ("demo-1", "demo-2", "demo-reference")
        ]


@pytest.fixture(scope="module")
def report(summaries, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "made" / "report.html"
    write_report(path, summaries, title="Holdfast demo")
    return path


@pytest.fixture(scope="module")
def page(report):
    return Page(report)


def written(tmp_path, *summaries):
    write_report(tmp_path / "report.html", summaries, title="a run")
    return Page(tmp_path / "report.html")


def test_the_answer_comes_first(summaries, page):
    answer = "Survived 3 faults, nobody stepped in, weights identical"
    assert headline(summaries[0]) == answer
    assert f"<title>Holdfast demo: {answer}</title>" in page.source
    assert f"Holdfast demo {answer} Run demo-1 on 2 ranks" in page.text


def test_a_title_names_the_injected_fault_and_the_nodes(summaries):
    summary = summaries[0]
    cost = summary.incidents[0]
    incident = replace(cost.incident, rank=1, step=66, diagnosis={"decided_by": ["gloo-peer-lost"]})
    injected = ({"fault": "Bad node", "detail": "its network card fails"},)
    cost = replace(cost, incident=incident, injected=injected, node="n2", cordoned=("n2",))
    card = incident_card(cost, summary)
    assert card.title == "Bad node: Rank 1 on n2 exited at step 66; n2 was bad"
    assert card.done.startswith("Took n2 out of use. Restarted")
    assert ("lost over all ranks" in [figure.name for figure in card.figures]) is (
        summary.lost_time.incident_s(cost.number) > 0
    )


@pytest.mark.parametrize(
    ("rule", "happened"),
    [
        ("observer-spike", "The loss spiked at step 112"),
        ("observer-not-finite", "The loss was no longer a finite number at step 112"),
        (None, "The loss broke at step 112"),
    ],
)
def test_a_broken_loss_is_told_in_plain_words(summaries, rule, happened):
    summary = summaries[0]
    cost = summary.incidents[0]
    incident = replace(
        cost.incident,
        kind="anomaly",
        rank=None,
        step=112,
        restored_step=70,
        diagnosis={"decided_by": [rule]},
        explanation="From now on batches 109 to 112 of the data are left out.",
    )
    cost = replace(cost, incident=incident, restore_s=None, injected=())
    card = incident_card(cost, summary)
    assert card.title == happened
    assert card.done == "Went back to the checkpoint of step 70."
    assert "batches 109 to 112" in card.why


def test_it_contains_every_number(summaries, page):
    faulty = summaries[0]
    expected = [
        words.percent(faulty.ettr),
        words.duration(faulty.wall_s),
        str(faulty.steps_executed),
    ]
    for cost in faulty.incidents:
        expected += [
            (
                f"Rank {cost.incident.rank} {'froze' if cost.incident.kind == 'hang' else 'exited'} "
                f"at step {cost.incident.step}"
            ),
            f"to detect {words.duration(cost.seconds_to_detect)}",
            f"to restart {words.duration(cost.seconds_to_restart)}",
            f"steps lost {cost.steps_lost}",
            f"from the checkpoint of step {cost.incident.restored_step}",
            cost.incident.explanation,
            cost.incident.diagnosis["reason"],
            *(data["detail"] for data in cost.injected),
            *(f"{line['file']}:{line['line']}" for line in cost.incident.diagnosis["evidence"]),
            *(
                f"step {passed.step} ({passed.path}): {passed.reason}"
                for passed in cost.passed_over
            ),
        ]
    expected += [faulty.proof["sha256"], "148", "9 640 448 bytes", faulty.proof["loaded_with"]]
    for row in faulty.checkpoints.by_attempt:
        expected += [
            f"{row.median_stall_s * 1000:.0f}",
            f"{row.max_stall_s * 1000:.0f}",
            f"{row.total_stall_s:.2f}",
        ]
    text = page.text.replace(words.NBSP, " ")
    assert [part for part in expected if part.replace(words.NBSP, " ") not in text] == []


def test_where_the_time_went_adds_up_as_printed(page):
    tables = re.findall(r'<table class="bars">.*?</table>', page.source, re.DOTALL)
    assert len(tables) == 4  # the first run's by time line and by cause, and one of each other run
    for table in tables:
        body, foot = table.split("<tfoot>")
        cells = [float(cell) for cell in re.findall(r'<td class="number">([\d.]+)</td>', body)]
        total, percent = map(float, re.findall(r'<td class="number">([\d.]+)</td>', foot))
        assert sum(cells[::2]) == pytest.approx(total)
        assert sum(cells[1::2]) == pytest.approx(percent) == 100


def test_a_run_that_stopped_says_why_prominently(summaries, page, tmp_path):
    outcome = summaries[1].run.outcome
    assert (
        f'<p class="outcome"><strong>How it ended</strong>\n{html.escape(outcome)}' in page.source
    )
    alone = written(tmp_path, summaries[1])
    assert alone.source.index(html.escape(outcome)) < alone.source.index("<h2>")
    assert "Set a positive learning rate in train.py" in alone.text
    assert headline(summaries[1]) == "Stopped after 1 incident: state kept at step 20, ETTR 33 %"


def test_log_lines_are_text_and_nothing_else(page):
    assert "<script>" in page.text
    assert "script" not in page.elements
    assert not any(mark in page.source for mark in ("\x1b", "\u202e"))
    assert "& red \\u202etxt.exe" in page.text


def test_it_refers_to_nothing_outside(page):
    assert {
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "image",
        "foreignobject",
    } & page.elements == set()
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src"
        assert "http" not in value or (tag, name, value) == (
            "meta",
            "http-equiv",
            "Content-Security-Policy",
        )
        if name == "href":
            assert value[0] == "#"
            assert value[1:] in page.ids
    assert re.findall(r"url\((?!#)|@import", page.source) == []
    assert "default-src 'none'" in page.source


def test_its_ids_are_unique(page):
    assert len(page.ids) == len(set(page.ids)) > 0


def test_its_colours_are_those_of_the_page(page):
    drawings = re.findall(r"<svg role.*?</svg>", page.source, re.DOTALL)
    assert (
        len(drawings) == 8
    )  # loss and time of the main run, loss of the two others, each in two widths
    for drawing in drawings:
        assert "var(--productive)" in drawing
        assert set(re.findall(r"#[0-9a-f]{6}", drawing)) <= {"#000000", "#ffffff"}


def test_it_is_small_and_equal_summaries_give_equal_bytes(summaries, report, tmp_path):
    write_report(tmp_path / "again.html", summaries, title="Holdfast demo")
    assert (tmp_path / "again.html").read_bytes() == report.read_bytes()
    assert report.stat().st_size < 400_000


def test_a_long_run_still_makes_a_small_page(summaries, tmp_path):
    points = tuple(Point(step, 2.0 + step % 7) for step in range(200_000))
    spike = replace(
        summaries[0].loss, surviving=(*points, Point(200_000, 99.0), Point(200_001, float("nan")))
    )
    many = summaries[0].incidents * 80
    found = written(tmp_path, replace(summaries[0], loss=spike, incidents=many))
    assert len(found.source) < 1_000_000
    assert "140 more: holdfast incidents ls." in found.text
    assert ">100<" in found.source.replace("\n", "")  # the spike is on the axis


def test_a_run_just_started_renders(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        sample_runs.Scribe(ledger, tmp_path, "new").journal.close()
        summary = summarize(ledger, tmp_path, "new")
    found = written(tmp_path, summary)
    assert headline(summary) == "Still running, no incidents so far: step 0, ETTR unknown"
    assert {"svg"} & found.elements == set()
    for sentence in (
        "No loss was reported.",
        "No time has passed yet.",
        "Nothing happened.",
        "No checkpoint became",
    ):
        assert sentence in found.text
    assert "Further runs" not in found.text


def test_a_run_with_a_fault_being_worked_on_renders(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        job = sample_runs.Scribe(ledger, tmp_path, "half")
        job.begin()
        job.train(30)
        job.fail("hang", None, 2.0, {}, "", "")
        job.journal.close()
        summary = summarize(ledger, tmp_path, "half")
    found = written(tmp_path, summary)
    assert headline(summary).startswith("Still running, 1 incident so far: step 30")
    assert "A rank froze at step 30" in found.text
    assert "No diagnosis is recorded." in found.text
    assert "Nothing yet." in found.text


def test_a_run_without_faults_renders(summaries, tmp_path):
    found = written(tmp_path, summaries[2])
    assert headline(summaries[2]) == "Completed without an incident: step 400, ETTR 88 %"
    assert "Nothing happened." in found.text


def test_weights_that_differ_are_said_so(summaries, tmp_path):
    proof = {**summaries[0].proof, "identical": False, "reference_sha256": "0" * 64}
    found = written(tmp_path, replace(summaries[0], proof=proof))
    assert "final weights DIFFER" in found.text
    assert "bit-identical" not in found.text
    assert "The final weights differ from the reference" in found.text


def test_a_diagnosis_of_any_shape_renders(summaries, tmp_path):
    cost = summaries[1].incidents[0]
    odd = {
        "reason": "<b>bold</b>",
        "root_line": {"file": "a<i>.log", "line": 7, "text": "\x00 null \udcff " + "x" * 9000},
        "evidence": [
            None,
            {"role": "<u>"},
            *({"file": "f", "line": n, "text": "t"} for n in range(40)),
        ],
        "confidence": "high",
        "decided_by": ["<s>"],
    }
    strange = replace(cost, incident=replace(cost.incident, diagnosis=odd, rank=None, step=None))
    found = written(tmp_path, replace(summaries[1], incidents=(strange,)))
    assert {"b", "i", "u", "s"} & found.elements <= {"b", "i"}
    for text in (
        "<b>bold</b>",
        "a<i>.log:7",
        "\u2400 null \\udcff",
        "more characters)",
        "39 more cited lines",
    ):
        assert text in found.text


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_extra_is_named(summaries, tmp_path, monkeypatch, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.figure", None)
    with pytest.raises(HoldfastError, match=rf"needs {package}.*pip install 'holdfast\[report\]'$"):
        write_report(tmp_path / "report.html", summaries, title="a run")
    assert list(tmp_path.iterdir()) == []


def test_the_proof_of_a_run_is_its_newest(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        sample_runs.reference_run(ledger, tmp_path, "twice")
        for identical in (False, True):
            data = {"identical": identical}
            ledger.add_event(Event(run_id="twice", attempt=1, at_s=0.0, kind="proof", data=data))
        assert "weights identical" in headline(summarize(ledger, tmp_path, "twice"))


@pytest.mark.skipif(
    not CHROMIUM.exists(), reason=f"{CHROMIUM} is not installed, so no browser opens the page"
)
def test_it_opens_in_a_browser(summaries, report, tmp_path):
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}",
        "--dump-dom",
        f"file://{report}",
    ]
    # No bus: there is none in a container, and the browser says so at length.
    environment = {
        **os.environ,
        "DBUS_SESSION_BUS_ADDRESS": "disabled:",
        "DBUS_SYSTEM_BUS_ADDRESS": "disabled:",
    }
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    text = re.sub(r"<[^>]*>", "", shown.stdout)
    assert headline(summaries[0]) in text
    assert shown.stdout.count("<svg") == report.read_text().count("<svg")
    # What a page reports to its console: refused styles, broken references, failed requests.
    assert [
        line
        for line in shown.stderr.splitlines()
        if re.search(r"CONSOLE|net::ERR|Refused to", line)
    ] == []


@pytest.mark.parametrize(
    ("rule", "scope", "title"),
    [
        ("observer-killed", {}, "Rank 1 was killed at step 7"),
        ("observer-terminated", {}, "Rank 1 received a signal to end at step 7"),
        ("observer-left", {}, "Rank 1 left the others at step 7"),
        ("observer-launcher", {}, "The launcher died at step 7"),
        ("observer-node", {"node": "n3"}, "Node n3 was lost at step 7"),
        ("nccl-timeout", {}, "Rank 1 exited at step 7"),
    ],
)
def test_a_fault_without_a_row_in_the_study_is_named_in_plain_words(tmp_path, rule, scope, title):
    root = ("observer.log", 1, "2026-11-27T01:50:55.579Z holdfast: rank 1 ended <first>", "root")
    found = sample_runs.diagnosis("Others", "Unknown", [root], decided_by=[rule], scope=scope)
    with sample_runs.open_home(tmp_path) as ledger:
        job = sample_runs.Scribe(ledger, tmp_path, "plain")
        job.begin()
        job.train(7)
        job.fail("exit", 1, 0.1, found, "restart", "A restart helps here.")
        job.journal.close()
        page = written(tmp_path, summarize(ledger, tmp_path, "plain"))
    assert title in page.text
    assert "Rank 1 ended <first>" in page.text
