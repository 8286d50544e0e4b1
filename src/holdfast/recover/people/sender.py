"""Send one message by Apprise, in a separate process.

The process is separate so that the plugin of a service cannot harm the supervisor. It reads its
order from standard input instead of the command line, which every user of the host can read, since
the order contains URLs with secrets. The output identifies a URL only by its place in the list and
its scheme.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.core.errors import BadUse, HoldfastError
from holdfast.core.explanation import explain_recent
from holdfast.core.ledger import Ledger
from holdfast.core.processes import die_with_parent
from holdfast.recover.people.messages import compose

SCHEME_LIMIT = 20


def main() -> None:
    """Run the command `sender PARENT_PID`, which the notifier starts."""
    die_with_parent(int(sys.argv[1]))
    order = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # a plugin may print
        answer = send(order)
    sys.stdout.write(json.dumps(answer))


def send(order: dict[str, Any]) -> dict[str, Any]:
    """Send one message to each URL.

    Args:
        order: `ledger`, `home`, `run`, `incidents` (ids), `proposals` (texts), `notes` (texts),
            `alerts` (texts), `journal_bytes` (the bytes that are read from the end of the journal of steps), `urls`.

    Returns:
        `failed`, which lists the places of the URLs to which the message could not be sent, and
        `why`, which is a sentence.
    """
    urls = [str(url) for url in order["urls"]]
    try:
        with Ledger.open(order["ledger"]) as ledger:
            story, has_costs = explain_recent(
                ledger,
                Path(order["home"]),
                str(order["run"]),
                order["incidents"],
                journal_bytes=int(order["journal_bytes"]),
            )
        title, body = compose(
            story,
            order["incidents"],
            order["proposals"],
            notes=order["notes"],
            alerts=order["alerts"],
            has_costs=has_costs,
        )
    except (HoldfastError, OSError) as error:
        return {"failed": list(range(len(urls))), "why": str(error)}
    failed = [place for place, url in enumerate(urls) if not _sent(url, title, body)]
    named = ", ".join(_named(place, urls[place]) for place in failed)
    why = f"{named}: the service refused it or cannot be reached" if failed else ""
    return {"failed": failed, "why": why}


def check_urls(urls: Sequence[str]) -> None:
    """Check that Apprise can send to each URL, without sending anything.

    Raises:
        BadUse: Apprise is not installed, or has no service for a URL.
    """
    if not urls:
        return
    for place, url in enumerate(urls):
        if not _apprise().Apprise().add(url):
            raise BadUse(
                f"--notify: {_named(place, url)} is not a URL that Apprise supports. "
                "Give one as https://github.com/caronc/apprise/wiki lists them."
            )


def _sent(url: str, title: str, body: str) -> bool:
    apprise = _apprise()
    service = apprise.Apprise()
    # The message is plain text, since text from logs must not be interpreted as markup.
    return bool(service.add(url)) and bool(
        service.notify(title=title, body=body, body_format=apprise.NotifyFormat.TEXT)
    )


def _apprise() -> Any:
    try:
        import apprise
    except ImportError as error:
        raise BadUse("--notify needs Apprise. Run: pip install 'holdfast[notify]'") from error
    # Log lines of Apprise may contain parts of a URL.
    logging.getLogger("apprise").handlers = [logging.NullHandler()]
    logging.getLogger("apprise").propagate = False
    return apprise


def _named(place: int, url: str) -> str:
    scheme, separator, _ = url.partition("://")
    known = separator and scheme.isalnum() and len(scheme) <= SCHEME_LIMIT
    return f"URL {place + 1} ({scheme}://…)" if known else f"URL {place + 1}"


if __name__ == "__main__":
    main()
