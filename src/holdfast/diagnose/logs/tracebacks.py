"""Assemble Python tracebacks from the lines of one rank, and find out what printed them.

The meaning of a traceback depends on its exception, but also on the line before it and on its
frames. For example, if a finalizer, an exit handler, a logging handler or a resource tracker raises
an exception, the traceback is printed, but the program continues or was ending anyway.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import re2

from holdfast.diagnose.logs.lines import Line
from holdfast.diagnose.shapes import shape_of

Link = Literal["none", "cause", "context", "inner"]
"""The relation of a traceback to the traceback before: `raise … from`, an error while another error
was handled, or the original traceback that PyTorch repeats inside the exception of the parent
process."""

Caught = Literal["nobody", "a thread", "the interpreter"]
"""The printer of a traceback. `a thread`: a thread or a task of an event loop ended, and the
program continued. `the interpreter`: a finalizer, an exit handler or a logging handler failed, and
Python continued."""

HEADER: Final = "Traceback (most recent call last)"
_HEADER = re2.compile(r"Traceback \(most recent call last\):?(?: \(RANK (?P<rank>\d{1,6})\))?$")
"""Matches the header of a traceback. The form with `(RANK 3)` comes from torch's distributed
checkpoint, which gathers the tracebacks of all ranks.
"""
_SENTENCES: Final[dict[str, Link]] = {
    "The above exception was the direct cause of the following exception:": "cause",
    "During handling of the above exception, another exception occurred:": "context",
}
_ANOTHER_PROCESS = re2.compile(r"^-- Process \d+ terminated with the following error:$")
"""Matches the line of torch.multiprocessing below which the original traceback is repeated."""
_INTRODUCTION = re2.compile(
    r"^(?:"
    r"(?P<interpreter>Exception ignored\b|Error in atexit\b|Error in sys\.\w+:$|-+ Logging error -+$|Call stack:$"
    r"|Exception in thread .*interpreter shutdown\b|Error in .*\bfinalizer\b)"
    r"|(?P<thread>Exception in thread\b|(?:Task|Future) exception was never retrieved|Unhandled exception in event loop"
    r"|Exception in callback\b|Unhandled exception in thread\b)"
    r")"
)
"""Matches the line before the header of a traceback if it names what caught the exception."""
_BARE_INTRODUCTION = re2.compile(
    r"(?i)^(?:\W|\d|original|error|critical|fatal|exception)*$|^[a-z_][\w.]*\s{3,}$"
)
"""Matches text before the header in the same line that names no catcher: nothing, a severity, or
the name of the exception as notebooks print it."""
_FRAME = re2.compile(r'^\s+File "(?P<path>[^"]*)", line [0-9]+(?:, in (?P<function>\S+)|,|\s*$)')
"""Matches a frame of a traceback. Frames in dumps of faulthandler have no comma, and do not match.
"""
_BY_THE_INTERPRETER = re2.compile(
    r"/multiprocessing/resource_tracker\.py \w+$|/multiprocessing/util\.py (?:_run_finalizers|_exit_function)$"
    r"|/logging/(?:__init__|handlers)\.py (?:emit|flush|handleError|shutdown|doRollover)$"
    r"|/weakref\.py (?:__call__|_exitfunc)$"
    r"|/concurrent/futures/\w+\.py _python_exit$|/threading\.py _shutdown$| __del__$"
)
"""Matches path and function of an outermost frame that only the interpreter calls."""
_BY_A_THREAD = re2.compile(r"/threading\.py _bootstrap(?:_inner)?$")
_EXCEPTION = re2.compile(r"^([A-Za-z_]\w*(?:\.\w+)*)(?::\s|:$|$)")
_LIBRARY = re2.compile(r"/site-packages/|/dist-packages/|/lib(?:64)?/python[0-9.]+/|^<frozen ")
_NOTEBOOK_HEADER = re2.compile(r"^[A-Za-z_][\w.]*\s+Traceback \(most recent call last\):?$")
_BOX_END = re2.compile(r"^(?:\+-{20,}\+|╰─{20,}╯)$")
"""Matches the lower edge of the box around a traceback of rich; the exception follows."""
_FRAME_INDENT: Final = 2
_FOREIGN_LIMIT: Final = 8
"""The largest number of lines of other processes inside a traceback. With more, the traceback
counts as cut off.
"""
_LENGTH_LIMIT: Final = 2000


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception at the end of a traceback, and where the traceback came from."""

    line: Line
    in_user_code: bool
    """True if the deepest frame is in the user's code: in the folder of the job's script, or
    outside the standard library and the installed packages."""
    link: Link
    caught: Caught
    """The printer of the traceback, judged by the line before its header and by its outermost
    frame.
    """
    deepest: str
    """The file of the deepest frame."""
    script: str
    """The script that ran; if it is unknown, the file of the deepest frame."""
    introduced: bool
    """True if the traceback is a report about another program: other words stand before it in its
    first line, and no frame is in a library."""


class TracebackReader:
    """Assemble the tracebacks of one rank. While `is_open`, `feed` needs every line of the rank."""

    def __init__(self) -> None:
        self.is_open = False
        self._indent = 0
        """The indentation of the header. The line that ends the traceback is not indented further.
        """
        self._rank: int | None = None
        self._link: Link = "none"
        self._next_link: Link = "none"
        self._caught: Caught = "nobody"
        self._next_caught: Caught = "nobody"
        self._deepest = ""
        self._script_folder = ""
        self._script = ""
        self._introduced = False
        self._length = 0
        self._foreign = 0

    @property
    def expects(self) -> bool:
        """True if the last line affects how the next traceback is read."""
        return self.is_open or self._next_link != "none" or self._next_caught != "nobody"

    def feed(self, line: Line) -> Raised | None:
        """Read one line; return the exception if the line is the end of a traceback."""
        text = line.text
        if not self.is_open and not _may_begin(shape_of(text)):
            return None
        indent = len(text) - len(text.lstrip())
        if HEADER in text and (header := _HEADER.search(text)):
            self._begin("inner" if "Original " + HEADER in text else self._next_link, indent)
            self._rank = int(header["rank"]) if header["rank"] else None
            self._introduced = _BARE_INTRODUCTION.search(text[: header.start()]) is None
            if _NOTEBOOK_HEADER.search(text):
                self._deepest = "<notebook>"
            return None
        if not self.is_open:
            self._look_for_link(text)
            # The header is missing, because it was cut off or lost among the lines of other ranks.
            if frame := _FRAME.search(text):
                self._begin(self._next_link, max(indent - _FRAME_INDENT, 0))
                self._take_frame(frame)
            elif _BOX_END.search(text):
                self._begin(self._next_link, indent)
                self._deepest = "<box>"
            return None
        self._length += 1
        if not text or indent > self._indent:
            if frame := _FRAME.search(text):
                self._indent = max(self._indent, indent - _FRAME_INDENT)
                self._take_frame(frame)
        elif self._deepest and is_exception(text.lstrip()):
            self.is_open = False
            rank = line.rank if self._rank is None else self._rank
            stripped = replace(line, text=text.lstrip(), rank=rank)
            return Raised(
                line=stripped,
                in_user_code=self._in_user_code(),
                link=self._link,
                caught=self._caught,
                deepest=self._deepest,
                script=self._script or self._deepest,
                introduced=self._introduced,
            )
        elif not self._look_for_link(text):
            self._foreign += 1
        if self._foreign > _FOREIGN_LIMIT or self._length > _LENGTH_LIMIT:
            self.is_open = False
        return None

    def _in_user_code(self) -> bool:
        # The user's package may be installed like a library. Files in the folder of the running
        # script belong to the user.
        beside_script = self._script_folder and self._deepest.startswith(self._script_folder + "/")
        return bool(beside_script) or _LIBRARY.search(self._deepest) is None

    def _begin(self, link: Link, indent: int) -> None:
        self.is_open = True
        self._indent = indent
        self._link, self._next_link = link, "none"
        self._caught, self._next_caught = self._next_caught, "nobody"
        self._deepest = self._script_folder = self._script = ""
        self._introduced = False
        self._length = self._foreign = 0

    def _take_frame(self, frame: Any) -> None:
        path, function = frame["path"], frame["function"] or ""
        if not self._deepest and self._caught == "nobody":
            outermost = f"{path} {function}"
            if _BY_THE_INTERPRETER.search(outermost):
                self._caught = "the interpreter"
            elif _BY_A_THREAD.search(outermost):
                self._caught = "a thread"
        if function == "<module>" and not self._script_folder:
            self._script_folder = path.rpartition("/")[0]
        if _LIBRARY.search(path):
            self._introduced = False
        elif function == "<module>":
            self._script = path
        self._deepest = path

    def _look_for_link(self, text: str) -> bool:
        """Return True if `text` introduces a traceback, perhaps while another one is unfinished."""
        stripped = text.strip()
        if stripped in _SENTENCES:
            self._next_link = _SENTENCES[stripped]
        elif _ANOTHER_PROCESS.search(stripped):
            self._next_link = "inner"
        elif introduction := _INTRODUCTION.search(stripped):
            self._next_caught = "the interpreter" if introduction["interpreter"] else "a thread"
        else:
            return False
        return True


@functools.lru_cache(1024)
def _may_begin(text: str) -> bool:
    """Return True if `text`, with any numbers in it, can introduce or begin a traceback."""
    stripped = text.strip()
    return (
        HEADER in text
        or stripped in _SENTENCES
        or any(one.search(stripped) is not None for one in (_ANOTHER_PROCESS, _INTRODUCTION))
        or any(one.search(text) is not None for one in (_FRAME, _BOX_END))
    )


def is_exception(text: str) -> bool:
    """Return True for `Class: message` and `Class`, but not for levels or metrics (`loss: 2.1`)."""
    match = _EXCEPTION.search(text)
    if match is None:
        return False
    name: str = match[1]
    return "." in name or (name.lstrip("_")[:1].isupper() and not name.isupper())
