import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sample_evaluations import RESULTS, made_evaluation, made_lines, made_timeline

from holdfast.core.errors import NotFound
from holdfast.evaluate.report import write_reports
from holdfast.evaluate.report.results import write_results
from holdfast.evaluate.types.errors import EvaluationError
from holdfast.evaluate.types.evaluation import BoundTerm, read_evaluation, write_evaluation
from holdfast.evaluate.types.timeline import TimelineFile


@pytest.fixture
def evaluation(tmp_path):
    folder = tmp_path / "e-1"
    for entry in ("first", "second"):
        (folder / "samples" / entry).mkdir(parents=True)
        (folder / "samples" / entry / "samples_gsm_8k_2026-01-01T00-00-00.1.jsonl").write_text(
            f'"{entry}"\n'
        )
    return made_evaluation(made_timeline(samples=3), folder=str(folder))


def test_an_evaluation_comes_back_bit_for_bit(evaluation, tmp_path):
    odd = replace(evaluation, makespan_s=0.1 + 0.2, results={"results": {"t": {"acc,none": 1 / 3}}})
    write_evaluation(odd, tmp_path / "made")
    assert read_evaluation(tmp_path / "made") == odd
    said = json.loads((tmp_path / "made" / "results.json").read_text())
    assert (said["schema"], said["version"]) == ("holdfast.evaluation", 1)
    assert said["bound_s"] == odd.bound_s


def test_a_score_that_is_not_a_number_comes_back_too(evaluation, tmp_path):
    scores = (replace(evaluation.scores[0], value=math.nan),)
    write_evaluation(replace(evaluation, scores=scores, results={"x": math.inf}), tmp_path)
    found = read_evaluation(tmp_path)
    assert math.isnan(found.scores[0].value)
    assert found.results == {"x": math.inf}


def test_the_bound_is_its_largest_term(evaluation):
    assert (
        evaluation.bound_s == pytest.approx(evaluation.makespan_s / 1.08)
        or evaluation.bound_s == 12.0
    )
    two = replace(
        evaluation,
        makespan_s=6.0,
        bound=(BoundTerm(name="a", seconds=1.0), BoundTerm(name="b", seconds=4.0)),
    )
    assert (two.bound_s, two.ratio) == (4.0, 1.5)
    assert replace(two, bound=()).ratio is None


def test_results_that_are_not_there_or_not_ours_are_said_so(evaluation, tmp_path):
    with pytest.raises(NotFound, match=f"Go on with it: holdfast eval resume {tmp_path.name}"):
        read_evaluation(tmp_path)
    path = write_evaluation(evaluation, tmp_path)
    said = json.loads(path.read_text())
    for change, message in (
        ({"version": 2}, "is of holdfast.evaluation version 2; this Holdfast reads"),
        ({"makespan_s": "long"}, "is damaged: Expected `float`, got `str` - at `$.makespan_s`"),
    ):
        path.write_text(json.dumps({**said, **change}))
        with pytest.raises(EvaluationError, match=re.escape(message)):
            read_evaluation(tmp_path)
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(
            EvaluationError, match="Compute the scores again: holdfast eval rescore"
        ):
            read_evaluation(tmp_path)


def test_lm_evals_users_find_their_own_files(evaluation, tmp_path):
    lm_eval_utils = pytest.importorskip("lm_eval.utils")
    written = write_results(evaluation, tmp_path / "out")
    folder = written.parent
    assert folder == tmp_path / "out" / lm_eval_utils.sanitize_model_name(evaluation.model)
    names = [str(path) for path in folder.iterdir()]
    assert lm_eval_utils.get_results_filenames(names) == [str(written)]
    samples = sorted(lm_eval_utils.get_sample_results_filenames(names), key=len)
    moment = written.name.removeprefix("results_").removesuffix(".json")
    assert [lm_eval_utils.get_file_datetime(name) for name in samples] == [moment, moment]
    assert [Path(name).name.split("_2026")[0] for name in samples] == [
        "samples_gsm_8k",
        "samples_gsm_8k#2",
    ]
    assert [Path(name).read_text() for name in samples] == ['"first"\n', '"second"\n']
    said = json.loads(written.read_text())
    assert {name: said[name] for name in RESULTS} == RESULTS
    assert said["holdfast"]["errors"] == evaluation.errors


def test_written_again_it_replaces_its_own_files(evaluation, tmp_path):
    first = write_results(evaluation, tmp_path / "out")
    assert write_results(evaluation, tmp_path / "out") == first
    assert len(list(first.parent.iterdir())) == 3


def test_inspects_logs_lie_beside_them_and_those_of_an_earlier_scoring_do_not(evaluation, tmp_path):
    logs = Path(evaluation.folder) / "inspect" / "0-m" / "sums-1"
    logs.mkdir(parents=True)
    (logs / "2026-01-01T00-00-00_sums_a.eval").write_text("first")
    folder = write_results(evaluation, tmp_path / "out").parent
    moment = next(folder.glob("results_*")).stem.removeprefix("results_")
    [log] = (folder / f"inspect_{moment}").iterdir()
    assert (log.name, log.read_text()) == ("2026-01-01T00-00-00_sums_a.eval", "first")
    (logs / "2026-01-01T00-00-00_sums_a.eval").rename(logs / "2026-01-02T00-00-00_sums_b.eval")
    write_results(evaluation, tmp_path / "out")
    assert [path.name for path in log.parent.iterdir()] == ["2026-01-02T00-00-00_sums_b.eval"]


def test_samples_are_in_their_files_alone(evaluation, tmp_path):
    large = replace(evaluation, results={**RESULTS, "samples": {"large": [1]}})
    assert "samples" not in json.loads(write_results(large, tmp_path).read_text())


def test_all_reports_lie_in_the_folder(evaluation, tmp_path):
    with TimelineFile(tmp_path / "e-1" / "timeline.jsonl") as writer:
        writer.append(*made_lines(samples=3))
    page = write_reports(evaluation)
    assert page == tmp_path / "e-1" / "report.html"
    assert "What the engines did" in page.read_text()
    assert len(list((tmp_path / "e-1" / "lm-eval").rglob("results_*.json"))) == 1
    write_reports(evaluation, tmp_path / "elsewhere")
    assert len(list((tmp_path / "elsewhere").rglob("results_*.json"))) == 1
