"""Python tracebacks, put together line by line within one rank's output."""

from dataclasses import dataclass
from typing import Final, Literal

import re2

from holdfast.diagnose.lines import Line

Link = Literal["none", "cause", "context", "inner"]
"""How a traceback follows the one before it: `raise … from`, an error while handling one, or the original
traceback that PyTorch repeats inside the message of the one it raises in the parent process."""

HEADER: Final = "Traceback (most recent call last):"
_SENTENCES: Final[dict[str, Link]] = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_FRAME = re2.compile(r'^\s+File "([^"]*)", line [0-9]+(, in <module>)?')
_EXCEPTION = re2.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?::\s|:$|$)")
_LIBRARY = re2.compile(r"/site-packages/|/dist-packages/|/lib(?:64)?/python[0-9.]+/|^<frozen ")
_FOREIGN_LIMIT: Final = 8
"""Lines of others that may stand inside a traceback before it counts as torn."""
_LENGTH_LIMIT: Final = 2000


@dataclass(frozen=True, slots=True)
class Raised:
    """The line that ends a traceback, and how it came to be."""

    line: Line
    in_user_code: bool
    """Whether the deepest frame lies beside the job's script, or else outside the standard library and the
    installed packages."""
    link: Link
    ignored: bool
    """Python printed it and went on (`Exception ignored in: …`)."""


class TracebackReader:
    """Feed it a rank's lines from a header on; while `is_open` it wants every line of that rank."""

    def __init__(self) -> None:
        self.is_open = False
        self._link: Link = "none"
        self._next_link: Link = "none"
        self._ignored = False
        self._next_ignored = False
        self._deepest = ""
        self._script_folder = ""
        self._length = 0
        self._foreign = 0

    def feed(self, line: Line) -> Raised | None:
        """Take one line; return the exception when this line ends a traceback."""
        text = line.text
        if text.endswith(HEADER):
            self._begin("inner" if text.endswith("Original " + HEADER) else self._next_link)
            return None
        if not self.is_open:
            self._look_for_link(text)
            return None
        self._length += 1
        if not text or text[0] in " \t":
            if frame := _FRAME.search(text):
                self._deepest = frame[1]
                if frame[2] and not self._script_folder:
                    self._script_folder = frame[1].rpartition("/")[0]
        elif self._deepest and is_exception(text):
            self.is_open = False
            return Raised(line, self._in_user_code(), self._link, self._ignored)
        else:
            self._foreign += 1
        if self._foreign > _FOREIGN_LIMIT or self._length > _LENGTH_LIMIT:
            self.is_open = False
        return None

    def _in_user_code(self) -> bool:
        # A user's package may be installed like any library; what lies beside the script that runs is still his.
        beside_script = self._script_folder and self._deepest.startswith(self._script_folder + "/")
        return bool(beside_script) or _LIBRARY.search(self._deepest) is None

    def _begin(self, link: Link) -> None:
        self.is_open = True
        self._link, self._next_link = link, "none"
        self._ignored, self._next_ignored = self._next_ignored, False
        self._deepest = self._script_folder = ""
        self._length = self._foreign = 0

    def _look_for_link(self, text: str) -> None:
        stripped = text.strip()
        if stripped in _SENTENCES:
            self._next_link = _SENTENCES[stripped]
        elif stripped.startswith("Exception ignored in"):
            self._next_ignored = True


def is_exception(text: str) -> bool:
    """Whether `text` reads `Class: message` or `Class`; log levels and metrics (`loss: 2.1`) do not."""
    match = _EXCEPTION.search(text)
    if match is None:
        return False
    name: str = match[1]
    return "." in name or (name.lstrip("_")[:1].isupper() and not name.isupper())
