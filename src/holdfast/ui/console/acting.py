"""Handle the requests that act: sign-in and sign-out, and actions on runs, incidents, nodes."""

import asyncio
import contextlib
import secrets
import threading
import time
import traceback
from collections.abc import Callable
from typing import Literal, get_args
from urllib.parse import parse_qs, quote

from sqlalchemy import Connection, func, select
from starlette.requests import Request
from starlette.responses import Response

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.ledger import ActionRecord, schema
from holdfast.ui.console.backend import ActionName, Backend, Order
from holdfast.ui.console.pages import Pages, number_of, signed_out, status_of
from holdfast.ui.console.queries.nodes import seen_of_node
from holdfast.ui.console.queries.paging import LIMIT_S
from holdfast.ui.console.queries.run import RunRecords, run_of_incident, seen_of_verdict
from holdfast.ui.console.run_page import possible
from holdfast.ui.console.sessions import SESSION_S, Sessions

ANSWER_S = 3.0
"""The time for which a browser waits for an action; the record shows a later result."""
ACTIONS_LIMIT = 32
"""The most actions at once, each in a thread: a stop of an hour delays no page."""
WHY_LIMIT = 255
NAMES = get_args(ActionName)
ON_RUNS = ("stop", "restart", "approve", "roll-back")
ON_INCIDENTS = ("confirm", "correct")
CONSEQUENCES = {
    "stop": "Every rank saves its state at one step, and the run ends. The run can go on later.",
    "restart": "The run goes on from its newest checkpoint that verifies, under a supervisor on the console's host.",
    "approve": "The supervisor carries out the proposal below.",
    "roll-back": "The ranks end at once, without saving. The checkpoints after the chosen step are abandoned, "
    "and the training goes on from the chosen step.",
    "cordon": "Runs launch nothing on the node until a person returns the node. Ranks that run there go on.",
    "return": "Runs may use the node again, also without a passed test.",
    "confirm": "The diagnosis counts as right. The next diagnosis of a similar incident is more certain.",
    "correct": "The diagnosis counts as wrong, and a rule may be learned from the incident.",
}


STOP_AGAIN = (
    "Careful: a stop was requested already, and the ranks save. "
    "Another stop ends the run at once, without saving."
)


class Acting:
    """Answers the requests that act."""

    def __init__(
        self,
        backend: Backend,
        pages: Pages,
        sessions: Sessions,
        *,
        show_code: Callable[[], None],
        announce: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._pages = pages
        self._sessions = sessions
        self._show_code = show_code
        self._announce = announce
        self._going = pages.going
        self._record = asyncio.Lock()
        """Held from reading a target to recording its action: of two forms at once, one is stale."""

    async def enter(self, request: Request) -> Response:
        """Exchange a code for a session."""
        form = await form_of(request)
        found = self._sessions.enter(form.get("code", ""))
        if found is None:
            page = {"said": "This code was used already, or it is too old. The console's terminal shows a good one.",
                    "asked": ""}  # fmt: skip
            self._show_code()
            return self._pages.html(request, "enter.html.j2", page, 403)
        secret, session = found
        if session.who == self._backend.me:
            self._show_code()
        response = signed_out("/")
        response.set_cookie(
            self._sessions.cookie, secret, max_age=round(SESSION_S), httponly=True, samesite="strict",
            secure=request.state.scheme == "https", path="/",
        )  # fmt: skip
        return response

    async def leave(self, request: Request) -> Response:
        """End the session."""
        self._sessions.leave(request.state.secret)
        response = signed_out("/enter")
        response.delete_cookie(self._sessions.cookie, path="/", httponly=True, samesite="strict")
        return response

    async def invite(self, request: Request) -> Response:
        """Show a link that signs in another person, under a name."""
        who = (await form_of(request)).get("who", "").strip()
        if not who or not who.isprintable() or len(who) > 64:
            return self._pages.error(request, 400, "Give a name of 1 to 64 printable characters.")
        host = request.headers["host"]
        link = f"{request.state.scheme}://{host}/enter#{self._sessions.new_code(who)}"
        return self._pages.html(request, "invite.html.j2", {"who": who, "link": link})

    async def ask(self, request: Request) -> Response:
        """Show an action with its consequence, and the form that carries the action out."""
        what, target = request.path_params["what"], request.query_params.get("target", "")
        try:
            seen, description = await asyncio.to_thread(self._state, what, target)
            choices = await asyncio.to_thread(self._choices, what, target)
        except HoldfastError as error:
            return self._pages.error(request, status_of(error), str(error))
        page = {
            "what": what,
            "target": target,
            "seen": seen,
            "told": description,
            "consequence": CONSEQUENCES[what],
            "key": secrets.token_hex(16),
            "choices": choices,
            "why": request.query_params.get("why", "")[:WHY_LIMIT],
            "back": place_of(what, target),
        }
        return self._pages.html(request, "act.html.j2", page)

    async def act(self, request: Request) -> Response:
        """Carry out an action once, if its target is still in the state that the person saw."""
        what, form = request.path_params["what"], await form_of(request)
        target, key = form.get("target", ""), form.get("key", "")
        session = request.state.session
        why = form.get("why", "").strip()
        if len(key) != 32 or not key.isalnum() or not key.isascii():
            return self._pages.error(
                request, 400, "The form has no key. Open the page of the action again."
            )
        if len(why) > WHY_LIMIT or not why.isprintable():
            message = f"Give one line of at most {WHY_LIMIT} printable characters as the reason."
            return self._pages.error(request, 400, message)
        if what in ("cordon", "correct", "roll-back") and not why:
            message = "Choose a step." if what == "roll-back" else "Give a reason."
            return self._pages.error(request, 400, message)
        back = place_of(what, target)
        record = ActionRecord(
            key=key, at_s=time.time(), by=session.who, address=request.state.address, what=what,
            target=target, why=why, seen=form.get("seen", ""),
        )  # fmt: skip
        try:
            async with self._record:
                known, action_id = await asyncio.to_thread(self._begin, record)
        except HoldfastError as error:
            return self._pages.error(request, status_of(error), str(error))
        if action_id is None:
            if known is None:
                message = (
                    f"The {_kind(what)} has changed since the page was shown. Nothing was done: reload the page, "
                    "then decide."
                )
                return self._pages.error(request, 409, message)
            return self._answered(request, known.state, known.outcome, back)
        order = Order(target=target, why=why, by=session.who)
        done = self._start(what, order, action_id)
        try:
            state, outcome = await asyncio.wait_for(asyncio.shield(done), ANSWER_S)
        except TimeoutError:
            return signed_out("/decisions")
        return self._answered(request, state, outcome, back)

    def _choices(self, what: str, target: str) -> list[str]:
        """Return the values of which an action needs one.

        Raises:
            BadUse: there is nothing to choose.
        """
        if what == "correct":
            return list(self._backend.reasons())
        if what != "roll-back":
            return []
        steps = self._backend.healthy_steps(target)
        if not steps:
            raise BadUse(
                f"Run {target} has no healthy checkpoint to go back to. A checkpoint is healthy after --healthy-after "
                "steps with an ordinary loss."
            )
        return [str(one) for one in steps]

    def _begin(self, record: ActionRecord) -> tuple[ActionRecord | None, int | None]:
        """Record an action, if its target is still in the state that the person saw.

        Returns:
            The earlier action with the same key, if any, and the id of the new action, if one was
            recorded.

        Raises:
            HoldfastError: the action cannot begin.
        """
        ledger = self._backend.ledger
        if (known := ledger.action(record.key)) is not None:
            return known, None
        if self._state(record.what, record.target)[0] != record.seen:
            return None, None
        if len(self._going) >= ACTIONS_LIMIT:
            raise BadUse(
                f"{ACTIONS_LIMIT} actions are under way. Wait until one has ended; the page Decisions shows them."
            )
        action_id = ledger.add_action(record)
        if action_id is None:
            return ledger.action(record.key), None
        self._going.add(action_id)
        return None, action_id

    def _start(
        self, what: ActionName, order: Order, action_id: int
    ) -> "asyncio.Future[tuple[str, str]]":
        """Carry an action out in a thread of its own, and return the future of its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[str, str]] = loop.create_future()
        done.add_done_callback(lambda _: self._going.discard(action_id))

        def carry_out() -> None:
            result = self._carry_out(what, order, action_id)
            with contextlib.suppress(RuntimeError):  # the console has ended meanwhile
                loop.call_soon_threadsafe(done.set_result, result)

        # A daemon thread, so that the console can exit during a stop, which may take an hour. The
        # run stops anyway.
        threading.Thread(target=carry_out, name=f"action-{action_id}", daemon=True).start()
        return done

    def _answered(self, request: Request, state: str, outcome: str, back: str) -> Response:
        if state == "refused":
            return self._pages.error(request, 409, outcome)
        return signed_out(back if state == "done" else "/decisions")

    def _carry_out(self, what: ActionName, order: Order, action_id: int) -> tuple[str, str]:
        state: Literal["done", "refused"] = "refused"
        try:
            state, outcome = "done", self._backend.actions[what](order)
        except (HoldfastError, OSError) as error:
            outcome = str(error)
        except Exception as error:  # the record must not stay open
            traceback.print_exc()
            outcome = f"Holdfast itself failed: {error!r}"
        try:
            self._backend.ledger.end_action(action_id, state, outcome)
        except HoldfastError as error:
            outcome += f" The result could not be recorded: {error}"
        self._announce(order.target)  # the browser may already have its response
        return state, outcome

    def _state(self, what: str, target: str) -> tuple[str, str]:
        """Return the state of an action's target, and the state in words.

        Raises:
            BadUse: the action or the target is of no known form.
            NotFound: there is no such target.
        """
        if what not in NAMES or what not in self._backend.actions:
            raise BadUse("There is no such action.")
        if not target or len(target) > WHY_LIMIT or not target.isprintable():
            raise BadUse("Name one run, incident or node.")
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            if what in ON_RUNS:
                found = RunRecords(connection, target)
                state = self._backend.state_of(target, found.run.state, found.run.host)
                if what not in possible(state, found):
                    raise BadUse(_impossible(what, found.run.run_id, state))
                return _run_state(found, what, _stops(connection, found))
            if what in ON_INCIDENTS:
                number = number_of(target, "An incident's id")
                found = RunRecords(connection, run_of_incident(connection, number))
                seen = seen_of_verdict(found.verdicts.get(number))
                return seen, f"Verdict so far: {seen or 'none'}."
            nodes = schema.nodes
            query = nodes.select().where(nodes.c.name == target)
            row = connection.execute(query).mappings().first()
        cordoned = None if row is None else row["cordoned_at_s"]
        if what == "return" and cordoned is None:
            raise BadUse(f"{target} is not cordoned.")
        description = (
            "It is not cordoned."
            if cordoned is None or row is None
            else (f"Cordoned by {row['cordoned_by']}: {row['why']}")
        )
        return seen_of_node(cordoned), description


def _impossible(what: str, run_id: str, state: str) -> str:
    if what == "approve":
        return f"Run {run_id} has no proposal to approve."
    can = {
        "stop": "that runs or waits in a queue can be stopped",
        "restart": "that is lost, failed or stopped can go on",
        "roll-back": "that runs and has a checkpoint can go back",
    }
    return f"Run {run_id} is {state}. Only a run {can[what]}."


def _stops(connection: Connection, found: RunRecords) -> int:
    """Return the number of requests to stop the newest attempt, recorded or under way."""
    newest = found.attempts[-1] if found.attempts else None
    actions, since_s = schema.actions, 0.0 if newest is None else newest.started_at_s
    stop_count = select(func.count()).where(
        actions.c.target == found.run.run_id, actions.c.what == "stop", actions.c.at_s > since_s,
        actions.c.state == "asked",
    )  # fmt: skip
    rows = [
        one
        for one in found.events
        if one.kind == "stop_asked" and newest is not None and one.attempt == newest.number
    ]
    return len(rows) + int(connection.execute(stop_count).scalar() or 0)


def _run_state(found: RunRecords, what: str, stops: int) -> tuple[str, str]:
    newest = found.attempts[-1] if found.attempts else None
    saved = [one for one in found.checkpoints if one.state in ("healthy", "verified", "written")]
    description = f"The run is {found.run.state}, in attempt {newest.number if newest else 0}"
    description += f", step {newest.last_step}." if newest and newest.last_step is not None else "."
    if saved:
        description += f" The newest usable checkpoint is of step {max(one.step for one in saved)}."
    seen = found.seen
    if what == "stop":
        seen += f".{stops}"
        if stops:
            description += f" {STOP_AGAIN}"
    if what == "approve" and found.proposal is not None:
        seen += f".{found.proposal.get('number')}"
        description += f" {found.proposal.get('text', '')}"
    return seen, description


def place_of(what: str, target: str) -> str:
    """Return the page of an action's target."""
    if what in ON_RUNS:
        return f"/runs/{quote(target, safe='')}"
    return f"/incidents/{quote(target, safe='')}" if what in ON_INCIDENTS else "/nodes"


def _kind(what: str) -> str:
    return "run" if what in ON_RUNS else "incident" if what in ON_INCIDENTS else "node"


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form; of a field that came twice, the first."""
    body = (await request.body()).decode("utf-8", "replace")
    try:
        return {
            name: values[0]
            for name, values in parse_qs(body, keep_blank_values=True, max_num_fields=20).items()
        }
    except ValueError:
        return {}
