"""`holdfast eval` in process: its calls of the library, and its output for stored evaluations."""

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import holdfast.evaluate
from holdfast.cli.eval import progress as eval_progress
from holdfast.cli.eval.report import newest_of_each
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import EvaluationRecord, Ledger
from holdfast.core.paths import EvaluationPaths, ledger_url
from holdfast.evaluate.policy import account
from holdfast.evaluate.policy.outlook import Plan
from holdfast.evaluate.run import ledger as records
from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation, write_evaluation
from holdfast.evaluate.types.scores import compact, scores_of
from holdfast.evaluate.types.timeline import Begin, RequestSpan, timeline_of
from holdfast.evaluate.wire.messages import Status

STATUS = Status(
    now_s=0.0, samples=200, samples_done=0, requests=400, requests_done=0, reused=0, engines=8, engines_ready=0,
    nodes=2, busy_share=0.0, time_left_s=0.0, bound_s=0.0, state="starting",
)  # fmt: skip
OPENAI = ("--engine", "openai", "--url", "http://h:1/v1", "--model-name", "m")


def results(value, stderr=0.01):
    return {
        "results": {"gsm8k": {"alias": "gsm8k", "acc,none": value, "acc_stderr,none": stderr}},
        "higher_is_better": {"gsm8k": {"acc": True}},
    }


def evaluation(name="e1", value=0.5, folder="/x", **other):
    found = results(value)
    fields = {
        "makespan_s": 12.0, "bound": (BoundTerm(name="engines", seconds=10.0),),
        "account": {"useful": 8.0, "tail": 2.0},
        "results": found, "scores": scores_of(found), "engines": 1, "mode": "exact",
    }  # fmt: skip
    return Evaluation(
        id=name, suite="mine", model="/models/llama", folder=str(folder), **{**fields, **other}
    )


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with three evaluations of a run's checkpoints and one that goes on."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        for number, value in enumerate((0.5, 0.52, 0.6)):
            folder = EvaluationPaths(tmp_path, f"e{number}").root
            one = evaluation(f"e{number}", value, folder)
            write_evaluation(one, folder)
            ledger.add_evaluation(
                EvaluationRecord(
                    evaluation_id=one.id, suite=one.suite, model=one.model, family="llama", state="done", mode="exact",
                    started_at_s=100.0 + number, folder=str(folder), run_id="r1", step=number * 100, makespan_s=12.0,
                    bound_s=10.0, scores=compact(one.scores),
                )
            )  # fmt: skip
        ledger.add_evaluation(
            EvaluationRecord(
                evaluation_id="e9", suite="other", model="m", family="llama", state="running", started_at_s=300.0,
                folder=str(EvaluationPaths(tmp_path, "e9").root), outcome="It waits for nodes.",
            )
        )  # fmt: skip
    return tmp_path


def ran(*arguments):
    result = CliRunner().invoke(cli, arguments, standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def answer(*arguments):
    return ran("eval", *arguments).output


def answer_json(*arguments):
    (line,) = answer(*arguments, "--json").splitlines()
    return json.loads(line)


@pytest.fixture
def asked(monkeypatch):
    """A stand-in for the evaluation library: records calls, and returns prepared results."""
    asked = types.SimpleNamespace(calls=[], answers=[evaluation()], statuses=[])

    def noted(name):
        def call(*arguments, progress=None, **named):
            asked.calls.append((name, arguments, named))
            for status in asked.statuses:
                progress(status)
            return iter(asked.answers) if name == "watch" else asked.answers[0]

        return call

    for name in ("evaluate", "resume", "rescore", "watch"):
        monkeypatch.setitem(vars(holdfast.evaluate), name, noted(name))
    return asked


# What it asks


def test_run_says_what_was_given_and_leaves_the_rest(home, asked):
    tasks = home / "tasks"
    tasks.mkdir()
    flags = (
        "--nodes 4 --on slurm --sbatch-option=--partition=p --sbatch-option=--time=10 --tp 2 --mode free --limit 0.5 "
        "--engine mine:Engine "
        "--engine-option max_num_seqs=64 --engine-option eager=true --engine-option name=x --no-chat-template "
        "--judge-url http://j/v1 --judge-requests-per-minute 60 --id mine -o out --confirm-unsafe-code"
    )
    ran(
        "eval",
        "run",
        "--suite",
        "gsm8k,mmlu:5",
        "--model",
        "/m",
        "--include-path",
        str(tasks),
        *flags.split(),
    )
    ((name, arguments, named),) = asked.calls
    options = named["options"]
    assert (name, arguments) == ("evaluate", ("gsm8k,mmlu:5", "/m"))
    assert (options.home, options.ledger) == (home, ledger_url(home))
    assert (options.nodes, options.on, options.sbatch_options) == (
        4,
        "slurm",
        ("--partition=p", "--time=10"),
    )
    assert (options.engine.tensor_parallel, options.engine.mode, options.engine.kind) == (
        2,
        "free",
        "mine:Engine",
    )
    assert options.engine.options == {"max_num_seqs": 64, "eager": True, "name": "x"}
    assert (options.limit, options.chat_template, options.num_fewshot) == (0.5, False, None)
    assert options.include_paths == (str(tasks),)
    assert (options.judge.url, options.judge.requests_per_minute) == ("http://j/v1", 60.0)
    output = Path.cwd() / "out"  # a resume may be called from elsewhere
    assert (options.evaluation_id, options.output, options.confirm_unsafe_code) == (
        "mine",
        output,
        True,
    )
    assert options.linger_s == 60.0


def test_run_without_flags_is_the_librarys_default(home, asked):
    from holdfast.evaluate.run.options import EvaluateOptions

    ran("eval", "run", "--suite", "gsm8k", "--model", "/m")
    assert asked.calls[0][2]["options"] == EvaluateOptions(home=home, ledger=ledger_url(home))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--nodes", "0"), "nodes is 0"),
        (("--judge-concurrency", "4"), "no judge. Give --judge-url URL too."),
        (
            ("--engine-option", "fast"),
            "'fast' is not KEY=VALUE. Give one: --engine-option patience_s=900",
        ),
        (
            (*OPENAI, "--engine-option", "patience=9"),
            "no option 'patience'. Did you mean 'patience_s'?",
        ),
        ((*OPENAI, "--limit", "0"), "limit is 0"),
    ],
)
def test_what_is_not_allowed_reaches_no_library(home, asked, flags, message):
    with pytest.raises(BadUse, match=message):
        ran("eval", "run", "--suite", "gsm8k", "--model", "/m", *flags)
    assert asked.calls == []


def test_resume_changes_only_where_it_runs(home, asked):
    ran("eval", "resume", "e1", "--nodes", "3", "--on", "ray")
    ran("eval", "resume", "e1")
    assert asked.calls == [
        ("resume", ("e1",), {"home": home, "nodes": 3, "on": "ray"}),
        ("resume", ("e1",), {"home": home}),
    ]


def test_rescore_asks_for_the_same_evaluation(home, asked):
    ran("eval", "rescore", "e1")
    assert asked.calls == [("rescore", ("e1",), {"home": home})]


def test_watch_prints_each_evaluation_as_it_comes(home, asked):
    asked.answers = [evaluation("e1"), evaluation("e2", errors={"gsm8k": "It raised."})]
    result = ran("eval", "watch", str(home), "--suite", "gsm8k", "--drop-stale", "--once", "--json")
    assert [json.loads(line)["id"] for line in result.output.splitlines()] == ["e1", "e2"]
    assert result.return_value == 4
    ((_, arguments, named),) = asked.calls
    assert arguments == ("gsm8k", home)
    assert (named["once"], named["options"].drop_stale) == (True, True)
    asked.answers = []
    result = ran("eval", "watch", str(home), "--suite", "gsm8k", "--once")
    assert (result.stdout, result.return_value) == ("", 0)
    assert (
        result.stderr == f"{home} holds no whole checkpoint that this suite has not been run on.\n"
    )


# What it answers


def test_run_prints_scores_the_bound_its_losses_and_where_the_page_is(home, asked):
    asked.answers = [
        evaluation(account={account.USEFUL: 8.0, account.TAIL_METRIC: 1.5, account.START: 0.5})
    ]
    result = ran("eval", "run", "--suite", "gsm8k", "--model", "/m")
    assert "|gsm8k|" in result.output
    assert (
        "mine on /models/llama took 12.0 s, 1.20 times its lower bound of 10.0 s (engines)."
        in result.output
    )
    assert result.output.endswith(
        "\nUseful work was 80.0% of the engines' time. Most of the rest: tail, metrics 15.0%; starting 5.0%."
        "\nPage: /x/report.html\n"
    )
    assert result.return_value == 0
    asked.answers = [evaluation(account={})]
    assert "engines' time" not in ran("eval", "run", "--suite", "gsm8k", "--model", "/m").output


def test_a_task_without_scores_makes_it_incomplete(home, asked):
    asked.answers = [evaluation(errors={"humaneval": "Its metric raised."})]
    result = ran("eval", "run", "--suite", "gsm8k", "--model", "/m")
    assert result.return_value == 4
    assert "humaneval: no scores: Its metric raised." in result.output
    assert result.output.endswith("Try the failed tasks again: holdfast eval resume e1\n")
    asked.answers = [evaluation(state="stopped")]
    assert ran("eval", "run", "--suite", "gsm8k", "--model", "/m").return_value == 4


def test_run_as_json_is_one_object(home, asked):
    said = answer_json("run", "--suite", "gsm8k", "--model", "/m")
    assert (said["schema"], said["version"], said["id"]) == ("holdfast.evaluation", 1, "e1")
    assert said["results"] == results(0.5)
    assert (said["bound_s"], said["ratio"]) == (10.0, 1.2)


def test_plan_predicts_and_draws(home, monkeypatch):
    timeline = timeline_of(
        [
            Begin(started_at_s=0.0, suite="s", tasks=["a"]),
            RequestSpan(engine=0, task=0, sample=0, t0=0.0, t1=9.0),
        ]
    )
    planned = evaluation(state="planned", results={}, scores=(), samples=7)
    plan = Plan(evaluation=planned, timeline=timeline, notes=("No history.",))
    asked = []

    def make(*arguments, options, device_memory_gib):
        asked.append((arguments, options.nodes, device_memory_gib))
        return plan

    monkeypatch.setitem(sys.modules, "holdfast.simulate.plan", types.SimpleNamespace(plan=make))
    page = home / "plan.html"
    flags = ("plan", "--suite", "gsm8k", "--model", "/m", "--nodes", "2", "--page", str(page))
    flags += ("--device-memory-gib", "80")
    printed = answer(*flags)
    assert "1.20 times its lower bound" in printed
    assert printed.endswith(f"No history.\nPage: {page}\n")
    assert "Predicted: 7 samples in 12.0 s" in page.read_text()
    said = answer_json(*flags)
    assert (said["schema"], said["makespan_s"], said["notes"]) == (
        "holdfast.eval.plan",
        12.0,
        ["No history."],
    )
    assert asked == [(("gsm8k", "/m"), 2, 80.0)] * 2


def test_ls_lists_the_newest_first(home):
    said = answer_json("ls")
    assert [one["id"] for one in said["evaluations"]] == ["e9", "e2", "e1", "e0"]
    assert said["schema"] == "holdfast.evaluations"
    assert [one["id"] for one in answer_json("ls", "--suite", "other")["evaluations"]] == ["e9"]
    assert [one["id"] for one in answer_json("ls", "--run", "r1")["evaluations"]] == [
        "e2",
        "e1",
        "e0",
    ]
    printed = answer("ls")
    assert "1.20" in printed
    assert "running" in printed


def test_ls_of_nothing_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    assert (
        answer("ls") == "No evaluations. Start one: holdfast eval run --suite TASKS --model MODEL\n"
    )


def test_none_of_those_wanted_is_not_none_at_all(home):
    assert (
        answer("ls", "--suite", "nightly") == "No evaluation matches. List all: holdfast eval ls\n"
    )
    with pytest.raises(BadUse, match="Of suite other and run r1 there are 0 complete evaluations"):
        answer("compare", "--suite", "other", "--run", "r1")


def test_show_has_the_scores_and_writes_lm_evals_files(home):
    printed = answer("show", "e1", "-o", str(home / "out"))
    assert "|gsm8k|" in printed
    assert "took      12.0 s, 1.20 times its bound" in printed
    assert len(list((home / "out").rglob("results_*.json"))) == 1
    assert answer_json("show", "e1")["evaluation"]["scores"] == {
        "gsm8k": {"acc,none": [0.52, 0.01, True]}
    }


def test_show_of_one_that_goes_on_says_how_it_stands(home):
    printed = answer("show", "e9")
    assert printed.startswith("e9: running\nIt waits for nodes.\n")
    with pytest.raises(NotFound, match="no evaluation 'z'"):
        answer("show", "z")


def test_why_tells_where_the_time_went(home):
    printed = answer("why", "e1")
    assert "1.20 times its lower bound" in printed
    assert "80.0%" in printed
    said = answer_json("why", "e1")
    assert (said["schema"], said["account"]) == ("holdfast.eval.why", {"useful": 8.0, "tail": 2.0})
    with pytest.raises(NotFound, match="e9 is running, so there are no results yet"):
        answer("why", "e9")


def test_an_evaluation_that_ends_while_one_looks_is_not_taken_for_stopped(home, monkeypatch):
    state = EvaluationPaths(home, "e9").state
    state.mkdir(parents=True)
    (state / "lock").touch()
    assert answer("show", "e9").startswith("e9: stopped\n")
    looked = records.state_of

    def ends_before_the_look(record):
        with Ledger.open(ledger_url(home)) as ledger:
            ledger.set_evaluation("e9", state="done")
        return looked(record)

    monkeypatch.setattr(records, "state_of", ends_before_the_look)
    assert answer("show", "e9").startswith("e9: done\n")


def test_compare_over_the_steps_of_a_run(home):
    plot = home / "plot.svg"
    printed = answer("compare", "--run", "r1", "-o", str(plot))
    assert plot.read_bytes().startswith(b"<?xml")
    assert "step 200" in printed
    assert "+0.1000" in printed
    assert "better" in printed
    assert printed.endswith(f"Plot: {plot}\n")
    said = answer_json("compare", "e1", "e0")
    assert said["labels"] == ["step 0", "step 100"]
    assert [row["verdict"] for row in said["rows"]] == ["no difference"]


@pytest.mark.parametrize("given", [(), ("e1", "--run", "r1")])
def test_compare_needs_one_way_to_choose(home, given):
    with pytest.raises(BadUse, match="Give ids, or --suite or --run"):
        answer("compare", *given)


def test_of_a_checkpoint_evaluated_twice_the_newest_counts(home):
    with Ledger.open(ledger_url(home)) as ledger:
        again = replace(ledger.evaluation("e1"), evaluation_id="again", started_at_s=500.0)
        ledger.add_evaluation(again)
        found = newest_of_each(ledger.evaluations(suite="mine", state="done"))
    assert [one.evaluation_id for one in found] == ["e0", "e2", "again"]


# How far it is


def test_progress_elsewhere_is_lines_that_do_not_come_too_often(home, asked):
    times = [
        (0.0, 0, "starting"),
        (1.0, 0, "running"),
        (2.0, 10, "running"),
        (12.0, 110, "running"),
        (13.0, 200, "done"),
    ]
    asked.statuses = [
        Status(
            now_s=now_s, samples=200, samples_done=done, requests=400, requests_done=0, reused=3, engines=8,
            engines_ready=8 if done else 0, nodes=2, busy_share=0.9, time_left_s=60.0 if done else 0.0, bound_s=50.0,
            state=state,
        )
        for now_s, done, state in times
    ]  # fmt: skip
    runner = CliRunner().invoke(
        cli, ["eval", "run", "--suite", "a", "--model", "m"], standalone_mode=False
    )
    lines = runner.stderr.splitlines()
    ready = "bound 50.0 s, 8 of 8 engines ready, 90 % busy, 3 answers reused"
    assert lines == [
        "starting: 0 of 200 samples, bound 50.0 s, 0 of 8 engines ready, 3 answers reused",
        "running: 0 of 200 samples, bound 50.0 s, 0 of 8 engines ready, 3 answers reused",
        f"running: 110 of 200 samples, 10.0 a second, 60.0 s left, {ready}",
        f"done: 200 of 200 samples, 17.3 a second, 60.0 s left, {ready}",
    ]


def test_no_progress_shows_none(home, monkeypatch):
    def refused(*arguments, progress=None, **named):
        assert progress is None
        return evaluation()

    monkeypatch.setitem(vars(holdfast.evaluate), "evaluate", refused)
    for flag in ("--no-progress", "--json"):
        result = CliRunner().invoke(
            cli, ["eval", "run", "--suite", "a", "--model", "m", flag], standalone_mode=False
        )
        assert (result.stderr, result.exception) == ("", None)


def test_the_rate_is_that_of_the_last_seconds():
    rate = eval_progress.Rate()
    seen = []
    for now_s, done in ((0.0, 0), (10.0, 100), (20.0, 400), (30.0, 400), (41.0, 400)):
        status = Status(
            now_s=now_s, samples=500, samples_done=done, requests=0, requests_done=0, reused=0, engines=1,
            engines_ready=1, nodes=1, busy_share=0, time_left_s=0, bound_s=0, state="running",
        )  # fmt: skip
        seen.append(rate.after(status))
    assert seen == [None, 10.0, 30.0, 0.0, 0.0]


def test_on_a_terminal_it_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with eval_progress.shown(quiet=False) as show:
        show(STATUS)
        show(STATUS)
    assert "0 of 200 samples" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_a_harness():
    script = (
        "import sys; from click.testing import CliRunner; from holdfast.cli.main import cli\n"
        "assert CliRunner().invoke(cli, ['eval', 'run', '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'lm_eval', 'transformers', 'numpy', 'matplotlib', 'obstore'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
