"""The parts of `benchmarks/diagnosis.py` that can be checked without measuring. No timings."""

import importlib
import json
import math
from pathlib import Path

import pytest

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.confidence import Support, sureness
from holdfast.diagnose.rules.taxonomy import CATEGORIES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def scoring(part):
    return part("diagnosing.scoring")


@pytest.fixture
def case(part):
    def make(**known):
        given = {
            "id": "1", "path": Path("1.log"), "kind": "noisy", "reason": "ECCError", "category": "Infrastructure",
            "accepted": frozenset({"ECCError", "CUDAError"}), "program": "1",
        }  # fmt: skip
        return part("diagnosing.cases").Case(**{**given, **known})

    return make


def test_a_reason_is_right_if_the_label_accepts_it(scoring, case):
    assert scoring.reason_right(case(), scoring.Answer(reason="CUDAError"))
    assert not scoring.reason_right(case(), scoring.Answer(reason="NodeFailure"))


def test_a_root_line_counts_among_the_first_three_cited_and_only_where_it_is_known(scoring, case):
    answer = scoring.Answer(reason="ECCError", root_lines=(4, 9, 12, 20))
    assert scoring.root_cited(case(root_lines=frozenset({12})), answer) is True
    assert scoring.root_cited(case(root_lines=frozenset({20})), answer) is False
    assert scoring.root_cited(case(), answer) is None


@pytest.mark.parametrize(
    ("faulty", "scope", "right"),
    [
        ({}, {"rank": 1}, None),
        ({"rank": 1}, {}, False),
        ({"rank": 1}, {"rank": 1}, True),
        ({"rank": 1}, {"rank": "1"}, True),
        ({"rank": 1}, {"rank": 11}, False),
        ({"rank": 1}, {"local_rank": 1}, True),
        ({"local_rank": 3}, {"rank": 3}, True),
        ({"local_rank": 3}, {"rank": 3, "local_rank": 1}, False),
        ({"rank": 1}, {"rank": [0, 1, 2, 3]}, True),
        ({"rank": 1}, {"rank": [0, 1, 2, 3, 4]}, False),
        ({"rank": [0, 1, 2, 3, 4]}, {"rank": [4, 3, 2, 1, 0]}, True),
        ({"rank": 3, "node": "a"}, {"rank": 3}, True),
        ({"rank": 3, "node": "a"}, {"rank": 3, "node": "b"}, False),
        ({"rank": 3, "node": "a"}, {"gpu": "0"}, False),
        ({"node": "gpu20-15"}, {"node": "GPU20-15.cluster.local"}, True),
        ({"node": "10.216.2.236"}, {"node": "10.216.2.7"}, False),
        ({"gpu": "0000:dc:00"}, {"gpu": ["0000:dc:00.0", "0000:5d:00.0"]}, True),
        ({"gpu": "0000:dc:00"}, {"gpu": "dc:00"}, True),
        ({"gpu": "0000:dc:00"}, {"gpu": "0000:db:00.0"}, False),
        ({"gpu": 3}, {"gpu": "3"}, True),
    ],
)
def test_who_is_at_fault(scoring, case, faulty, scope, right):
    assert scoring.scope_right(case(faulty=faulty), scoring.Answer(reason="", scope=scope)) is right


def test_the_restart_decision_is_not_asked_where_nobody_knows_it(scoring, case):
    no = scoring.Answer(reason="ECCError", restart_helps=False)
    assert scoring.restart_right(case(restart_helps=False), no) is True
    assert scoring.restart_right(case(restart_helps=True), no) is False
    assert scoring.restart_right(case(restart_helps=None), no) is None


def test_only_infrastructure_that_recovers_can_be_put_on_the_user(scoring, case):
    blamed = scoring.Answer(reason="ECCError", action="user_must_fix")
    assert scoring.not_put_on_the_user(case(restart_helps=True), blamed) is False
    assert scoring.not_put_on_the_user(case(restart_helps=False), blamed) is None
    assert scoring.not_put_on_the_user(case(restart_helps=True, category="Script"), blamed) is None


def test_a_tally_leaves_out_what_the_labels_or_the_system_do_not_say(scoring, case):
    cases = [
        case(id="a", restart_helps=True),
        case(id="b", restart_helps=None),
        case(id="c", restart_helps=False),
    ]
    answers = {name: scoring.Answer(reason="", restart_helps=True) for name in "ab"}
    assert scoring.tally(cases, answers, scoring.restart_right) == scoring.Tally(1, 1)
    assert scoring.Tally(0, 0).share is None


def test_calibration_error_of_known_answers(scoring):
    assert scoring.calibration_error([]) is None
    assert scoring.calibration_error([(1.0, True)] * 3) == 0
    assert scoring.calibration_error([(0.75, True)] * 3 + [(0.75, False)]) == pytest.approx(0)
    # two bins of the same size: |0.95 - 0.5| and |0.15 - 0|
    said = [(0.95, True), (0.95, False), (0.15, False), (0.15, False)]
    assert scoring.calibration_error(said) == pytest.approx((0.45 + 0.15) / 2)


def test_confident_and_wrong_counts_from_four_fifths_on(scoring):
    assert scoring.confident_and_wrong([(0.8, False), (0.79, False), (0.9, True)]) == scoring.Tally(
        1, 3
    )


def test_confidence_without_the_root_is_compared_program_by_program(scoring, case):
    def pair(name):
        return (
            case(id=name, program=name, kind="recorded"),
            case(id=f"{name}.root_removed", program=name, kind="root_removed", root_removed=True),
        )

    cases = [*pair("a"), *pair("b"), case(id="c", program="c", kind="recorded")]
    said = {"a": 0.9, "a.root_removed": 0.3, "b": 0.5, "b.root_removed": 0.5, "c": 0.1}
    answers = {name: scoring.Answer(reason="", confidence=value) for name, value in said.items()}
    kept, removed, fell = scoring.mean_confidences(cases, answers)
    assert (kept, removed) == (pytest.approx(0.7), pytest.approx(0.4))
    assert fell == scoring.Tally(1, 2)


# Calibration


def sample(part, rule, right, *, weight=1.0, margin=0.0):
    support = Support(rule=rule, margin=margin)
    return part("diagnosing.calibrating").Sample(support=support, right=right, weight=weight)


def test_the_fit_gives_each_rule_its_share_of_right_answers(part):
    measured = [sample(part, 0.6, right=n < 50) for n in range(100)]
    measured += [sample(part, 0.9, right=n < 95) for n in range(100)]
    numbers = part("diagnosing.calibrating").fit(measured)
    assert sureness(measured[0].support, *numbers) == pytest.approx(0.5, abs=0.01)
    assert sureness(measured[-1].support, *numbers) == pytest.approx(0.95, abs=0.01)


def test_the_fit_weighs_answers_and_stays_finite_without_an_error(part):
    calibrating = part("diagnosing.calibrating")
    light = [sample(part, 0.6, right=False, weight=0.25) for _ in range(100)]
    measured = [*light, *[sample(part, 0.6, right=True) for _ in range(75)]]
    measured += [sample(part, 0.9, right=True) for _ in range(100)]
    assert calibrating.share_right(measured) == pytest.approx(0.875)
    numbers = calibrating.fit(measured)
    assert sureness(light[0].support, *numbers) == pytest.approx(0.75, abs=0.02)
    assert all(math.isfinite(one) for one in numbers)


def test_what_calibrates_is_asked_about_with_and_without_the_rule_that_decides(
    part, case, tmp_path
):
    log = tmp_path / "job.log"
    log.write_text("CUDA error: uncorrectable ECC error encountered\n")
    known = case(path=log, accepted=frozenset({"ECCError"}))
    first, second = part("diagnosing.calibrating").samples([known])
    assert (first.right, first.weight) == (True, 1.0)
    assert (second.right, second.weight) == (False, part("diagnosing.calibrating").LEFT_OUT)
    assert sureness(second.support) < sureness(first.support)


def test_the_calibrating_make_is_not_judged_by_its_own_error(part, case):
    makes, judged = part("diagnosing.makes"), part("diagnosing.accuracy").Judged
    answers = {"1": part("diagnosing.scoring").Answer(reason="ECCError", confidence=0.5)}
    known = judged(cases=[case(cascade_first=True)], ours=answers, peers={})
    for name, must in (("second", "<= 0.0800"), (makes.CALIBRATING, None)):
        rows = {row.measure: row for row in makes.make_rows(name, known)}
        row = next(row for measure, row in rows.items() if "10 bins, 1 logs" in measure)
        assert row.ours == pytest.approx(0.5)
        assert (row.must is None) is (must is None)


def test_the_second_make_has_the_given_failures_alone(part, case, tmp_path):
    label = {
        "category": "Infrastructure", "reason": "ECCError", "accept_reasons": ["ECCError"], "faulty": None,
        "recoverable_by_restart": True, "root_lines": [1],
    }  # fmt: skip
    labels = "".join(json.dumps({**label, "id": name}) + "\n" for name in "12")
    (tmp_path / "labels_noisy2.jsonl").write_text(labels)
    (tmp_path / "1.log").write_text("uncorrectable ECC error\n")
    given = [case(kind=kind, path=tmp_path / "1.log") for kind in ("clean", "noisy")]
    found = part("diagnosing.makes").makes(given, tmp_path, [], tmp_path)
    assert [one.program for one in found["second"]] == ["1"]


# Cases


def test_a_log_names_a_rank_in_any_of_the_usual_ways(part):
    names = part("diagnosing.cases").names
    for text in (
        "[rank1]: x",
        "[Rank 1] x",
        "  rank      : 1 (local_rank: 1)",
        "[default1]:x",
        "rank=1",
    ):
        assert names(text, "rank", 1), text
    for text in ("[rank11]: x", "ranks", "1 rank", "[rank0]: exit code 1"):
        assert not names(text, "rank", 1), text
    assert names("cn131: x", "node", "CN131")
    assert not names("cn13: x", "node", "cn131")


def test_the_laboratorys_cases_are_the_recorded_ones_and_their_variants(part, tmp_path):
    label = {
        "id": "p", "program": "p", "category": "Infrastructure", "reason": "ECCError", "accept_reasons": ["ECCError"],
        "root_cause": "x", "recoverable_by_restart": True, "faulty": {"rank": 1}, "root_lines": [2],
    }  # fmt: skip
    for folder, name, text in (
        ("lab/clean", "p.log", "[rank0]: a\n[rank1]: b\n"),
        ("lab/ranks/p", "rank-1.log", "b\n"),
        ("variants/unprefixed", "p.log", "a\nb\n"),
        ("variants/root_removed", "p.log", "[rank0]: a\n[rank1]: c\n"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    changed = [
        {**label, "id": f"p.{name}", "variant": name, "log": f"{name}/p.log", **more}
        for name, more in (
            ("unprefixed", {}),
            ("root_removed", {"root_removed": True, "root_lines": []}),
        )
    ]
    (tmp_path / "lab/labels.jsonl").write_text(json.dumps(label) + "\n")
    (tmp_path / "variants/labels.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in changed)
    )
    found = {
        one.id: one
        for one in part("diagnosing.cases").lab_cases(tmp_path / "lab", tmp_path / "variants")
    }
    assert [found[name].kind for name in sorted(found)] == [
        "recorded",
        "ranks",
        "root_removed",
        "unprefixed",
    ]
    assert found["p"].faulty == {"rank": 1}
    assert found["p.ranks"].path.is_dir()
    assert found["p.unprefixed"].faulty == {}, "without prefixes the log names no rank"
    assert found["p.root_removed"].faulty == {}
    assert found["p.root_removed"].root_removed


# Peers


def test_the_baselines_know_every_reason_by_a_name_of_the_taxonomy(part):
    baselines = part("diagnosing.baselines")
    assert {reason for reason, _ in baselines.PRIORITIES} == set(CATEGORIES) - {"Unknown"}


def test_the_baselines_find_the_first_the_last_and_the_weightiest_line(part, tmp_path):
    baselines = part("diagnosing.baselines")
    log = tmp_path / "a.log"
    log.write_text(
        "step 1\n[rank3]: KeyError: 'a'\nTraceback (most recent call last):\n"
        "CUDA error: uncorrectable ECC error encountered\nstep 2\nRuntimeError: x\nend\n"
    )
    first, last, best = (baselines.BASELINES[name](log) for name in baselines.BASELINES)
    assert (first.reason, first.root_lines, dict(first.scope)) == ("KeyError", (2,), {"rank": 3})
    assert not first.restart_helps
    assert (last.reason, last.root_lines) == ("RuntimeError", (6,))
    assert (best.reason, best.root_lines, best.restart_helps) == ("ECCError", (4,), True)
    log.write_text("nothing\n")
    assert {baselines.BASELINES[name](log).reason for name in baselines.BASELINES} == {"Unknown"}


def test_the_restart_agents_answer_is_read_in_its_favour(part, tmp_path):
    nvrx = part("diagnosing.nvrx")
    log = tmp_path / "a.log"
    log.write_text("a\nRuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    primary = {
        "line": 2,
        "failure_class": "observed_exception",
        "rank": "1",
        "node": None,
        "gpu": None,
    }
    answer = nvrx.read({"decision": "RESTART", "primary_failure": primary}, log)
    assert (answer.reason, answer.root_lines, dict(answer.scope)) == ("ECCError", (2,), {"rank": 1})
    assert (answer.restart_helps, answer.action) == (True, "restart")
    answer = nvrx.read(
        {"decision": "STOP", "primary_failure": {**primary, "failure_class": "cuda_oom"}}, log
    )
    assert (answer.reason, answer.restart_helps, answer.action) == (
        "OutOfMemoryError",
        False,
        "user_must_fix",
    )
    assert nvrx.read({"decision": "RESTART", "primary_failure": None}, log).reason == "Unknown"
    assert set(nvrx.REASONS.values()) <= set(CATEGORIES)


def test_the_restart_agent_is_left_out_with_a_reason(part, tmp_path):
    nvrx = part("diagnosing.nvrx")
    assert "--nvrx" in nvrx.missing(None)
    assert str(tmp_path) in nvrx.missing(tmp_path)
    (tmp_path / nvrx.PACKAGE).parent.mkdir(parents=True)
    (tmp_path / nvrx.PACKAGE).write_text("")
    assert nvrx.missing(tmp_path) is None


# The generated log


def test_the_generated_log_has_its_root_where_it_says(part, tmp_path):
    big_log = part("diagnosing.big_log")
    log = big_log.write_big_log(tmp_path / "a.log", 6_000_000, seed=1)
    text = log.path.read_text()
    assert len(text) == log.size_bytes == pytest.approx(6_000_000, rel=0.01)
    lines = text.split("\n")
    assert "uncorrectable ECC" in lines[log.root_line - 1]
    assert "%(" not in text
    assert "%%" not in text
    steps = [
        int(line.split()[3].rstrip("/"))
        for line in lines
        if " iteration " in line and "samples" in line
    ]
    assert steps == sorted(set(steps))
    said = diagnose(log.path)
    assert (said.reason, said.root_lines[0].line, said.scope["rank"]) == (
        big_log.REASON,
        log.root_line,
        big_log.GUILTY,
    )


# Compression


def test_a_root_is_kept_by_its_number_or_its_text(part, case, tmp_path):
    log = tmp_path / "a.log"
    routine = "".join(f"[rank{n % 4}]: step {n} loss 2.0{n}\n" for n in range(3000))
    end = "Traceback (most recent call last):\n  File 'a.py', line 1, in <module>\nKeyError: 'tokens'\n"
    log.write_text(routine + end)
    squeeze = part("diagnosing.compression").squeeze
    squeezed = squeeze(case(path=log, root_lines=frozenset({3003})))
    assert squeezed.root_kept
    assert squeezed.bytes_in == log.stat().st_size > 50 * squeezed.bytes_out
    assert not squeeze(case(path=log, root_lines=frozenset({17}))).root_kept


# Learning


def test_the_gap_is_counted_over_all_folds(part):
    learning = part("diagnosing.learning")

    def fold(with_all, without, after):
        return learning.Fold(
            asked=10,
            with_all=with_all,
            without=without,
            after={1: after},
            worsened={1: ()},
            unjudged_worsened={},
        )

    assert learning.gap_closed([fold(10, 2, 6), fold(9, 7, 9)], 1) == pytest.approx(6 / 10)
    assert learning.gap_closed([fold(5, 5, 5)], 1) is None


def test_lessons_are_of_many_programs_before_many_variants_of_one(part, case):
    learning = part("diagnosing.learning")
    cases = [
        case(id=f"{program}.{kind}", program=program, kind=kind)
        for program in "ab" for kind in ("noisy", "recorded", "permuted")
    ]  # fmt: skip
    cases.append(case(id="other", program="c", kind="recorded", reason="KeyError"))
    assert [one.id for one in learning.lessons(cases, "ECCError", 3)] == [
        "a.recorded",
        "b.recorded",
        "a.noisy",
    ]


def test_each_reason_is_taken_out_in_one_fold_and_both_have_many(part):
    fold_of = part("diagnosing.learning").fold_of
    assert fold_of("Others") == -1
    folds = [fold_of(reason) for reason in CATEGORIES if reason not in ("Others", "Unknown")]
    assert set(folds) == {0, 1}
    assert 10 <= sum(folds) <= len(folds) - 10


def test_rules_without_a_reason_say_it_no_more(part, tmp_path):
    rules = part("diagnosing.learning")._without({"KeyError"})
    assert "KeyError" not in {rule.reason for rule in rules.rules}
    log = tmp_path / "a.log"
    log.write_text(
        "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nKeyError: 'tokens'\n"
    )
    ours = part("diagnosing.systems").ours
    assert ours(log).reason == "KeyError"
    assert ours(log, rules).reason != "KeyError"


def test_what_models_add_to_a_case_that_no_rule_knows(part, case, tmp_path):
    """Over real HTTP, a perfect model's answer is learned; a wrong model's spoils no answer."""
    log = tmp_path / "job.log"
    root = "[rank3]: lease 0x11 on fabric segment gone; quorum of the segment is void"
    log.write_text(f"[rank0]: model built with 42 layers\n{root}\n[rank0]: closing the books\n")
    known = case(
        path=log, reason="NetworkError", accepted=frozenset({"NetworkError"}), root_lines=frozenset({2}),
        restart_helps=True,
    )  # fmt: skip
    rows = part("diagnosing.agents").rows([known], quick=True, seed=0)
    found = {row.measure: row.ours for row in rows}
    assert found["logs that the rules leave open, of 1"] == 1
    assert found["right of these, rules alone"] == 0
    assert found["right of these, with a perfect model"] == 1
    assert found["right of these, with a wrong model"] == 0
    assert found["answers that a wrong model worsened"] == 0
    assert found["of these, answered without it once confirmed"] == 1
    assert found["other answers worsened by what was learned"] == 0
