"""Serve the console: the application, its addresses, and the server."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import BadUse
from holdfast.core.page import missing_extra
from holdfast.ui.console.backend import Backend

if TYPE_CHECKING:
    from starlette.types import ASGIApp

KEEP_ALIVE_S = 15
CONNECTIONS_LIMIT = 512
HEADERS_LIMIT_BYTES = 32 * 1024


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of the console, and who may use it."""

    host: str = "127.0.0.1"
    port: int = 8470
    """0 chooses a free port."""
    names: Collection[str] = ()
    """Further values of `Host`, such as a proxy's `console.example.org`."""
    proxies: Collection[str] = ()
    """The addresses of proxies whose `X-Forwarded-*` count."""
    reading_is_open: bool = False


def application(
    backend: Backend,
    address: Address,
    *,
    show: Callable[[str], None],
    complain: Callable[[str], None] = lambda _: None,
    clock: Clock | None = None,
) -> "ASGIApp":
    """Return the console as an ASGI application.

    Args:
        backend: the records and the actions.
        address: the address, and who may use it.
        show: receives each link that signs in once.
        complain: receives a sentence on each trouble of the console itself.
        clock: the clock of the sessions.
    """
    from starlette.applications import Starlette
    from starlette.routing import Route

    from holdfast.ui.console.acting import Acting
    from holdfast.ui.console.gate import Gate, Rules
    from holdfast.ui.console.pages import Pages
    from holdfast.ui.console.scraper_token import scraper_token
    from holdfast.ui.console.sessions import Sessions
    from holdfast.ui.console.stream import Hub

    sessions, hub = Sessions(clock or SystemClock(), address.port), Hub(backend.ledger)
    pages = Pages(backend, hub)

    shown_code = ""

    def show_code() -> None:
        # Any client may send wrong codes: they must neither fill the terminal nor displace the
        # codes of invited people.
        nonlocal shown_code
        if sessions.is_code(shown_code):
            return
        shown_code = sessions.new_code(backend.me)
        shown = "127.0.0.1" if address.host in ("0.0.0.0", "::") else address.host
        bare = f"[{shown}]" if ":" in shown else shown
        show(f"http://{bare}:{address.port}/enter#{shown_code}")

    acting = Acting(backend, pages, sessions, show_code=show_code, announce=hub.announce)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hub.start()
        sending = _send_events(backend, complain)
        show_code()
        try:
            yield
        finally:
            if sending is not None:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            await hub.close()

    reads: list[tuple[str, str, Any]] = [
        ("", "now", pages.now),
        ("runs", "runs", pages.list_runs),
        ("runs/{run_id}", "run", pages.run),
        ("runs/{run_id}/logs", "logs", pages.logs),
        ("incidents/{incident_id}", "incident", pages.incident),
        ("nodes", "nodes", pages.nodes),
        ("evaluations", "evaluations", pages.evaluations),
        ("cluster", "cluster", pages.cluster),
        ("decisions", "decisions", pages.decisions),
    ]
    routes = [
        Route("/runs/{run_id}/profile.json", pages.page("profile", pages.profile), methods=["GET"]),
        Route("/runs/{run_id}/loss.json", pages.page("loss", pages.loss), methods=["GET"]),
        *[
            Route(f"/{path or name}.json", pages.page(name, build), methods=["GET"])
            for path, name, build in reads
        ],
        *[
            Route(f"/{path}", pages.page(name, build), methods=["GET"])
            for path, name, build in reads
        ],
        Route("/enter", pages.enter, methods=["GET"]),
        Route("/cluster/{name}", pages.cluster_file, methods=["GET"]),
        Route("/static/{name}", pages.static, methods=["GET"]),
        Route("/stream", pages.stream, methods=["GET"]),
        Route("/metrics", pages.metrics, methods=["GET"]),
        Route("/act/{what}", acting.ask, methods=["GET"]),
        Route("/act/{what}", acting.act, methods=["POST"]),
        Route("/enter", acting.enter, methods=["POST"]),
        Route("/leave", acting.leave, methods=["POST"]),
        Route("/invite", acting.invite, methods=["POST"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={404: pages.nothing})
    app.state.sessions, app.state.reading_is_open = sessions, address.reading_is_open
    rules = Rules(
        hosts=hosts_of(address), proxies=address.proxies, reading_is_open=address.reading_is_open,
        scraper_token=scraper_token(backend.home),
    )  # fmt: skip
    return Gate(app, rules, sessions)


def _send_events(backend: Backend, complain: Callable[[str], None]) -> "asyncio.Task[None] | None":
    """Start to send events to OpenTelemetry's collector if the environment names one."""
    from holdfast.ui.console.otlp import EventExport, is_configured

    if not is_configured(os.environ):
        return None
    try:
        export = EventExport(backend.ledger, backend.home, complain)
    except ImportError:
        # The variable may be meant for other programs, so the console starts without sending
        # events.
        complain(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but no event is sent. Run: pip install 'holdfast[otel]'"
        )
        return None
    return asyncio.create_task(export.run())


def hosts_of(address: Address) -> frozenset[str]:
    """Return the values of `Host` that name the console."""
    port = address.port
    own = {f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"}
    if address.host not in ("0.0.0.0", "::"):
        own.add(f"[{address.host}]:{port}" if ":" in address.host else f"{address.host}:{port}")
    names = {name.lower() for name in address.names if name}
    return frozenset(own | names | {f"{name}:{port}" for name in names if ":" not in name})


def serve(
    backend: Backend,
    address: Address,
    *,
    show: Callable[[str], None],
    complain: Callable[[str], None],
) -> None:
    """Serve the console until Ctrl-C or SIGTERM.

    Raises:
        BadUse: the address cannot be used.
        HoldfastError: the extra `ui` is not installed.
    """
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise missing_extra(error.name or "starlette", extra="ui") from error
    listening = _listen(address)
    port = listening.getsockname()[1]
    app = application(backend, _with_port(address, port), show=show, complain=complain)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S, limit_concurrency=CONNECTIONS_LIMIT, http="h11", ws="none",
        h11_max_incomplete_event_size=HEADERS_LIMIT_BYTES, timeout_graceful_shutdown=2, lifespan="on",
    )  # fmt: skip
    with contextlib.closing(listening), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))


def _with_port(address: Address, port: int) -> Address:
    from dataclasses import replace

    return replace(address, port=port)


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listening = None
    try:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
    except (OSError, OverflowError, TypeError) as error:  # TypeError: the name cannot be encoded
        if listening is not None:
            listening.close()
        next_step = "Name another with --port, or --port 0 for any free one."
        has_no_address = getattr(error, "errno", None) in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
        if has_no_address or isinstance(error, socket.gaierror | TypeError):
            next_step = "Name an address of this host with --host."
        raise BadUse(
            f"The console cannot listen at {address.host} port {address.port}: {error}. {next_step}"
        ) from error
    listening.listen(128)
    return listening
