"""The console's pages over a ledger: complete without scripts, equal as JSON, bounded."""

import hashlib
import json
import re

import pytest
import sample_runs
from console_home import add_log, open_console, propose

from holdfast.core.errors import HoldfastError
from holdfast.core.ledger import Attempt, EvaluationRecord, Ledger, Run, TooSlow
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.core.words import LINE_LIMIT
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries
from holdfast.ui.console.journal import Journals
from holdfast.ui.console.logs import surroundings
from holdfast.ui.console.queries.now import runs_page
from holdfast.ui.console.queries.paging import PAGE_ROWS
from holdfast.ui.console.usage import Usage


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("console")
    with sample_runs.open_home(home) as ledger:
        sample_runs.faulty_run(ledger, home)
        sample_runs.stopped_run(ledger, home)
        going = sample_runs.Scribe(ledger, home, "going")
        going.begin()
        going.train(30)
        going.journal.close()
        propose(ledger, "going", 1)
        ledger.cordon("node-9", at_s=1_790_000_000.0, by="ada", why="Xid 79 <b>twice</b>")
        ledger.add_evaluation(
            EvaluationRecord(
                evaluation_id="eval-1", suite="mine", model="m", family="f", state="done",
                started_at_s=1_790_000_000.0, folder="/e", makespan_s=10.0, bound_s=9.0,
                scores={"gsm8k": {"exact_match,strict": [0.5, 0.01]}}, run_id="going", step=20,
            )
        )  # fmt: skip
    add_log(home, "demo-1", 1, 0, "".join(f"line {number}\n" for number in range(1, 1200)))
    return home


@pytest.fixture(scope="module")
def console(home):
    with open_console(home) as console:
        yield console


PAGES = ["/", "/runs", "/runs/demo-1", "/runs/going", "/runs/demo-1/logs", "/incidents/1", "/nodes",
         "/evaluations", "/cluster", "/decisions"]  # fmt: skip


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole_without_a_script_and_has_its_facts_as_json(console, path):
    page = console.get(path)
    assert page.status_code == 200
    assert page.text.count("<h1>") == 1
    assert "<main" in page.text
    assert not re.search(r"<script(?![^>]* src=\"/static/)", page.text), "no inline script"
    assert "style=" not in page.text, "no inline style: the policy would drop it"
    told = console.get("/now.json" if path == "/" else f"{path}.json").json()
    assert told["version"] == 1
    assert told["schema"].startswith("holdfast.console.")
    tag = page.headers["etag"]
    assert len(tag) == 34


CURVE = {"metric": "gpu_power", "unit": "W", "meaning": "Power draw of the GPU.", "series": 8,
         "times_s": [1.79e9, 1.79e9 + 1], "low": [90.0, 100.0], "mean": [400.0, 500.0],
         "high": [650.5, 690.0]}  # fmt: skip


def test_a_run_shows_its_profile_as_curves_and_as_a_table(home):
    with open_console(home) as console:
        console.curves["demo-1"] = [CURVE, {**CURVE, "metric": "gpu_memory_used", "unit": "B"}]
        page = console.get("/runs/demo-1").text
        assert '<th scope="row">gpu power' in page
        for amount in ("90 W", "450 W", "690 W", "690\N{NO-BREAK SPACE}B"):
            assert f">{amount}" in page
        assert 'data-source="/runs/demo-1/profile.json"' in page
        assert console.get("/runs/demo-1/profile.json").json()["curves"][0] == CURVE
        assert "No profile was recorded" in console.get("/runs/going").text
        assert console.get("/runs/none/profile.json").status_code == 404


def test_a_run_states_why_its_profile_cannot_be_read(home):
    with open_console(home) as console:
        console.curves = None  # the function of the command line fails, as of a newer recording
        console.refusal = HoldfastError("A newer Holdfast has written this.")
        page = console.get("/runs/demo-1")
        assert page.status_code == 200
        assert "A newer Holdfast has written this." in page.text


def test_a_recording_is_read_again_after_a_rest():
    now_s, read = [100.0], []

    def curves_of(run_id):
        read.append(run_id)
        now_s[0] += 5.0  # a large recording
        return [CURVE]

    usage = Usage(curves_of, lambda: now_s[0])
    for _ in range(50):
        assert usage.of("a") == [CURVE]
    usage.of("b")
    assert read == ["a", "b"]
    now_s[0] = 154.9
    usage.of("a")
    assert read == ["a", "b"], "ten times as long as the reading took"
    now_s[0] = 155.1
    usage.of("a")
    assert read == ["a", "b", "a"]


def test_styles_and_scripts_are_kept_by_browsers_under_a_name_that_changes_with_them(console):
    linked = set(re.findall(r'"(/static/[^"]+)"', console.get("/runs/demo-1").text))
    assert {re.sub(r"\.[0-9a-f]{16}", "", one) for one in linked} == {
        f"/static/{name}"
        for name in ("console.css", "console.js", "chart.js", "uplot.js", "icon.svg")
    }
    for path in linked:
        file = console.get(path)
        assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert hashlib.sha256(file.content).hexdigest()[:16] == path.split(".")[-2]
    assert console.get("/static/console.js").status_code == 404
    assert console.get("/static/grafana.json").headers["cache-control"] == "private, no-cache"


def test_the_page_that_signs_in_has_its_style_and_script_without_a_session(home):
    with open_console(home, signed_in=False) as console:
        for path in re.findall(r'"(/static/[^"]+)"', console.get("/enter").text):
            assert console.get(path).headers["content-type"].split(";")[0] != "text/html"


def test_now_says_what_needs_somebody(console):
    told = console.get("/now.json").json()
    assert [one["run_id"] for one in told["active"]] == ["going"]
    assert told["active"][0]["step"] == 30
    assert told["active"][0]["loss"] > 0
    assert [one["text"][:16] for one in told["proposals"]] == ["Rank 1 is frozen"]
    assert told["cordoned"][0]["name"] == "node-9"
    page = console.get("/").text
    assert "Waits for an approval" in page
    assert "/act/approve?target=going" in page
    assert "Xid 79 &lt;b&gt;twice&lt;/b&gt;" in page


def test_a_run_shows_its_curve_with_marks_its_incidents_and_its_checkpoints(console):
    told = console.get("/runs/demo-1.json").json()
    kinds = {one["kind"] for one in told["marks"]}
    assert {"restart", "rollback"} <= kinds
    assert told["is_whole"]
    assert 0 < told["figures"]["ettr"] < 1
    assert [one["number"] for one in told["attempts"]] == [1, 2, 3, 4]
    assert told["checkpoints"][0]["verify"].startswith(
        "holdfast checkpoint verify /home/ada/tryout/"
    )
    text = console.get("/runs/demo-1").text
    assert text.count('class="curve') == 4
    assert "killed" in text
    assert "holdfast run --resume demo-1" in text


def test_an_incident_cites_its_lines_in_their_surroundings(home, console):
    told = console.get("/incidents/1.json").json()
    cited = next(
        one for one in told["incident"]["evidence"] if one["place"].endswith("rank-0.log:212")
    )
    around = cited["around"]
    assert [one["number"] for one in around] == list(range(209, 216))
    assert [one["text"] for one in around if one["is_cited"]] == ["line 212"]
    assert "<mark>212" in console.get("/incidents/1").text


def test_logs_are_read_in_bounded_parts_and_searched(home, console):
    add_log(
        home, "demo-1", 2, 3, "".join(f"step {number} of rank three\n" for number in range(9000))
    )
    told = console.get("/runs/demo-1/logs.json?attempt=2&rank=3").json()
    assert told["lines"][-1] == "step 8999 of rank three"
    assert told["start"] > 0
    older = console.get(f"/runs/demo-1/logs.json?attempt=2&rank=3&end={told['start']}").json()
    number = int(told["lines"][0].split()[1])
    assert older["lines"][-1] == f"step {number - 1} of rank three"
    found = console.get("/runs/demo-1/logs.json?attempt=2&rank=3&q=STEP 77").json()
    assert len(found["hits"]) == 100
    assert found["next"]
    more = console.get(
        f"/runs/demo-1/logs.json?attempt=2&rank=3&q=STEP 77&from={found['next']}"
    ).json()
    assert len(found["hits"]) + len(more["hits"]) == 111


def test_the_drawing_of_a_long_run_is_not_cut(home, console):
    with sample_runs.open_home(home) as ledger:
        job = sample_runs.Scribe(ledger, home, "long")
        job.begin()
        job.train(600)
        job.journal.close()
    (curve,) = re.findall(r'<path class="curve[^"]*" d="([^"]*)"', console.get("/runs/long").text)
    assert len(curve) > LINE_LIMIT
    assert re.fullmatch(r"M[\d. L-]+", curve)


def test_a_progress_bar_does_not_shift_the_number_of_a_cited_line(home):
    bar = "".join(f"\r{number}%" for number in range(100))
    log = add_log(home, "demo-1", 2, 7, f"first\r\n{bar}\rlast state\nthe cause\nafter\n")
    around = surroundings(home, "demo-1", "logs/attempt-002/rank-7.log:3")
    assert [(one["number"], one["text"]) for one in around] == [
        (1, "first"), (2, "last state"), (3, "the cause"), (4, "after"),
    ]  # fmt: skip
    assert [one["number"] for one in around if one["is_cited"]] == [3]
    log.unlink()


def test_a_page_keeps_its_steps_while_another_page_reads_on(tmp_path):
    path = RunPaths(tmp_path, "run").steps
    path.parent.mkdir(parents=True)
    line = '{"attempt":1,"rank":0,"step":%d,"at_s":1,"step_s":1,"loss":2.5,"metrics":{}}\n'
    path.write_text(line % 1)
    journals = Journals(tmp_path)
    first = journals.of("run")
    with path.open("a") as journal:
        journal.write("damaged\n" + line % 2)
    second = journals.of("run")
    assert [one["steps"] for one in first.lines()] == [[1]]
    assert [one["steps"] for one in second.lines()] == [[1, 2]]
    assert (first.damaged_lines, second.damaged_lines) == (0, 1)


def test_an_unchanged_page_is_sent_once(console):
    first = console.get("/evaluations.json")
    again = console.get("/evaluations.json", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/runs/none", 404), ("/incidents/99", 404), ("/incidents/x", 400), ("/runs?next=a~b~c", 400),
     ("/runs/demo-1/logs?rank=-1", 400), ("/nowhere", 404), ("/act/explode?target=demo-1", 400)],
)  # fmt: skip
def test_an_error_is_one_clear_page(console, path, status):
    answer = console.get(path)
    assert answer.status_code == status
    assert 'role="alert"' in answer.text


def test_an_error_of_a_json_page_is_json(console):
    told = console.get("/runs/none.json")
    assert told.status_code == 404
    assert told.json()["ok"] is False
    assert "none" in told.json()["error"]


def test_sqlite_ends_a_query_at_its_limit(tmp_path):
    endless = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    )
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        with (
            pytest.raises(TooSlow, match=r"did not answer within 0\.05 s"),
            ledger.bounded_reading(0.05) as reading,
        ):
            reading.exec_driver_sql(endless)
        with ledger.bounded_reading(5.0) as reading:
            assert reading.exec_driver_sql("SELECT 1").scalar() == 1


def many_runs(ledger, count):
    for number in range(count):
        run = Run(run_id=f"run-{number:03d}", state="completed", command=["x"], options={}, cwd="/w",
                  host="h", pid=1, started_at_s=1000.0 + number // 3)  # fmt: skip
        ledger.add_run(run)
        ledger.add_attempt(Attempt(run_id=run.run_id, number=1, started_at_s=1000.0))


def all_runs(ledger):
    token, seen = "", []
    while token is not None:
        with ledger.bounded_reading(5.0) as reading:
            page = runs_page(reading, token)
        assert len(page["runs"]) <= PAGE_ROWS
        seen += [one["run_id"] for one in page["runs"]]
        token = page["next"]
    return seen


def test_pages_by_key_show_every_run_once(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        many_runs(ledger, 2 * PAGE_ROWS + 7)
        assert all_runs(ledger) == [
            f"run-{number:03d}" for number in reversed(range(2 * PAGE_ROWS + 7))
        ]


@pytest.mark.skipif(postgresql_binaries() is None, reason="no PostgreSQL is installed")
def test_the_same_on_postgresql_with_its_own_time_limit(tmp_path):
    with PrivatePostgreSQL() as server:
        url = server.new_database()
        with Ledger.open(url) as ledger:
            many_runs(ledger, PAGE_ROWS + 3)
            assert all_runs(ledger) == [
                f"run-{number:03d}" for number in reversed(range(PAGE_ROWS + 3))
            ]
            with pytest.raises(TooSlow), ledger.bounded_reading(0.05) as reading:
                reading.exec_driver_sql("SELECT pg_sleep(60)")
        with open_console(tmp_path, url=url) as console:
            for path in ("/", "/runs", "/runs/run-001", "/nodes", "/evaluations", "/decisions"):
                assert console.get(path).status_code == 200, path
            form = console.form("cordon", "node-1")
            assert console.act("cordon", form, why="It is hot.").status_code == 303
            assert console.act("cordon", form, why="It is hot.").status_code == 303
            assert len(console.orders) == 1


def test_the_json_of_a_run_has_no_number_that_json_lacks(home, console):
    text = console.get("/runs/demo-1/loss.json").text
    json.loads(text, parse_constant=pytest.fail)
