import re
from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, inspect

from holdfast.core.errors import BadUse, NotFound
from holdfast.core.ledger import EvaluationRecord, Ledger, Prior, Run, migrations
from holdfast.core.ledger.ledger import PRIORS_KEPT
from holdfast.core.paths import EvaluationPaths, ledger_url

EVALUATION = EvaluationRecord(
    evaluation_id="e1",
    suite="nightly",
    model="/models/llama",
    family="llama-64-2",
    state="running",
    started_at_s=10.5,
    folder="/home/evaluations/e1",
    mode="exact",
    scores={"gsm8k": {"exact_match,strict": [0.25, 0.01, True], "acc,none": ["nan", None, None]}},
    failed_tasks={"humaneval": "It raised."},
    account={"useful": 3.5},
    run_id="a-run",
    step=1000,
)
PRIOR = Prior(
    family="llama-64-2",
    harness="lm-eval",
    task="gsm8k",
    recorded_at_s=1.0,
    evaluation_id="e1",
    history=b"\x00\xff1",
)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        yield ledger


def test_evaluations_come_back_as_they_went_in(ledger):
    ledger.add_evaluation(EVALUATION)
    assert ledger.evaluation("e1") == EVALUATION
    ledger.set_evaluation(
        "e1", state="done", ended_at_s=20.0, makespan_s=9.5, bound_s=9.0, engines=8, nodes=2
    )
    changed = replace(
        EVALUATION, state="done", ended_at_s=20.0, makespan_s=9.5, bound_s=9.0, engines=8, nodes=2
    )
    assert ledger.evaluations() == [changed]


def test_the_newest_evaluation_comes_first_and_columns_filter(ledger):
    for number, (suite, run_id) in enumerate([("a", None), ("b", "r"), ("a", "r")]):
        ledger.add_evaluation(
            replace(
                EVALUATION,
                evaluation_id=f"e{number}",
                suite=suite,
                run_id=run_id,
                started_at_s=float(number),
            )
        )
    assert [one.evaluation_id for one in ledger.evaluations()] == ["e2", "e1", "e0"]
    assert [one.evaluation_id for one in ledger.evaluations(suite="a")] == ["e2", "e0"]
    assert [one.evaluation_id for one in ledger.evaluations(suite="a", run_id="r")] == ["e2"]
    assert ledger.evaluations(state="done") == []


def test_an_id_is_taken_once(ledger):
    ledger.add_evaluation(EVALUATION)
    with pytest.raises(
        BadUse, match=re.escape("already an evaluation 'e1'. Choose another --id, or go on")
    ):
        ledger.add_evaluation(replace(EVALUATION, suite="other"))
    assert ledger.evaluations() == [EVALUATION]


def test_an_evaluation_that_does_not_exist_is_said_so(ledger):
    for call in (lambda: ledger.evaluation("z"), lambda: ledger.set_evaluation("z", state="done")):
        with pytest.raises(NotFound, match=r"no evaluation 'z'\. `holdfast eval ls`"):
            call()


def test_an_evaluation_outlives_the_run_it_is_of(ledger):
    ledger.add_run(
        Run(
            run_id="a-run",
            state="completed",
            command=[],
            options={},
            cwd="/",
            host="h",
            pid=1,
            started_at_s=1.0,
        )
    )
    ledger.add_evaluation(EVALUATION)
    ledger.remove_run("a-run")
    assert ledger.evaluation("e1").run_id == "a-run"


def test_the_latest_prior_of_each_task_is_found(ledger):
    other = replace(PRIOR, task="mmlu")
    newer = replace(PRIOR, evaluation_id="e2", history=b"newer")
    same_name = replace(PRIOR, harness="inspect")
    ledger.add_priors([PRIOR, other])
    ledger.add_priors([newer, same_name, replace(PRIOR, family="another")])
    assert ledger.latest_priors("llama-64-2") == {
        ("lm-eval", "gsm8k"): newer,
        ("lm-eval", "mmlu"): other,
        ("inspect", "gsm8k"): same_name,
    }
    assert ledger.latest_priors("unknown") == {}


def test_priors_do_not_pile_up(ledger, tmp_path):
    other = replace(PRIOR, task="mmlu")
    ledger.add_priors([other])
    for number in range(PRIORS_KEPT + 3):
        ledger.add_priors([replace(PRIOR, history=bytes([number]))])
    engine = create_engine(ledger_url(tmp_path))
    with engine.connect() as connection:
        kept = connection.exec_driver_sql(
            "SELECT task, history FROM priors ORDER BY prior_id"
        ).all()
    engine.dispose()
    assert kept == [("mmlu", other.history)] + [
        ("gsm8k", bytes([number])) for number in range(3, PRIORS_KEPT + 3)
    ]


def test_a_ledger_without_evaluations_gets_them_and_keeps_its_runs(tmp_path):
    url = ledger_url(tmp_path)
    engine = create_engine(url)
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO runs (run_id, state, command, options, cwd, host, pid, started_at_s, outcome)"
            " VALUES ('old', 'completed', '[]', '{}', '/', 'h', 1, 1.0, '')"
        )
        assert "evaluations" not in inspect(connection).get_table_names()
    engine.dispose()
    with Ledger.open(url) as ledger:
        assert [run.run_id for run in ledger.runs()] == ["old"]
        ledger.add_evaluation(EVALUATION)
        assert ledger.evaluation("e1") == EVALUATION


@pytest.mark.parametrize("evaluation_id", ["", "..", "../x", "a/b", ".hidden", "a\n", "x" * 65])
def test_an_evaluations_id_names_no_other_folder(evaluation_id):
    with pytest.raises(BadUse, match="is not an evaluation's id"):
        EvaluationPaths(Path("/home"), evaluation_id)


def test_an_evaluations_files_lie_in_its_folder():
    paths = EvaluationPaths(Path("/home"), "e1")
    inside = [
        paths.suite, paths.plan, paths.timeline, paths.logs, paths.samples, paths.results, paths.report, paths.state
    ]  # fmt: skip
    assert {path.parent for path in inside} == {paths.root} == {Path("/home/evaluations/e1")}
    assert len(set(inside)) == len(inside)
    assert paths.answers == Path("/home/answers")
