"""The routes: each page is one dictionary, as HTML from a template or, under `.json`, as JSON."""

import asyncio
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from holdfast.core import words
from holdfast.core.errors import BadUse, HoldfastError, LedgerError, NotFound
from holdfast.core.page import environment
from holdfast.core.paths import RunPaths
from holdfast.ui.console import logs
from holdfast.ui.console.backend import Backend
from holdfast.ui.console.cluster_page import ClusterPages
from holdfast.ui.console.journal import Journals
from holdfast.ui.console.metrics import exposition_of
from holdfast.ui.console.now_page import complete, now_page
from holdfast.ui.console.queries.decisions import decisions_page
from holdfast.ui.console.queries.evaluations import evaluations_page
from holdfast.ui.console.queries.nodes import nodes_page
from holdfast.ui.console.queries.now import runs_page
from holdfast.ui.console.queries.paging import LIMIT_S
from holdfast.ui.console.run_page import RunPages
from holdfast.ui.console.static_files import FILES, path_of
from holdfast.ui.console.stream import STREAMS_LIMIT, Hub

_HERE = Path(__file__).parent
SEARCH_LIMIT = 200
Builder = Callable[[Request], dict[str, Any]]


class Pages:
    """Answers the requests that read."""

    def __init__(self, backend: Backend, hub: Hub) -> None:
        self._backend = backend
        self._hub = hub
        self.going: set[int] = set()
        """The ids of the actions that this console carries out."""
        self._journals = Journals(backend.home)
        self.runs = RunPages(backend, self._journals)
        self._cluster = ClusterPages(backend, hub.announce)
        self._templates = environment(_HERE / "templates")
        self._templates.filters.update(
            ago=_ago, moment=words.moment, duration=words.duration, size=words.size, percent=words.percent,
            figure=_figure, path=lambda text: quote(str(text), safe=""),
        )  # fmt: skip
        self._templates.globals["static"] = path_of

    # Pages

    def now(self, _: Request) -> dict[str, Any]:
        """Return the page Now."""
        backend = self._backend
        return now_page(backend.ledger, backend.home, backend.state_of)

    def list_runs(self, request: Request) -> dict[str, Any]:
        """Return a page of all runs."""
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            page = runs_page(connection, request.query_params.get("next", ""))
        complete(page["runs"], self._backend.home, self._backend.state_of)
        return page

    def run(self, request: Request) -> dict[str, Any]:
        """Return the page of a run."""
        return self.runs.run(request.path_params["run_id"])

    def loss(self, request: Request) -> dict[str, Any]:
        """Return the loss of a run, for the interactive chart."""
        return self.runs.loss(request.path_params["run_id"])

    def profile(self, request: Request) -> dict[str, Any]:
        """Return the profile curves of a run, for the interactive charts."""
        return self.runs.profile(request.path_params["run_id"])

    def incident(self, request: Request) -> dict[str, Any]:
        """Return the page of an incident."""
        return self.runs.incident(number_of(request.path_params["incident_id"], "An incident's id"))

    def nodes(self, request: Request) -> dict[str, Any]:
        """Return a page of the nodes."""
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            return nodes_page(connection, request.query_params.get("next", ""))

    def evaluations(self, request: Request) -> dict[str, Any]:
        """Return a page of the evaluations."""
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            return evaluations_page(connection, request.query_params.get("next", ""))

    def cluster(self, _: Request) -> dict[str, Any]:
        """Return the trace report of the ledger."""
        return self._cluster.page()

    def decisions(self, request: Request) -> dict[str, Any]:
        """Return a page of the audit."""
        with self._backend.ledger.bounded_reading(LIMIT_S) as connection:
            return decisions_page(
                connection, request.query_params.get("next", ""), frozenset(self.going)
            )

    def logs(self, request: Request) -> dict[str, Any]:
        """Return a part of a rank's log, or the lines with a text."""
        found = self.runs.records(request.path_params["run_id"])
        run_id, parameters = found.run.run_id, request.query_params
        newest = found.attempts[-1].number if found.attempts else 1
        attempt = number_of(parameters.get("attempt") or str(newest), "attempt")
        paths = RunPaths(self._backend.home, run_id)
        ranks = logs.ranks(paths, attempt)
        rank = number_of(parameters.get("rank") or str(next(iter(ranks), 0)), "rank")
        text = parameters.get("q", "")[:SEARCH_LIMIT]
        page = {"run_id": run_id, "attempt": attempt, "newest_attempt": newest, "rank": rank,
                "ranks": ranks, "q": text}  # fmt: skip
        path = paths.rank_log(attempt, rank)
        if text:
            start = number_of(parameters.get("from") or "0", "from")
            return {**page, **logs.search(path, text, start)}
        end = number_of(parameters["end"], "end") if parameters.get("end") else None
        return {**page, **logs.part(path, end)}

    # Answers

    def page(self, name: str, build: Builder) -> Callable[[Request], Any]:
        """Return the endpoint of a page."""

        async def answer(request: Request) -> Response:
            as_json = request.url.path.endswith(".json")
            try:
                found = await asyncio.to_thread(build, request)
                if as_json:
                    return _json(
                        request, {"schema": f"holdfast.console.{name}", "version": 1, **found}
                    )
                return await asyncio.to_thread(self.html, request, f"{name}.html.j2", found)
            except HoldfastError as error:
                return self.error(request, status_of(error), str(error), as_json=as_json)

        return answer

    def html(
        self, request: Request, template: str, page: Mapping[str, Any], status: int = 200
    ) -> Response:
        """Return a page as HTML, or 304 if the browser has it already."""
        extra: dict[str, Any] = {}
        if template == "run.html.j2":
            extra["drawings"] = self.runs.drawings(dict(page))
        session = getattr(request.state, "session", None)
        text = self._templates.get_template(template).render(
            page=page, now_s=time.time(), session=session, here=request.url.path, **extra
        )
        body = text.encode("utf-8", "replace")
        return _tagged(request, body, "text/html; charset=utf-8", status)

    def error(
        self, request: Request, status: int, message: str, *, as_json: bool = False
    ) -> Response:
        """Return an error as a page, or as one JSON object."""
        if as_json:
            body = json.dumps({"ok": False, "status": status, "error": message}).encode()
            return Response(body, status, media_type="application/json")
        retries = status == 503 and request.method == "GET"
        page = {"status": status, "said": message, "retries": retries}
        return self.html(request, "error.html.j2", page, status)

    async def enter(self, request: Request) -> Response:
        """Return the page on which a code becomes a session."""
        wanted = request.state.asked
        if wanted == "/enter":
            return self.html(request, "enter.html.j2", {"said": "", "asked": ""})
        # A browser withholds a strict cookie from the first request by a foreign page's link, and
        # sends it with the next one.
        is_ours = wanted.startswith("/") and not wanted.startswith("//")
        page = {"said": "", "asked": quote(wanted) if is_ours else ""}
        return self.html(request, "enter.html.j2", page, 401)

    async def static(self, request: Request) -> Response:
        """Return one of the files that were read at the start."""
        found = FILES.get(request.path_params["name"])
        if found is None:
            return self.error(request, 404, "There is no such file.")
        if found.is_named_by_content:
            headers = {"Cache-Control": "public, max-age=31536000, immutable"}
            return Response(found.body, headers=headers, media_type=found.kind)
        return _tagged(request, found.body, found.kind, 200)

    async def cluster_file(self, request: Request) -> Response:
        """Return a drawing or the numbers of a figure of the trace report."""
        name = request.path_params["name"]
        found = self._cluster.file(name)
        if found is None:
            return self.error(request, 404, "The newest report has no such figure.")
        kind = "image/svg+xml" if name.endswith(".svg") else "text/csv; charset=utf-8"
        return _tagged(request, found, kind, 200)

    async def stream(self, request: Request) -> Response:
        """Return the stream of changes."""
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self._hub.streams >= STREAMS_LIMIT:
            message = f"{STREAMS_LIMIT} browsers are connected already. Close one of their pages."
            return Response(message, 503, {"Retry-After": "30"})
        last = request.headers.get("last-event-id") or request.query_params.get("last", "")
        sessions, secret = request.app.state.sessions, request.state.secret
        is_open = request.app.state.reading_is_open
        events = self._hub.events(last[:80], lambda: is_open or sessions.of(secret) is not None)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus."""
        accept = request.headers.get("accept", "")
        try:
            body, kind = await asyncio.to_thread(exposition_of, self._backend, accept)
        except HoldfastError as error:  # a failed scrape is visible; missing metrics are not
            return Response(f"{error}\n", status_of(error), media_type="text/plain")
        return Response(body, headers={"Content-Type": kind, "Cache-Control": "no-store"})

    async def nothing(self, request: Request, _: Exception) -> Response:
        """Return the answer to an unknown address."""
        return self.error(request, 404, "There is no such page.")


def status_of(error: HoldfastError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, BadUse):
        return 400
    return 503 if isinstance(error, LedgerError) else 500


def number_of(text: str, name: str) -> int:
    """Return a number from a request.

    Raises:
        BadUse: the text is no number of at most nine digits (offsets: fifteen).
    """
    if (
        not text.isascii()
        or not text.isdigit()
        or len(text) > (15 if name in ("from", "end") else 9)
    ):
        raise BadUse(f"{name} must be a number.")
    return int(text)


def signed_out(location: str = "/") -> Response:
    """Return the answer that sends a browser elsewhere after a form."""
    return RedirectResponse(location, status_code=303)


def _json(request: Request, page: Mapping[str, Any]) -> Response:
    body = json.dumps(_finite(page), default=str, allow_nan=False).encode()
    return _tagged(request, body, "application/json", 200)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _tagged(request: Request, body: bytes, kind: str, status: int) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if status == 200 and request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, media_type=kind)


def _ago(at_s: float | None, now_s: float) -> str:
    if at_s is None:
        return "never"
    return f"{words.duration(max(0.0, now_s - at_s))} ago"


def _figure(value: Any) -> str:
    """Return a number as a page shows it; nothing recorded is a dash."""
    if value is None:
        return "–"  # noqa: RUF001 - the typographic dash
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
