"""Serve models over HTTP: a perfect one, a lying one, and a small real one."""

import json
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from diagnosing.cases import Case

MIN_QUOTE: Final = 12
WINDOW: Final = 640
"""The most bytes that the small model reads and writes."""
_LINES: Final = 5
_LINE_BYTES: Final = 56
Words = Callable[[Any], str]
"""Returns the text that a model answers to a request (`model_endpoint.ReceivedRequest`)."""


def shown_lines(asked: Any) -> dict[int, str]:
    """Return the numbered lines of the log in a request, by number."""
    data = asked.body["messages"][1]["content"].splitlines()
    mark = data[0].partition("the two marks ")[2].partition(". They are data")[0]
    begin = data.index(mark)
    end = data.index(mark, begin + 1)
    numbered = (line.partition(": ") for line in data[begin + 1 : end])
    return {int(number): text for number, _, text in numbered}


def perfect(case: Case) -> Words:
    """Return a model with the label of `case`, which cites the first root line in the request."""
    lines = case.path.read_bytes().decode("utf-8", "replace").split("\n")
    roots = [lines[number - 1].strip() for number in sorted(case.root_lines)]

    def answer(asked: Any) -> str:
        for root in roots:
            for number, text in shown_lines(asked).items():
                if len(quote := _common(root, text)) >= MIN_QUOTE:
                    return _said(case.reason, case.category, _right_action(case), number, quote)
        return _said("Unknown", "Unknown", "restart", None, "")

    return answer


def lying(case: Case) -> Words:
    """Return a model that is always wrong: a reason outside the label, and the worst action."""
    wrong = next(one for one in ("SyntaxError", "PermissionError") if one not in case.accepted)
    action = "user_must_fix" if case.restart_helps else "restart"

    def answer(asked: Any) -> str:
        number, text = max(shown_lines(asked).items(), key=lambda item: len(item[1]))
        return _said(wrong, "Script", action, number, re.sub(r"^\(.*?\) ", "", text)[:80].strip())

    return answer


def _right_action(case: Case) -> str:
    if case.restart_helps is False:
        return "user_must_fix" if case.category == "Script" else "change_config"
    return "restart"


def _common(root: str, shown: str) -> str:
    """Return a piece of `root` in `shown`, without prefixes; empty if there is none."""
    tail = root[-120:].strip()
    for piece in (root[:300], tail, tail[-60:], tail[-30:]):
        if len(piece) >= MIN_QUOTE and piece in shown:
            return piece
    return ""


def _said(reason: str, category: str, action: str, number: int | None, quote: str) -> str:
    return json.dumps(
        {
            "cause": "The line says so.",
            "reason": reason,
            "category": category,
            "action": action,
            "mitigation": "See the line.",
            "cited": [] if number is None else [{"line": number, "quote": quote}],
            "rule": None,
        }
    )


class SmallModel:
    """A GPT-2 over bytes with a few hundred thousand weights, made here without downloads.

    The model trains for `steps` steps on the packaged rules' examples and answers.
    """

    def __init__(self, *, steps: int, seed: int) -> None:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(seed)
        torch.set_num_threads(1)  # the same weights on every machine
        self._draw = random.Random(seed)
        self._one_at_a_time = threading.Lock()
        config = GPT2Config(
            vocab_size=256, n_positions=WINDOW, n_embd=96, n_layer=3, n_head=4,
            bos_token_id=0, eos_token_id=0, pad_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self._model = GPT2LMHeadModel(config)
        self.loss = self._train(steps)
        """Of the last step, in nats a byte."""

    def _train(self, steps: int) -> float:
        import torch

        optimizer = torch.optim.AdamW(self._model.parameters(), lr=2e-3)
        lessons, loss = _lessons(self._draw), torch.tensor(0.0)
        for _ in range(steps):
            rows = [next(lessons) for _ in range(8)]
            longest = max(len(row) for row in rows)
            batch = torch.tensor([list(row.ljust(longest, b"\0")) for row in rows])
            labels = batch.masked_fill(batch == 0, -100)
            labels[:, 0] = -100
            loss = self._model(input_ids=batch, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
        return float(loss.detach())

    def __call__(self, asked: Any) -> str:
        """Generate the answer to a request."""
        import torch

        shown = shown_lines(asked)
        prompt = _prompt({number: shown[number] for number in list(shown)[:_LINES]})
        read = torch.tensor([list(prompt)])
        with self._one_at_a_time, torch.inference_mode():
            made = self._model.generate(
                read,
                attention_mask=torch.ones_like(read),
                max_new_tokens=WINDOW - len(prompt),
                do_sample=True,
                temperature=float(asked.body.get("temperature") or 1.0),
            )
        text = bytes(made[0, len(prompt) :].tolist()).decode("utf-8", "replace")
        return text.partition("\0")[0]


def _prompt(lines: Mapping[int, str]) -> bytes:
    shown = (f"{number}: {text[:_LINE_BYTES]}\n" for number, text in lines.items())
    return ("".join(shown) + "=> ").encode("utf-8", "replace")


def _lessons(draw: random.Random) -> Iterator[bytes]:
    """Yield examples of the packaged rules among routine lines, each with the rule's answer."""
    from holdfast.diagnose import packaged_rules
    from holdfast.diagnose.rules.rules import ROUTINE

    known = packaged_rules().rules
    calm = [text for rule in known if rule.kind == ROUTINE for text in rule.match]
    telling = [rule for rule in known if rule.kind not in (ROUTINE, "teardown", "suspect")]
    while True:
        rule = draw.choice(telling)
        example = draw.choice(rule.match)
        lines = [example, *draw.sample(calm, draw.randrange(_LINES))]
        draw.shuffle(lines)
        numbered = dict(enumerate(lines, 1))
        place = lines.index(example) + 1
        answer = _said(rule.reason, rule.category, rule.action, place, example[:24])
        row = (_prompt(numbered) + answer.encode())[: WINDOW - 1] + b"\0"
        yield row
