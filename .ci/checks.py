"""Run the checks of `make ci`; run what fails once more, alone, and list what passes then as flaky.

Usage: `checks.py [--once TARGET …] [--again TARGET …] [-- PYTEST_ARGUMENT …]`. The targets of make run first, two at a
time; then pytest runs. Targets of `--once` are never run again.

Exit code: 0 where everything passed in the first or in the second try, else 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

TARGETS_AT_ONCE = 2
TARGET_LIMIT_S = 900.0
CACHE = Path(".pytest_cache")
PYTEST = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}"]
TESTS_FAILED = 1
"""The exit code of pytest that running tests again can change."""


@dataclass
class Verdict:
    """Names of checks that failed: `red` in both tries or in the only one, `flaky` in the first one alone."""

    red: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)

    def add(self, name: str, *, passed_again: bool) -> None:
        """Record a check that failed in its first try."""
        (self.flaky if passed_again else self.red).append(name)


def run_targets(once: Sequence[str], again: Sequence[str], verdict: Verdict) -> None:
    """Make every target, two at a time, then make the failed ones of `again` once more, one at a time."""
    with ThreadPoolExecutor(TARGETS_AT_ONCE) as pool:
        targets = [*once, *again]
        failed = [target for target, passed in zip(targets, pool.map(_make, targets), strict=True) if not passed]
    for target in failed:
        verdict.add(target, passed_again=target in again and _make(target))


def run_tests(arguments: Sequence[str], verdict: Verdict) -> None:
    """Run pytest, then its failed tests once more, one at a time.

    The second run has one worker process: a test that hangs ends that worker and not the run.
    """
    first = subprocess.run([*PYTEST, "--cache-clear", *arguments], check=False).returncode
    if first == 0:
        return
    failed = _last_failed()
    if first != TESTS_FAILED or not failed:
        verdict.add(f"pytest ended with exit code {first}", passed_again=False)
        return
    print(f"\n== once more, alone: {len(failed)} failed tests", flush=True)
    only_failed = ["--last-failed", "--last-failed-no-failures", "none", "--numprocesses", "1"]
    second = subprocess.run([*PYTEST, *arguments, *only_failed], check=False).returncode
    still = _last_failed() if second == TESTS_FAILED else set()
    if second not in (0, TESTS_FAILED) or (second == TESTS_FAILED and not still):
        verdict.add(f"pytest ended with exit code {second} in its second run", passed_again=False)
    for name in sorted(failed | still):
        verdict.add(name, passed_again=second in (0, TESTS_FAILED) and name not in still)


def _make(target: str) -> bool:
    """Run one target to its end or its limit, then print its output in one piece; return whether it passed."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        ["make", "--no-print-directory", target],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TARGET_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nended after {TARGET_LIMIT_S:.0f} s".encode()
    took_s = time.monotonic() - began_s
    title = f"== {target}: exit code {process.returncode} after {took_s:.0f} s\n"
    sys.stdout.buffer.write(title.encode() + output + b"\n")
    sys.stdout.flush()
    return process.returncode == 0


def _last_failed() -> set[str]:
    """Return the names of the tests that pytest's cache records as failed, a lost worker's test among them."""
    try:
        return set(json.loads((CACHE / "v/cache/lastfailed").read_text()))
    except FileNotFoundError:
        return set()


def main(argv: Sequence[str]) -> int:
    """Run what `argv` names, print what was flaky and what is red, and return the exit code."""
    own, dashes, pytest_arguments = list(argv), "--" in argv, []
    if dashes:
        own, pytest_arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", nargs="*", default=[], metavar="TARGET")
    parser.add_argument("--again", nargs="*", default=[], metavar="TARGET")
    targets = parser.parse_args(own)
    verdict = Verdict()
    run_targets(targets.once, targets.again, verdict)
    if dashes:
        run_tests(pytest_arguments, verdict)
    for title, names in (("Flaky (failed, then passed alone)", verdict.flaky), ("Red", verdict.red)):
        if names:
            print(f"\n{title}:", *names, sep="\n  ", flush=True)
    return 1 if verdict.red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
