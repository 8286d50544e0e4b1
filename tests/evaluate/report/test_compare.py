import random
from dataclasses import replace

import pytest

from holdfast.core.errors import BadUse
from holdfast.core.ledger import EvaluationRecord
from holdfast.evaluate.report.compare import compare, plot


def record(name, scores, **other):
    fields = {
        "suite": "nightly",
        "model": f"/models/{name}",
        "family": "f",
        "state": "done",
        "started_at_s": 1.0,
    }
    return EvaluationRecord(
        evaluation_id=name, folder="/x", scores=scores, **{**fields, "mode": "exact", **other}
    )


def scored(value, stderr=0.01, higher=True):
    return {"t": {"acc,none": [value, stderr, higher]}}


def only_row(*records):
    (row,) = compare(records).rows
    return row


@pytest.mark.parametrize(
    ("first", "last", "verdict"),
    [
        (scored(0.5), scored(0.56), "better"),
        (scored(0.56), scored(0.5), "worse"),
        (scored(0.5), scored(0.52), "no difference"),
        (scored(5.0, higher=False), scored(4.0, higher=False), "better"),
        (scored(5.0, higher=None), scored(4.0, higher=None), "differs"),
        (scored(0.5, None), scored(0.9), "unknown"),
        (scored(0.5, None), scored(0.5, None), "no difference"),
        (scored(0.5, 0.0), scored(0.5001, 0.0), "better"),
    ],
)
def test_a_difference_is_one_beyond_chance(first, last, verdict):
    row = only_row(record("a", first), record("b", last))
    assert row.verdict == verdict
    assert row.difference == pytest.approx(last["t"]["acc,none"][0] - first["t"]["acc,none"][0])


def test_standard_errors_add_in_squares():
    row = only_row(record("a", scored(0.5, 0.03)), record("b", scored(0.5, 0.04)))
    assert row.stderr == pytest.approx(0.05)


def test_one_difference_in_twenty_is_chance():
    """The test's own error rate, on scores that differ by chance alone."""
    draw, found = random.Random(4), 0
    for _ in range(4000):
        first, last = (draw.gauss(0.5, 0.02) for _ in range(2))
        found += (
            only_row(record("a", scored(first, 0.02)), record("b", scored(last, 0.02))).verdict
            != "no difference"
        )
    assert 0.04 < found / 4000 < 0.06


def test_steps_are_put_in_order_and_names_are_not():
    stepped = compare([record("b", scored(0.2), step=200), record("a", scored(0.1), step=100)])
    assert (stepped.labels, stepped.steps) == (("step 100", "step 200"), (100, 200))
    assert stepped.rows[0].difference == pytest.approx(0.1)
    named = compare([record("b", scored(0.2), step=200), record("a", scored(0.1))])
    assert (named.labels, named.steps) == (("b", "a"), ())


def test_two_of_one_name_are_told_apart():
    one = record("e1", scored(0.1), model="/x/llama")
    assert compare([one, replace(one, evaluation_id="e2")]).labels == ("e1", "e2")


def test_what_one_does_not_have_stays_empty():
    other = {"u": {"f1,none": ["nan", None, True]}, "t": {"acc,none": [0.5, 0.1, True]}}
    comparison = compare(
        [
            record("a", scored(0.5)),
            record("b", other),
            record("c", {"v": {"acc,none": [1, None, True]}}),
        ]
    )
    assert [(row.task, [value is not None for value in row.values]) for row in comparison.rows] == [
        ("t", [True, True, False]),
        ("v", [False, False, True]),
    ]
    assert {row.verdict for row in comparison.rows} == {"unknown"}


def test_what_makes_them_less_comparable_is_said():
    one = record("a", scored(0.1), numerics="x", harness_versions={"lm-eval": "0.4.13"})
    two = record(
        "b",
        scored(0.2),
        numerics="y",
        mode="free",
        harness_versions={"lm-eval": "0.4.14"},
        state="stopped",
    )
    assert compare([one, two]).notes == (
        "Their modes differ: exact; free.",
        "Their numerics differ: x; y.",
        "Their harnesses differ: lm-eval 0.4.13, lm-eval 0.4.14.",
        "Not complete: b.",
    )
    assert compare([one, replace(one, evaluation_id="c")]).notes == ()


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(BadUse, match=r"1 evaluation cannot be compared\. Give two or more"):
        compare([record("a", scored(0.1))])
    with pytest.raises(BadUse, match="a, b have no metric in common"):
        compare([record("a", scored(0.1)), record("b", {"other": {"acc,none": [1.0, None, True]}})])


@pytest.mark.parametrize(("suffix", "stepped"), [("svg", True), ("png", False)])
def test_the_plot_has_a_panel_a_task(tmp_path, monkeypatch, suffix, stepped):
    monkeypatch.setattr("holdfast.evaluate.report.compare.PANELS_LIMIT", 4)
    scores = {f"task_{number}": {"acc,none": [0.1, 0.01, True]} for number in range(7)}
    records = [
        record(name, scores, step=step if stepped else None) for step, name in enumerate("abc")
    ]
    path = tmp_path / "made" / f"plot.{suffix}"
    assert plot(compare(records), path) == 3
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    plot(compare(records), path)
    assert path.read_bytes() == data  # neither a date nor a random id in it


def test_a_plot_of_another_kind_is_refused(tmp_path):
    comparison = compare([record("a", scored(0.1)), record("b", scored(0.1))])
    with pytest.raises(BadUse, match=r"Give a file that ends in \.svg, \.png, \.pdf"):
        plot(comparison, tmp_path / "plot.gif")
    assert list(tmp_path.iterdir()) == []
