import math

import pytest
from sample_evaluations import RESULTS, WHY_NOT, made_evaluation, made_timeline

from holdfast.evaluate.report.table import COLUMNS, markdown, print_scores, score_rows
from holdfast.evaluate.types.scores import compact, scores_of


def cells(table):
    """Return a Markdown table's cells without padding; "N/A" becomes empty."""
    lines = [line.split("|")[1:-1] for line in table.strip().splitlines()]
    return [[bare(cell) for cell in line] for line in lines if "--" not in line[0]]


def bare(cell):
    """Strip padding, and convert numbers, since pytablewriter drops trailing zeros."""
    text = cell.strip().replace("N/A", "")
    try:
        return float(text)
    except ValueError:
        return text.lstrip("- ")


@pytest.mark.parametrize("column", ["results", "groups"])
def test_it_is_lm_evals_own_table(column):
    lm_eval_utils = pytest.importorskip("lm_eval.utils")
    theirs = cells(lm_eval_utils.make_table(RESULTS, column))
    header = ("Groups" if column == "groups" else "Tasks", *COLUMNS[1:])
    ours = cells(markdown(header, score_rows(scores_of(RESULTS, column))))
    assert len(ours) == len(theirs)
    for mine, their in zip(ours, theirs, strict=True):
        if mine[-1] == "":  # lm-eval writes a plus-minus where the standard error is "N/A"
            their[-2] = ""
        assert mine == their


def test_scores_say_where_they_stand():
    scores = {(score.task, score.metric, score.filter): score for score in scores_of(RESULTS)}
    group, task = scores["mmlu", "acc", "none"], scores["mmlu_a", "acc_norm", "none"]
    assert (group.group, group.depth, group.samples) == (True, 0, 200)
    assert (task.group, task.depth, task.n_shot, task.version, task.stderr) == (
        False,
        1,
        0,
        1.0,
        0.021,
    )
    perplexity = scores["wikitext", "word_perplexity", "none"]
    assert (perplexity.higher_is_better, perplexity.stderr, perplexity.samples) == (False, None, 62)
    assert [score.task for score in scores_of(RESULTS)][:4] == [
        "mmlu",
        "mmlu_a",
        "mmlu_a",
        "mmlu_b",
    ]
    assert scores_of({}) == ()


def test_a_score_that_is_no_number_is_kept_as_it_is():
    (score, word) = scores_of({"results": {"t": {"f1,none": math.nan, "winner,none": "both"}}})
    assert (score.number, word.value, word.number) == (None, "both", None)
    assert compact([score, word]) == {
        "t": {"f1,none": ["nan", None, None], "winner,none": ["both", None, None]}
    }


def test_printed_elsewhere_it_is_markdown_and_says_what_failed(capsys):
    print_scores(made_evaluation(made_timeline(samples=3)))
    printed = capsys.readouterr().out
    assert printed.startswith("|Tasks ")
    assert "\n|Groups|" in printed
    assert printed.endswith(f"humaneval: no scores: {WHY_NOT}\n")


def test_on_a_terminal_it_is_a_table_whose_brackets_are_text(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    results = {
        "results": {"t[bold]": {"alias": "t[bold]", "acc,none": 0.25, "acc_stderr,none": 0.125}}
    }
    print_scores(
        made_evaluation(
            made_timeline(samples=3), results=results, scores=scores_of(results), errors={}
        )
    )
    printed = capsys.readouterr().out
    assert "t[bold]" in printed
    assert "0.2500" in printed
    assert "|Tasks" not in printed
