"""Read the metrics page of the dcgm-exporter on this node, in Prometheus' text format."""

import os
import re
from collections.abc import Iterator
from typing import Final

ENV_EXPORTER: Final = "HOLDFAST_DCGM_EXPORTER"
"""The environment variable that holds the URL of the metrics page."""
EXPORTER_URL: Final = "http://localhost:9400/metrics"
ANSWER_S: Final = 5.0
MAX_BYTES: Final = 16 * 1024 * 1024
_LINE: Final = re.compile(rb"^(DCGM_\w+)\{([^}]*)\}\s+(\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def fetch_page() -> bytes:
    """Fetch the metrics page from the URL in `$HOLDFAST_DCGM_EXPORTER`.

    If the variable is not set, the page is fetched from port 9400 of this node.

    Raises:
        OSError: there is no page; the message has the URL and the reason.
    """
    import urllib.error  # processes that read no page import this module for the variable's name
    import urllib.request

    url = os.environ.get(ENV_EXPORTER) or EXPORTER_URL
    if not url.startswith(("http://", "https://")):
        raise OSError(f"${ENV_EXPORTER} is {url!r}, which is not an http:// or https:// URL")
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            page: bytes = answer.read(MAX_BYTES)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise OSError(f"{url}: {getattr(error, 'reason', error)}") from error
    return page


def samples(page: bytes) -> Iterator[tuple[str, dict[str, str], str]]:
    """Yield the name, labels and value of each DCGM metric on the page."""
    for line in page.splitlines():
        match = _LINE.match(line)
        if match is not None:
            labels = dict(_LABEL.findall(match[2].decode(errors="replace")))
            yield match[1].decode(), labels, match[3].decode(errors="replace")
