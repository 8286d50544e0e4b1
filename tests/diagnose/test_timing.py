"""Test that times decide: a late event is no cause, and a wait begins when its cause happens."""

import datetime
import random

import pytest
from failures import FAILURES, raised, steps, watchdog

from holdfast.diagnose import diagnose
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.explain.timing import Span, began_wait, follows_cost
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.rules.packaged import packaged_rules

START = datetime.datetime(2026, 11, 21, 1, 0, 0, tzinfo=datetime.UTC)


def at(seconds, lines, form="%Y-%m-%d %H:%M:%S"):
    """Return `lines` with a launcher's time stamps, ten lines a second."""
    return [
        f"{(START + datetime.timedelta(seconds=seconds + number / 10)).strftime(form)} {line}"
        for number, line in enumerate(lines)
    ]


def span(first_s, waited_s=None, clock=0):
    return Span(first_s=first_s, printed_s=first_s, last_s=first_s, clock=clock, waited_s=waited_s)


def test_nothing_is_charged_where_a_time_is_absent_or_clocks_differ():
    pairs = [
        (None, span(0)),
        (span(9e3), None),
        (span(9e3), span(0, clock=1)),
        (span(9e9), span(0)),
    ]
    assert [follows_cost(*pair) for pair in pairs] == [0, 0, 0, 0]
    assert [began_wait(*pair) for pair in [*pairs[:3], (span(9e9), span(0, 600))]] == [None] * 4
    unsure = Span(first_s=0, printed_s=None, last_s=0, clock=0)
    assert follows_cost(span(9e3), unsure) == 0


def test_a_cause_comes_before_its_effect_but_for_what_output_is_kept_back():
    assert follows_cost(span(30), span(0)) == 0
    assert follows_cost(span(300), span(0)) > follows_cost(span(0), span(3000)) > 0


def test_a_wait_began_when_its_cause_happened():
    timeout = span(1800, waited_s=1800)
    assert began_wait(span(5), timeout)
    assert began_wait(span(1790), timeout) is False
    assert began_wait(span(-4000), timeout) is False
    assert follows_cost(span(5), timeout) == 0, "what waits comes late"


def written(tmp_path, **logs):
    for name, lines in logs.items():
        (tmp_path / f"{name.replace('_', '-')}.log").write_text("\n".join(lines) + "\n")
    return diagnose(tmp_path)


def waiting(with_time):
    """Return a log in which rank 1 raises as the wait begins, and rank 3 fails at teardown."""
    put = at if with_time else lambda _seconds, lines: lines
    beginning = put(0, [line for rank in range(4) for line in steps(rank, *range(100, 110))])
    root = put(4, ["OSError: [Errno 5] Input/output error: '/data/shard-7'"])
    timeouts = put(603, [line for rank in (0, 2, 3) for line in watchdog(rank)])
    late = put(604, ["RuntimeError: the socket to the metrics server is not open"])
    return [*beginning, *root, *timeouts, *late]


def test_the_root_lies_as_long_before_the_watchdog_as_that_waited(tmp_path):
    events = scan(find_files([_file(tmp_path, waiting(with_time=True))]).files, packaged_rules())
    by_rule = {event.rule.kind: event for event in events}
    assert by_rule["collective_timeout"].time_s - by_rule["disk"].time_s == pytest.approx(
        599, abs=1
    )
    assert diagnose(_file(tmp_path, waiting(with_time=True))).root_text.startswith("OSError")


def _file(folder, lines):
    path = folder / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_time_makes_the_answer_surer(tmp_path):
    with_time, without = (
        diagnose(_file(tmp_path, waiting(with_time=one))) for one in (True, False)
    )
    assert with_time.confidence >= without.confidence


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("form", ["%Y-%m-%d %H:%M:%S", "%b %d %H:%M:%S host-1", "%H:%M:%S"])
def test_the_root_is_the_same_with_and_without_time(tmp_path, failure, form):
    lines = failure.woven(random.Random(3))
    bare = diagnose(_file(tmp_path, lines))
    timed = diagnose(_file(tmp_path, at(0, lines, form)))
    assert (timed.reason, timed.root_text) == (bare.reason, bare.root_text)


def test_steps_of_an_earlier_time_below_an_error_do_not_mean_that_it_was_survived(tmp_path):
    """Test a concatenation of two ranks' logs."""
    of_one = [
        *at(0, [f"step {step} loss 2" for step in range(1, 60)]),
        *at(900, raised(1, "KeyError: 'a'")[1:]),
    ]
    of_other = at(0, [f"step {step} loss 2" for step in range(1, 90)])
    failed = [line.replace("[rank1]: ", "") for line in of_one]
    found = diagnose(_file(tmp_path, [*failed, *of_other]))
    assert found.reason == "KeyError"
    assert all(one.role != "recovered" for one in found.evidence)


def test_a_later_time_below_an_error_means_it(tmp_path):
    error = at(900, ["KeyError: 'a'"])
    more = at(1000, [f"step {step} loss 2" for step in range(60, 90)])
    found = diagnose(_file(tmp_path, [*at(0, steps(0, *range(9))), *error, *more]))
    assert [one.role for one in found.evidence] == ["recovered"]


def test_order_holds_across_files_whose_clocks_agree(tmp_path):
    """Test an exception long before the other's, with the files in either order."""
    early = [*at(0, steps(0, 1, 2)), *at(100, ["RuntimeError: the first"]), *at(700, ["bye"])]
    late = [*at(0, steps(1, 1, 2)), *at(600, ["ValueError: the second"]), *at(700, ["bye"])]
    for names in (("rank_0", "rank_1"), ("rank_1", "rank_0")):
        found = written(tmp_path, **dict(zip(names, (early, late), strict=True)))
        assert found.root_text == "RuntimeError: the first"
