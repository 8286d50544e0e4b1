"""Check that an incident shows three lines, the user's own frame among them."""

import pytest
import sample_runs

from holdfast.core.accounting import summarize
from holdfast.core.paths import RunPaths
from holdfast.ui.cards import SHOWN_LIMIT, incident_card
from holdfast.ui.cited import own_frame

LOG = """\
step 1
Traceback (most recent call last):
  File "/old/train.py", line 1, in <module>
    earlier()
KeyError: 'an older one'
step 2
Traceback (most recent call last):
  File "/home/ada/train.py", line 40, in <module>
    main()
  File "/home/ada/model.py", line 12, in forward
    return self.layer(x)
           ^^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
    return forward_call(*args, **kwargs)
RuntimeError: mat1 and mat2 shapes cannot be multiplied
"""
ROOT = 15


def written(home, text, place="attempt-001/rank-0.log", run_id="r"):
    path = RunPaths(home, run_id).rank_log(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return place


def test_the_own_frame_is_the_deepest_outside_of_packages(tmp_path):
    place = written(tmp_path, LOG)
    assert LOG.splitlines()[ROOT - 1].startswith("RuntimeError")
    where, text = own_frame(tmp_path, "r", f"{place}:{ROOT}")
    assert where == f"{place}:10"
    assert text == 'File "/home/ada/model.py", line 12, in forward\nreturn self.layer(x)'


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("step 1\nKilled\n", "attempt-001/rank-0.log:2"),
        (LOG.replace("/home/ada", "/usr/lib/python3.11"), f"attempt-001/rank-0.log:{ROOT}"),
        (LOG, "attempt-002/rank-0.log:15"),
        (LOG, "../../etc/passwd:1"),
        (LOG, "attempt-001/rank-0.log:?"),
    ],
)
def test_without_an_own_frame_there_is_none(tmp_path, text, place):
    written(tmp_path, text)
    assert own_frame(tmp_path, "r", place) is None


def test_an_incident_shows_three_lines_and_folds_the_rest(tmp_path):
    with sample_runs.open_home(tmp_path) as ledger:
        sample_runs.faulty_run(ledger, tmp_path)
        summary = summarize(ledger, tmp_path, "demo-1")
    cost = summary.incidents[0]
    place = written(tmp_path, LOG, run_id="demo-1")
    lines = [(place, ROOT - 3 - n, f"other {n}", "cascade") for n in range(5)]
    root = (place, ROOT, "RuntimeError: mat1", "root")
    cost.incident.diagnosis.update(sample_runs.diagnosis("r", "Script", [*lines, root]))
    card = incident_card(cost, summary, home=tmp_path)
    assert [line.role for line in card.evidence] == ["root", "your code", "cascade"]
    assert len(card.evidence) == SHOWN_LIMIT
    assert "model.py" in card.evidence[1].text
    assert [line.text for line in card.folded] == [f"other {n}" for n in range(1, 5)]
    without = incident_card(cost, summary)
    assert [line.role for line in without.evidence] == ["root", "cascade", "cascade"]
    assert len(without.folded) == 3
