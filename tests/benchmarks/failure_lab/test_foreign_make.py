"""The foreign make of noise: the failure stands in it whole, the same seed gives the same log."""

import re

import pytest

from failure_lab.foreign import LINES, surround
from failure_lab.foreign_lines import CHATTER, DOWN, PREFIXES, PROGRESS, START, SURVIVED
from failure_lab.routines import CASCADE, LIBRARY, NOISE, RECOVERED

FAILURE = ["[rank3]: Traceback (most recent call last):", "[rank3]: KeyError: 'tokens'"]
RUNTIMES_OWN = {
    "Traceback (most recent call last):",
    "terminate called after throwing an instance of",
}


def words(template):
    return re.sub(r"\{+[^{}]*\}+|\[rank\d*\]: ?", " ", template).split()


def runs(templates, length=4):
    found = set()
    for template in templates:
        if not any(own in template for own in RUNTIMES_OWN):
            said = words(template)
            found |= {tuple(said[at : at + length]) for at in range(len(said) - length + 1)}
    return found


@pytest.mark.parametrize("cascade_first", [True, False])
def test_the_failure_stands_whole_within_noise_before_and_after(cascade_first):
    made = surround(FAILURE, "a", cascade_first=cascade_first)
    own = [(at, line) for at, line in enumerate(made) if line.origin]
    assert [line.origin for _, line in own] == [1, 2]
    assert all(line.text.endswith(text) for (_, line), text in zip(own, FAILURE, strict=True))
    first, last = own[0][0], own[-1][0]
    assert first >= LINES
    assert len(made) - last > 60
    assert (first - LINES > len(made) - last - 61) is cascade_first, "the cascade is on one side"


def test_the_same_seed_gives_the_same_log_and_another_another():
    def text(seed):
        return [line.text for line in surround(FAILURE, seed, cascade_first=True)]

    assert text("a") == text("a")
    assert text("a") != text("b")


def test_every_prefix_loop_and_group_is_used():
    logs = [
        "\n".join(one.text for one in surround([], str(seed), cascade_first=True))
        for seed in range(60)
    ]
    for template in (*PROGRESS, *CHATTER, *(group[0] for group in (*SURVIVED, *DOWN))):
        piece = max(re.split(r"\{+[^{}]*\}+", template), key=len).replace("{{", "{")
        assert any(piece in log for log in logs), template
    for prefix in PREFIXES:
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", r"\\S+", re.escape(prefix)) + "job spec:")
        assert any(pattern.search(log) for log in logs), prefix


def test_the_make_shares_no_wording_with_the_first():
    first = [*LIBRARY, *(line for group in (*RECOVERED, *CASCADE) for line in group)]
    for noise in NOISE.values():
        first += [
            *noise.start,
            noise.step,
            *noise.chatter,
            *(line for group in noise.recovered for line in group),
        ]
    foreign = [
        *START,
        *CHATTER,
        *PROGRESS,
        *(line for group in (*SURVIVED, *DOWN) for line in group),
    ]
    assert not runs(first) & runs(foreign)
