"""Remember digests and numerics, so that stored answers are found before an engine starts.

The journal of answers is named by the digest of the weights and by the engine's numerics. Without
this module, the digest would be known only after reading the weights, and the numerics only after
loading them. Both are kept here, in one file each:

- the digest, under the stamp of the model's files (`weights.stamp`);
- the numerics, under the engine's spec, the digest and the kind of the node (`run.node_kind`).

If a file is missing or unreadable, nothing is known, and then engines start.
"""

import hashlib
from pathlib import Path

import msgspec

from holdfast.core.atomic import write_atomic
from holdfast.evaluate.types.engine import EngineSpec


class KnownKeys:
    """Keep digests and numerics as files in `folder`, which several evaluations share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def digest(self, stamp: str) -> str:
        """Return the digest of the weights whose files have this stamp; empty if unknown."""
        return self._read(self._digest_file(stamp))

    def keep_digest(self, stamp: str, digest: str) -> None:
        """Keep the digest of the weights whose files have this stamp; replace an earlier one."""
        self._write(self._digest_file(stamp), digest)

    def numerics(self, spec: EngineSpec, digest: str, kind: str) -> str:
        """Return the numerics that an engine reported earlier; empty if unknown.

        The engine had the same spec and the same weights, on a node of the same kind.
        """
        return self._read(self._numerics_file(spec, digest, kind))

    def keep_numerics(self, spec: EngineSpec, digest: str, kind: str, numerics: str) -> None:
        """Keep the numerics that an engine reported, and replace earlier numerics."""
        self._write(self._numerics_file(spec, digest, kind), numerics)

    def _digest_file(self, stamp: str) -> Path:
        return self._folder / f"digest-{stamp}"

    def _numerics_file(self, spec: EngineSpec, digest: str, kind: str) -> Path:
        named = msgspec.json.encode((spec, digest, kind), order="deterministic")
        return self._folder / f"numerics-{hashlib.blake2b(named, digest_size=16).hexdigest()}"

    def _read(self, file: Path) -> str:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return ""

    def _write(self, file: Path, said: str) -> None:
        if self._read(file) != said:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomic(file, said.encode())
