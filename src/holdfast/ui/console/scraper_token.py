"""The token with which a program reads the metrics without a session.

The token opens `/metrics` and nothing else. Prometheus reads the token from a file, so the console
keeps the token in a file: `metrics-token` in `$HOLDFAST_HOME`, readable by its owner alone.
"""

import os
import secrets
from pathlib import Path

from holdfast.core.errors import BadUse

NAME = "metrics-token"


def scraper_token(home: Path) -> str:
    """Return the token of a home, and create the token if there is none.

    A kill leaves the whole token or none. Two consoles that start at once have the same token.

    Raises:
        BadUse: the file holds no token.
        OSError: the file cannot be read or created.
    """
    path = home / NAME
    if not path.exists():
        _create(path)
    token = path.read_text(errors="replace").strip()
    if not token:
        raise BadUse(f"{path} holds no token. Delete that file; the console then makes another.")
    return token


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(f"{secrets.token_urlsafe(32)}\n")
        # A link, not a rename: the token of another console must not be replaced.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
