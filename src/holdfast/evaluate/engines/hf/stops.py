"""When a generation ends: lm-eval's criterion for stop strings, computed once a token instead of once a string."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

_LOOKBACK = 2
"""Tokens looked back at beyond a stop string's own: lm_eval.models.utils_hf.MultiTokenEOSCriteria (0.4.13)."""
_REMEMBERED = 100_000


class StopStrings:
    """Whether the newest tokens spell one of `until`; equal to lm-eval's criterion at batch size 1.

    A string stops if it stands in the text of the last n + 2 tokens generated, n being how many tokens it has itself.
    Texts of token windows are remembered: generations repeat themselves, and each other.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, ...], str] = {}
        self._lengths: dict[str, int] = {}

    def watch(self, until: Iterable[str]) -> Callable[[Sequence[int]], bool]:
        """A function that tells from all tokens generated so far whether to stop now."""
        by_window: dict[int, list[str]] = {}
        for string in until:
            by_window.setdefault(self._length(string) + _LOOKBACK, []).append(string)
        windows = list(by_window.items())

        def is_stop(tokens: Sequence[int]) -> bool:
            for window, strings in windows:
                text = self._text(tuple(tokens[-window:]))
                for string in strings:
                    if string in text:
                        return True
            return False

        return is_stop

    def eos(self) -> str | None:
        """The text of the tokenizer's end-of-sequence token, which lm-eval adds to every list of stop strings."""
        token = self._tokenizer.eos_token_id
        return (
            None if token is None else str(self._tokenizer.decode(token, skip_special_tokens=False))
        )

    def _length(self, string: str) -> int:
        if string not in self._lengths:
            self._lengths[string] = len(self._tokenizer.encode(string, add_special_tokens=False))
        return self._lengths[string]

    def _text(self, tokens: tuple[int, ...]) -> str:
        text = self._texts.get(tokens)
        if text is None:
            if len(self._texts) >= _REMEMBERED:
                self._texts.clear()
            text = self._texts[tokens] = self._tokenizer.batch_decode([list(tokens)])[0]
        return text
