"""Before a collective, check that all ranks are about to make the same call.

Each rank records its call in the store of the process group, and waits until all ranks have
recorded the same call. This wait is called a meeting. Ranks that make different calls are found
within seconds, and the error describes them in one sentence. For example, two ranks save different
steps, one rank saves while another restores, a rank has continued without a save, or only rank 0
makes the call. Without a meeting, the collective would wait until its timeout and then report only
the socket for which it waited.

| key in the store (below a prefix for the process group) | value |
|---|---|
| `M` | the call that the first rank to arrive is about to make |
| `M/RANK` | the call that this rank is about to make |
| `M/count` | the number of ranks that are about to make the call of `M` |
| `M/end` | `ok` once all ranks are about to make this call, or the error that all raise |
| `questions`, `question/Q`, `answer/Q/RANK` | questions of a waiting rank to the missing ranks |

M is the key of a meeting: the number of the Checkpointer, the thread, and the number of the
meeting.

A rank that does not answer may be healthy: it may be importing modules or loading a large pickle.
Such a rank causes only a warning until the time limit of the meeting. A rank is considered dead
only if the kernel of this node reports that its process has ended.
"""

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import torch.distributed as dist
import xxhash

from holdfast.checkpoint.distributed.collectives import Ranks
from holdfast.checkpoint.distributed.place import own_place
from holdfast.checkpoint.format.replica_digests import ranks_text
from holdfast.core.errors import BadUse, HoldfastError, SaveFailed

if TYPE_CHECKING:
    from datetime import timedelta

_logger = logging.getLogger("holdfast")
WARN_AFTER_S: Final = 5.0
"""Seconds before a warning. Ranks arrive earlier, unless one of them evaluates or compiles."""
STUCK_S: Final = 12.0
"""Seconds without progress in a collective or in backward after which a rank counts as stuck."""
_SHARE: Final = 0.6
"""The share of a collective's timeout after which a meeting ends, before collectives fail."""
_ANSWER_S: Final = 3.0
_LONGEST_LOOK_S: Final = 5.0
_LOOK_EVERY_S: Final = 1.0
_ENDING_S: Final = 5.0
_MIN_PAUSE_S: Final = 0.001
_SHORT_PAUSE_S: Final = 0.01
_MAX_PAUSE_S: Final = 0.25
_OK: Final = "ok"
_OWN: Final = str(Path(__file__).parents[2])
_WAITING: Final = ("/torch/distributed/", "/torch/autograd/")


class Meeting:
    """Hold the meetings of one Checkpointer's ranks.

    In a meeting, each rank waits until all ranks are about to make the same call.
    """

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        """Start to answer questions of other ranks that wait for this one."""
        # A group may be destroyed before the last save ends, so its ranks are recorded now.
        self._ranks = None if process_group is None else Ranks(process_group)
        _lobby(self._ranks or Ranks())
        self._lobby: _Lobby | None = None
        self._number = 0
        self._counts: dict[str, int] = {}

    def called(self, step: int) -> None:
        """Count a call of `save`, even if no save is due, for the answers to waiting ranks."""
        lobby = self._enter()
        if lobby is not None:
            lobby.calls[self._number] = lobby.calls[self._number][0] + 1, step

    def await_all(
        self, call: str, step: int | None = None, *, group: dist.ProcessGroup | None = None
    ) -> None:
        """Wait until all ranks are about to make the same call.

        If the store of the process group fails, return without a check.

        Args:
            call: `save` or `restore`.
            step: the step to save or to restore.
            group: the group of the collective that follows, if this method is called in a
                background thread. The timeout of the group is the time limit of the meeting. None
                if this method is called within the user's call.

        Raises:
            BadUse: ranks are about to make different calls, or some do not make the user's call in
                time.
            SaveFailed: a rank does not arrive in time at a meeting in the background thread.
        """
        lobby = self._enter()
        if lobby is None:
            return
        thread = "call" if group is None else "stage"
        count = self._counts[thread] = self._counts.get(thread, 0) + 1
        limit_s = lobby.timeout_s * _SHARE if group is None else _timeout_s(group)
        meeting = _One(
            lobby, f"{self._number}/{thread}/{count}", call, step, limit_s, is_in_call=group is None
        )
        try:
            meeting.hold()
        except HoldfastError:
            raise
        except (RuntimeError, ValueError, LookupError) as error:  # errors of the store
            _logger.debug("the calls of the other ranks cannot be read: %s", error)
            return
        if count > 1:
            lobby.forget(f"{self._number}/{thread}/{count - 1}")

    def _enter(self) -> "_Lobby | None":
        if self._lobby is not None and self._lobby.is_open():
            return self._lobby
        lobby = _lobby(self._ranks or Ranks())
        if lobby is not None:
            self._lobby, self._number, self._counts = lobby, len(lobby.calls) + 1, {}
            lobby.calls[self._number] = 0, -1
        return lobby

    def close(self) -> None:
        """Record that this rank will not come to further meetings."""
        if self._lobby is not None and self._lobby.is_open():
            with contextlib.suppress(RuntimeError, ValueError):
                self._lobby.store.set(f"closed/{self._number}/{self._lobby.rank}", "1")


class _Lobby:
    """Access the part of the process group's store that the ranks of one group share.

    A thread answers the questions that waiting ranks put into the store. An answer has the number
    of calls of `save` on this rank and the position of its main thread in the code.
    """

    def __init__(self, ranks: Ranks, default: Any, store: Any, timeout_s: float) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.timeout_s = timeout_s
        self.calls: dict[int, tuple[int, int]] = {}
        """Each Checkpointer's number of `save` calls and last step, by the Checkpointer's number.

        All ranks number their Checkpointers in the same order."""
        self._default = weakref.ref(default)
        self._members = [ranks.of_job(rank) for rank in range(ranks.world_size)]
        name = xxhash.xxh3_64_hexdigest(",".join(map(str, self._members)).encode())
        # A store may outlive a default group: each default group has its own part.
        began = store.add(f"holdfast/{name}/{self.rank}", 1)
        self._prefix = f"holdfast/{name}/{began}"
        self.store.set(f"here/{self.rank}", json.dumps([_processes(), os.getpid()]))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="holdfast-answers", daemon=True)
        self._thread.start()
        # The thread is stopped before exit. Exit would otherwise end the thread inside the store's
        # C++ code, which aborts the process (SIGABRT).
        atexit.register(self._end)

    def _end(self) -> None:
        self._ended.set()
        self._thread.join(_ENDING_S)

    @property
    def store(self) -> Any:
        """Return the part of the process group's store that belongs to this group.

        Raises:
            RuntimeError, ValueError: the default group was destroyed.
        """
        # Keep no reference to the store. While the store lives, rank 0 listens at its port, and
        # could not make another store there.
        if not self.is_open():
            raise RuntimeError("the default group was destroyed")
        return dist.PrefixStore(self._prefix, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    def is_open(self) -> bool:
        """Return True if the default process group of this object still exists."""
        return self._default() is _default_group()

    def forget(self, key: str) -> None:
        """Delete this rank's records of a past meeting, which all ranks have left."""
        with contextlib.suppress(RuntimeError, ValueError):
            self.store.delete_key(f"{key}/{self.rank}")
            if self.rank == 0:
                for name in (key, f"{key}/count", f"{key}/end"):
                    self.store.delete_key(name)

    def has_ended(self, rank: int) -> bool:
        """Return True if the rank's process is on this node and has ended."""
        if not self.store.check([f"here/{rank}"]):
            return False
        processes, pid = json.loads(self.store.get(f"here/{rank}"))
        if processes != _processes():
            return False
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def ask(self, ranks: Sequence[int], end: str) -> dict[int, dict[str, Any]]:
        """Ask `ranks` where they are; return the answers that arrive within a few seconds.

        The wait ends early if the key `end` is set, since the meeting is then over.
        """
        number = self.store.add("questions", 1)
        self.store.set(f"question/{number}", "?")
        answers: dict[int, dict[str, Any]] = {}
        until_s = time.monotonic() + _ANSWER_S
        while (
            len(answers) < len(ranks) and time.monotonic() < until_s and not self.store.check([end])
        ):
            time.sleep(_MAX_PAUSE_S)
            for rank in ranks:
                key = f"answer/{number}/{rank}"
                if rank not in answers and self.store.check([key]):
                    answers[rank] = json.loads(self.store.get(key))
        return answers

    def _answer(self) -> None:
        pid, answered = os.getpid(), 0
        # The store may be gone with the rank that served it.
        with contextlib.suppress(RuntimeError, ValueError):
            while os.getpid() == pid and self.is_open():
                while self.store.check([f"question/{answered + 1}"]):
                    answered += 1
                    reply = {"calls": self.calls.copy(), **_whereabouts()}
                    self.store.set(f"answer/{answered}/{self.rank}", json.dumps(reply))
                if self._ended.wait(max(_LOOK_EVERY_S, self.world_size / 1000)):
                    break


class _One:
    """Take part in one meeting: wait until all ranks are about to make the same call."""

    def __init__(
        self,
        lobby: _Lobby,
        key: str,
        call: str,
        step: int | None,
        limit_s: float,
        *,
        is_in_call: bool,
    ) -> None:
        self._lobby = lobby
        self._key = key
        self._call = call
        self._step = step
        self._limit_s = limit_s
        self._intent = call if step is None else f"{call} at step {step}"
        self._is_in_call = is_in_call
        self._is_call_of_save = is_in_call and call == "save"
        self._number = key.partition("/")[0]
        self._calls, _ = lobby.calls[int(self._number)]
        self._stuck: dict[int, tuple[str, float]] = {}

    def hold(self) -> None:
        store, key, rank = self._lobby.store, self._key, self._lobby.rank
        first_rank, first_intent = json.loads(
            store.compare_set(key, "", json.dumps([rank, self._intent]))
        )
        store.set(f"{key}/{rank}", self._intent)
        if first_intent != self._intent:
            arrived = sorted([(first_rank, first_intent), (rank, self._intent)])
            calls = " and ".join(f"rank {each} calls {intent}" for each, intent in arrived)
            self._end(
                BadUse(
                    f"Ranks make different calls: {calls}. "
                    "save and restore are collective: call them on all ranks, at the same steps."
                )
            )
        elif store.add(f"{key}/count", 1) == self._lobby.world_size:
            self._end()
            return
        self._wait(is_first=first_rank == rank)

    def _wait(self, *, is_first: bool) -> None:
        where, waited_s, looked_s = "", 0.0, time.monotonic()
        pause_s, has_warned = _MIN_PAUSE_S, False
        # Only the rank that arrived first queries the missing ranks. The others do so only if that
        # rank is late.
        limit_s = self._limit_s * (1.0 if is_first else 1.2)
        look_at_s = min(WARN_AFTER_S, limit_s / 2)
        while not self._lobby.store.check([f"{self._key}/end"]):
            now_s = time.monotonic()
            # Count only a part of a long pause: this process was suspended, and perhaps other ranks
            # were, too.
            waited_s, looked_s = waited_s + min(now_s - looked_s, _LONGEST_LOOK_S), now_s
            if waited_s > min(limit_s, look_at_s if is_first else limit_s) and (
                missing := self._missing()
            ):
                if waited_s > limit_s:
                    self._end(self._absence(missing, waited_s, where))
                    return
                error, where = self._look(missing, waited_s)
                if error is not None:
                    self._end(error)
                    return
                if not has_warned:
                    has_warned = True
                    _logger.warning("%s", self._sentence(missing, waited_s, where))
                look_at_s = waited_s + WARN_AFTER_S
            time.sleep(pause_s)
            # All ranks of a large job poll one store. In a small job, waits must be short.
            pause_s = min(
                pause_s * 1.5,
                max(_SHORT_PAUSE_S, min(self._lobby.world_size / 10_000, _MAX_PAUSE_S)),
            )
        self._end()

    def _end(self, error: HoldfastError | None = None) -> None:
        """End the meeting for all ranks, unless another rank has already ended it.

        Args:
            error: the error that all ranks raise; None if all ranks can continue.

        Raises:
            BadUse, SaveFailed: the meeting has ended with an error.
        """
        how = _OK if error is None else json.dumps([isinstance(error, SaveFailed), str(error)])
        ended = self._lobby.store.compare_set(f"{self._key}/end", "", how).decode()
        if ended != _OK:
            is_failure, sentence = json.loads(ended)
            raise SaveFailed(sentence) if is_failure else BadUse(sentence)

    def _missing(self) -> list[int]:
        store = self._lobby.store
        return [
            rank
            for rank in range(self._lobby.world_size)
            if not store.check([f"{self._key}/{rank}"])
        ]

    def _look(self, missing: Sequence[int], waited_s: float) -> tuple[HoldfastError | None, str]:
        """Find out why ranks are missing.

        Returns:
            An error if a missing rank can never come, else None; and a text that describes where
            the missing ranks are.
        """
        lobby = self._lobby
        for rank in missing:
            if lobby.store.check([f"closed/{self._number}/{rank}"]):
                return BadUse(
                    self._sentence(missing, waited_s, f"rank {rank} has closed its Checkpointer")
                ), ""
            if lobby.has_ended(rank):
                return self._absence(missing, waited_s, f"rank {rank} has ended"), ""
        answers = lobby.ask(missing, f"{self._key}/end")
        for rank, reply in answers.items():
            if why := self._contradiction(rank, reply, waited_s):
                return BadUse(self._sentence(missing, waited_s, why)), ""
        places = {rank: f"is in {reply['where']}" for rank, reply in answers.items()}
        for rank in missing:
            if rank not in places:
                has_come = lobby.store.check([f"here/{rank}"])
                places[rank] = "does not answer" if has_come else "has made no Checkpointer yet"
        return None, "; ".join(f"rank {rank} {place}" for rank, place in [*places.items()][:3])

    def _contradiction(self, rank: int, reply: dict[str, Any], waited_s: float) -> str:
        """Return why a rank, by its answer `reply`, cannot come; empty if it may still come."""
        calls, step = reply["calls"].get(self._number, (0, -1))
        if self._is_call_of_save and calls > self._calls:
            return f"rank {rank} has gone on to step {step} without it"
        if self._is_call_of_save and step != self._step and calls == self._calls > 0:
            return f"rank {rank} has called save at step {step} instead"
        place, since_s = self._stuck.get(rank, ("", waited_s))
        since_s = since_s if reply["place"] == place else waited_s
        self._stuck[rank] = reply["place"], since_s
        # A rank that has called `save` comes in its background thread, even while its main thread
        # waits.
        may_come = not self._is_in_call and step >= (self._step or 0)
        if reply["is_waiting"] and not may_come and waited_s - since_s >= STUCK_S:
            return f"rank {rank} waits in {reply['where']}, for the ranks that wait here"
        return ""

    def _absence(self, missing: Sequence[int], waited_s: float, what: str) -> HoldfastError:
        """Return the error for ranks that have not come, and of which no other call is known."""
        if self._is_in_call:
            return BadUse(self._sentence(missing, waited_s, what))
        added = f" ({what})" if what else ""
        has, its = ("has", "its log") if len(missing) == 1 else ("have", "their logs")
        return SaveFailed(
            f"Step {self._step} was not saved: {ranks_text(missing)} {has} not begun to save it "
            f"within {waited_s:.0f} s{added}. Look at {its}."
        )

    def _sentence(self, missing: Sequence[int], waited_s: float, what: str) -> str:
        added = f" ({what})" if what else ""
        have = "has" if len(missing) == 1 else "have"
        return (
            f"{self._call} is collective, and {ranks_text(missing)} {have} not called "
            f"{self._intent} within {waited_s:.0f} s{added}. Call it on all ranks at the same "
            "steps, not on some of them."
        )


_lobbies: dict[tuple[int, ...], _Lobby] = {}
_making = threading.Lock()


def _lobby(ranks: Ranks) -> _Lobby | None:
    """Return the access to the store for `ranks`; None without a store or other ranks."""
    default = _default_group()
    if ranks.world_size == 1 or default is None:
        return None
    key = (
        () if ranks.group is None else tuple(ranks.of_job(rank) for rank in range(ranks.world_size))
    )
    with _making:
        found = _lobbies.get(key)
        if found is None or not found.is_open():
            try:
                store = dist.distributed_c10d._get_default_store()
                found = _lobbies[key] = _Lobby(ranks, default, store, _timeout_s(default))
            # MPI has no store.
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:
                _logger.debug("this rank cannot record its calls: %s", error)
                return None
    return found


def _processes() -> str:
    """Return an id of the node or container in which the id of this process is unique."""
    return f"{own_place().node} {Path('/proc/self/ns/pid').readlink()}"


def _default_group() -> Any:
    return dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None


def _timeout_s(group: Any) -> float:
    """Return the shortest timeout in seconds of the collectives of a group."""
    found: list[timedelta] = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            found.append(group._get_backend(device).options._timeout)
    return min(found, default=dist.distributed_c10d.default_pg_timeout).total_seconds()


def _whereabouts() -> dict[str, Any]:
    """Describe where the main thread is in the code.

    Returns:
        A dict with `place`, a digest of the thread's stack; `where`, its position as text; and
        `is_waiting`, whether the innermost frames are in a collective or in backward.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    places: list[str] = []
    where, is_waiting = "", False
    while frame is not None:
        file = frame.f_code.co_filename
        places.append(f"{file}:{frame.f_lasti}")
        if not where:  # later frames are those of callers
            is_waiting |= any(each in file for each in _WAITING)
        if not where and "/torch/" not in file and not file.startswith(_OWN):
            where = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return {
        "place": xxhash.xxh3_64_hexdigest("\n".join(places).encode()),
        "where": where,
        "is_waiting": is_waiting,
    }
