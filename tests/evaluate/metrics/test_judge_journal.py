"""Check the judge's requests in a span of time, from its journal."""

from holdfast.evaluate.metrics.judge.journal import JudgeJournal, judged_between


def test_answers_in_the_stretch_are_found_and_nothing_else(tmp_path):
    journal = JudgeJournal(tmp_path / "j", "e")
    tries = {
        0: (99.0, 99.5, 10),  # before
        1: (101.0, 103.0, 10),
        2: (102.0, 104.0, 0),  # turned away
        3: (105.0, 106.0, 100),  # failed: all that was reserved
        4: (107.0, 109.0, 20),
        5: (119.0, 121.0, 10),  # ended after
    }
    for number, (asked_s, came_s, tokens) in tries.items():
        journal.reserve(asked_s, number, 100, 7)
        journal.settle(came_s, number, tokens, 7)
    journal.reserve(108.0, 6, 100, 7)
    journal.close()
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"what": "settled", "at_s": 1')
    found = judged_between(tmp_path / "j", 100.0, 120.0, model=3)
    assert [(one.t0, one.t1, one.tokens, one.model, one.task, one.sample) for one in found] == [
        (1.0, 3.0, 10, 3, -1, -1), (7.0, 9.0, 20, 3, -1, -1),
    ]  # fmt: skip
    assert judged_between(tmp_path / "none", 0.0, 1.0) == []
