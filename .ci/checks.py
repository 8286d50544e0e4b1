"""Run the checks of `make ci`; run what fails once more, alone, and list what passes then as flaky.

Usage: `checks.py [--once TARGET …] [--again TARGET …] [-- PYTEST_ARGUMENT …]`. The targets of make run first, three at
a time; then pytest runs. Targets of `--once` are never run again.

Exit code: 0 where everything passed in the first or in the second try, else 1.
"""

import argparse
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

TARGETS_AT_ONCE = 3
"""More than the two cores of CI's machine: a third of their time, targets wait."""
CACHE = Path(".pytest_cache")
PYTEST = [sys.executable, "-m", "pytest", "-o", f"cache_dir={CACHE}"]
TESTS_FAILED = 1
"""The exit code of pytest that running tests again can change."""
UNPASSED = {"failure", "error", "skipped"}


@dataclass
class Verdict:
    """Names of checks that failed: `red` in both tries or in the only one, `flaky` in the first one alone."""

    red: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)

    def add(self, name: str, *, passed_again: bool) -> None:
        """Record a check that failed in its first try."""
        (self.flaky if passed_again else self.red).append(name)


def run_targets(
    once: Sequence[str], again: Sequence[str], verdict: Verdict, *, limit_s: float
) -> None:
    """Make every target, three at a time, then make the failed ones of `again` once more, one at a time."""
    make = functools.partial(_make, limit_s=limit_s)
    with ThreadPoolExecutor(TARGETS_AT_ONCE) as pool:
        targets = [*once, *again]
        failed = [
            target
            for target, passed in zip(targets, pool.map(make, targets), strict=True)
            if not passed
        ]
    for target in failed:
        verdict.add(target, passed_again=target in again and make(target))


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
    report = CACHE / "second-run.xml"
    only_failed = ["--last-failed", "--last-failed-no-failures", "none", "--numprocesses", "1"]
    second = subprocess.run(
        [*PYTEST, *arguments, *only_failed, f"--junitxml={report}"], check=False
    ).returncode
    if second not in (0, TESTS_FAILED):
        verdict.add(f"pytest ended with exit code {second} in its second run", passed_again=False)
    passed = _passed(report)
    for name in sorted(failed):
        verdict.add(name, passed_again=_junit_name(name) in passed)


def _passed(report: Path) -> set[str]:
    """Return the names in a JUnit report of the tests that passed: none that failed or was skipped."""
    if not report.exists():
        return set()
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if not UNPASSED & {one.tag for one in case}
    }


def _junit_name(node_id: str) -> str:
    """Return the class name and name that pytest's JUnit report gives a test."""
    path, bracket, parameters = node_id.partition("[")
    file, *names = path.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *names]) + bracket + parameters


def _make(target: str, limit_s: float) -> bool:
    """Run one target to its end or its limit, then print its output in one piece; return whether it passed."""
    began_s = time.monotonic()
    # Write to a file: a descendant that outlives the target could keep a pipe open.
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this call's last reference
    process = subprocess.Popen(
        ["make", "--no-print-directory", target],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    has_ended = True
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        has_ended = False
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    took_s = time.monotonic() - began_s
    how = f"exit code {process.returncode} after" if has_ended else "ended for taking longer than"
    output.seek(0)
    sys.stdout.buffer.write(f"== {target}: {how} {took_s:.0f} s\n".encode() + output.read() + b"\n")
    sys.stdout.flush()
    return has_ended and process.returncode == 0


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--once", nargs="*", default=[], metavar="TARGET")
    parser.add_argument("--again", nargs="*", default=[], metavar="TARGET")
    parser.add_argument(
        "--limit-s", type=float, default=900.0, help="of each target; default: %(default)s"
    )
    targets = parser.parse_args(own)
    verdict = Verdict()
    run_targets(targets.once, targets.again, verdict, limit_s=targets.limit_s)
    if dashes:
        run_tests(pytest_arguments, verdict)
    for title, names in (
        ("Flaky (failed, then passed alone)", verdict.flaky),
        ("Red", verdict.red),
    ):
        if names:
            print(f"\n{title}:", *names, sep="\n  ", flush=True)
    return 1 if verdict.red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
