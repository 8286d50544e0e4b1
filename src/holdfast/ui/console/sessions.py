"""Sign people in: codes that work once, and the sessions that they open."""

import hashlib
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass

from holdfast.core.clock import Clock

SESSION_S = 12 * 3600.0
CODE_S = 24 * 3600.0
SESSIONS_LIMIT = 200
CODES_LIMIT = 50


@dataclass(frozen=True)
class Session:
    """One signed-in browser."""

    who: str
    until_s: float


class Sessions:
    """The codes and sessions of one console, in memory. Any thread may use it."""

    def __init__(self, clock: Clock, port: int) -> None:
        # Browsers keep one set of cookies for all ports of a host: two consoles must not sign out
        # each other's people.
        self.cookie = f"holdfast_session_{port}"
        self._clock = clock
        self._codes: OrderedDict[str, Session] = OrderedDict()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def new_code(self, who: str) -> str:
        """Return a code that signs a browser in once, as this person."""
        code = secrets.token_urlsafe(24)
        with self._lock:
            self._codes[_digest(code)] = Session(who, self._clock.now_s() + CODE_S)
            while len(self._codes) > CODES_LIMIT:
                self._codes.popitem(last=False)
        return code

    def is_code(self, code: str) -> bool:
        """Return True if the code is still valid."""
        with self._lock:
            found = self._codes.get(_digest(code))
            return found is not None and found.until_s >= self._clock.now_s()

    def enter(self, code: str) -> tuple[str, Session] | None:
        """Exchange a code for a session; return its secret, or None if the code is not valid."""
        with self._lock:
            found = self._codes.pop(_digest(code), None)
            if found is None or found.until_s < self._clock.now_s():
                return None
            secret = secrets.token_urlsafe(32)
            session = Session(found.who, self._clock.now_s() + SESSION_S)
            self._sessions[_digest(secret)] = session
            while len(self._sessions) > SESSIONS_LIMIT:
                self._sessions.popitem(last=False)
            return secret, session

    def of(self, secret: str) -> Session | None:
        """Return the session of a cookie; None if it is unknown or over."""
        with self._lock:
            found = self._sessions.get(_digest(secret))
            if found is not None and found.until_s < self._clock.now_s():
                del self._sessions[_digest(secret)]
                return None
            return found

    def leave(self, secret: str) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(_digest(secret), None)


def _digest(secret: str) -> str:
    # The tables are searched by digests, so that the time of a search says nothing about a secret.
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
