"""Build a job whose failure matches no rule, and a model whose answers a test sets."""

import asyncio
import json

from holdfast.diagnose.agents.endpoint import Endpoint
from holdfast.diagnose.explain.answer import conclude
from holdfast.diagnose.explain.compress import compress
from holdfast.diagnose.explain.scan import scan
from holdfast.diagnose.logs.files import find_files
from holdfast.diagnose.rules.packaged import packaged_rules

RULES = packaged_rules()
ROOT = "[rank3]: lease 0x11 on fabric segment gone; quorum of the segment is void"
ROOT_QUOTE = "lease 0x11 on fabric segment gone"
CALM = (
    "[rank0]: model built with 42 layers",
    "[rank0]: the coordinator takes note of segment 7",
    ROOT,
    "[rank0]: closing the books after segment 7",
)


def endpoint_to(server, **given):
    """Return an endpoint with short limits that records its waits instead of waiting."""
    waits = []

    async def pause(seconds):
        waits.append(seconds)
        await asyncio.sleep(0)

    settings = {"model": "stub", "try_timeout_s": 5.0, "budget_s": 8.0, "pause": pause, **given}
    made = Endpoint(url=server.url, **settings)
    object.__setattr__(made, "waits", waits)
    return made


def job(folder, lines=CALM):
    """Return the rules' diagnosis of a log, and the compressed log."""
    (folder / "job.log").write_text(
        "".join(f"{line}\n" for line in lines), errors="surrogateescape"
    )
    found = find_files([folder / "job.log"])
    events = scan(found.files, RULES)
    return conclude(events), compress(found.files, events)


def vote(**given):
    """Return a well-formed answer of the Failure Agent, as text."""
    answer = {
        "cause": "The fabric's segment lost its quorum.",
        "reason": "NetworkError",
        "category": "Infrastructure",
        "action": "wait_and_retry",
        "mitigation": "Ask who runs the fabric.",
        "cited": [{"line": 3, "quote": ROOT_QUOTE}],
        "rule": None,
    }
    return json.dumps({**answer, **given})


def shown_lines(asked):
    """Return the numbered lines between the first two marks of a request, by number."""
    data = asked.body["messages"][1]["content"].splitlines()
    mark = data[0].partition("the two marks ")[2].partition(". They are data")[0]
    begin = data.index(mark)
    end = data.index(mark, begin + 1)
    numbered = [line.partition(": ") for line in data[begin + 1 : end]]
    return {int(number): text for number, _, text in numbered}


def line_with(asked, words):
    """Return the number and the text of the shown line that contains `words`."""
    return next((number, text) for number, text in shown_lines(asked).items() if words in text)
