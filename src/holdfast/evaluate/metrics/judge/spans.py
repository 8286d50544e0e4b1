"""What a judge was asked in a stretch of time, as its journal has it: for reports, when nobody writes it any more."""

import json
from pathlib import Path

from holdfast.evaluate.types.timeline import JudgeSpan


def judged_between(journal: Path, from_s: float, to_s: float, *, model: int = 0) -> list[JudgeSpan]:
    """The judge's answers in a stretch of time; none where there is no journal.

    A try that took nothing (it was turned away) or all that was reserved for it (it failed, or nobody knows) is left
    out: a luckier schedule would not have had it. Which sample asked is not in a journal, so `task` and `sample` are
    -1; nor is how long it waited.

    Args:
        journal: the judge's (`judge_journal`).
        from_s: seconds since the Unix epoch; the times of what is returned count from here.
        to_s: likewise.
        model: that the spans are said to be of.
    """
    found: list[JudgeSpan] = []
    reserved: dict[int, tuple[float, int]] = {}
    try:
        file = journal.open("rb")
    except FileNotFoundError:
        return found
    with file:
        for text in file:
            if not text.endswith(b"\n"):
                break
            line = json.loads(text)
            if line["what"] == "reserved":
                reserved[line["request"]] = line["at_s"], line["tokens"]
            elif line["what"] == "settled" and line["request"] in reserved:
                asked_s, most = reserved.pop(line["request"])
                if from_s <= asked_s and line["at_s"] <= to_s and 0 < line["tokens"] < most:
                    t0, t1 = asked_s - from_s, line["at_s"] - from_s
                    found.append(
                        JudgeSpan(
                            model=model, task=-1, sample=-1, tokens=line["tokens"], t0=t0, t1=t1
                        )
                    )
    return found
