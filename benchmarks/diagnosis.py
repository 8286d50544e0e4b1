"""Diagnosis: dev cases and laboratory logs beside the peers; compression, speed, learning.

`--only PART` runs one part (repeatable); with `--json FILE` the rows of other parts in FILE are
kept. A part that fails is reported and counts as not met; the others run.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.jobs import adopt_orphans
from common.machine import OthersLoad, Quiet
from common.parts import run_parts
from common.table import Row, parse_arguments, report
from diagnosing import (
    accuracy,
    agents,
    calibrating,
    compression,
    learning,
    makes,
    nvrx,
    scoring,
    speed,
)
from diagnosing.cases import DEV_KINDS, Case, dev_cases, laboratory, of_kind, other_cases
from diagnosing.systems import our_answers, peers_answers

ROUNDS = 3
QUICK_KINDS = ("recorded", "noisy", "root_removed")
QUICK_FAILURES = 6
"""The labelled failures that a quick run puts into each make."""
ASKED_OF_FEW = ("dev", "compression")
"""Parts whose musts also hold for a quick run; other musts need hundreds of logs or gigabytes."""
DEV = Path(__file__).parents[2] / "shared" / "data" / "diagnosis_dev"
PUBLIC = DEV.parents[1] / "cases" / "diagnosis"
"""Failures from public threads."""
OPTIONS = """Besides: --dev DIR, labelled cases; --lab DIR, the laboratory's recordings (made there if it has none;
without it anew each time, or a few with --quick); --nvrx DIR, the source of NVIDIA's resiliency extension;
--calibrate, print the numbers of holdfast.diagnose.explain.confidence, measured on the foreign make, and end;
--misses FILE, a line of JSON for each case that ours gets wrong."""


@dataclass(kw_only=True)
class Bench:
    """The state that the parts share."""

    folder: Path
    quiet: Quiet
    options: argparse.Namespace
    notes: list[str]
    lab: list[Case] | None = None

    def dev_cases(self) -> list[Case]:
        """Return the dev cases; without them, none, and a note is made once."""
        if (self.options.dev / "labels.jsonl").exists():
            return dev_cases(self.options.dev)
        note = f"the dev cases are left out: there is no {self.options.dev / 'labels.jsonl'}"
        if note not in self.notes:
            self.notes.append(note)
        return []

    def lab_cases(self) -> list[Case]:
        """Return the laboratory's cases, recorded at the first call."""
        if self.lab is None:
            options = self.options
            cases = laboratory(options.lab, self.folder, quick=options.quick, seed=options.seed)
            self.lab = of_kind(cases, *QUICK_KINDS) if options.quick else cases
        return self.lab

    def judge(
        self, cases: list[Case], *, peers: bool = True, baselines_only: bool = False
    ) -> accuracy.Judged:
        """Return all answers for `cases`; Holdfast's wrong answers are written to a file."""
        checkout = None if baselines_only else self.options.nvrx
        theirs = peers_answers(cases, checkout) if peers else {}
        judged = accuracy.Judged(cases=cases, ours=our_answers(cases), peers=theirs)
        if self.options.misses is not None:
            with self.options.misses.open("a") as file:
                file.writelines(json.dumps(miss) + "\n" for miss in accuracy.misses(judged))
        return judged


def _dev(bench: Bench) -> Iterator[Row]:
    if cases := bench.dev_cases():
        yield from accuracy.dev_rows(bench.judge(cases))


def _makes(bench: Bench) -> Iterator[Row]:
    options = bench.options
    recorded = of_kind(bench.lab_cases(), "recorded") if options.lab or not options.quick else []
    dev = bench.dev_cases()
    if options.quick:
        dev = dev[: len(DEV_KINDS) * QUICK_FAILURES]
    work = bench.folder / "foreign"
    work.mkdir()
    for name, cases in makes.makes(dev, options.dev, recorded, work).items():
        yield from makes.make_rows(name, bench.judge(cases, baselines_only=True))


def _laboratory(bench: Bench) -> Iterator[Row]:
    yield from accuracy.laboratory_rows(bench.judge(bench.lab_cases()))


def _compression(bench: Bench) -> Iterator[Row]:
    yield from compression.rows(bench.dev_cases(), "dev")
    yield from compression.rows(bench.lab_cases(), "laboratory")


def _speed(bench: Bench) -> Iterator[Row]:
    options = bench.options
    rounds = 1 if options.quick else options.rounds
    yield from speed.rows(
        bench.folder,
        bench.quiet,
        options.nvrx,
        quick=options.quick,
        rounds=rounds,
        seed=options.seed,
    )


def _agents(bench: Bench) -> Iterator[Row]:
    options, dev = bench.options, bench.options.dev
    cases = other_cases(PUBLIC / "labels.jsonl", PUBLIC, "public")
    if not options.quick:  # the public logs are short, and the rules leave some of them open
        cases = [
            *bench.dev_cases(),
            *other_cases(dev / "labels_noisy2.jsonl", dev / "noisy2", "noisy2"),
            *cases,
        ]
    cases = cases or [case for case in bench.lab_cases() if case.path.is_file()]
    yield from agents.rows(cases, quick=options.quick, seed=options.seed)


def _learning(bench: Bench) -> Iterator[Row]:
    yield from learning.rows(bench.lab_cases(), quick=bench.options.quick)


PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "dev": _dev,
    "makes": _makes,
    "laboratory": _laboratory,
    "compression": _compression,
    "learning": _learning,
    "agents": _agents,
    "speed": _speed,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all musts are met, else 1."""
    options = _options(arguments)
    adopt_orphans()
    quiet = Quiet(patience_s=0 if options.quick else 60)
    notes = [note] if (note := nvrx.missing(options.nvrx)) else []
    if options.misses is not None:
        options.misses.write_text("")

    def rows_of(part: str, _folder: Path) -> Iterator[Row]:
        rows = PARTS[part](bench)
        asked = not options.quick or part in ASKED_OF_FEW
        return rows if asked else (replace(row, must=None) for row in rows)

    with tempfile.TemporaryDirectory(prefix="holdfast-diagnosis-") as name, OthersLoad() as load:
        bench = Bench(folder=Path(name), quiet=quiet, options=options, notes=notes)
        if options.calibrate:
            return _calibrate(bench)
        chosen = options.only or list(PARTS)
        found = run_parts(chosen, rows_of, file=options.json, failures=notes)
    notes += [load.sentence(), quiet.sentence()]
    notes.append(
        "ours: Holdfast; peer: NVIDIA's restart agent, or who stands in [brackets]; shares are 0 to 1"
    )
    report("Diagnosis", found, notes=notes)
    return 0 if all(row.met is not False for row in found) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    given = sys.argv[1:] if arguments is None else list(arguments)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--dev", type=Path, default=DEV)
    own.add_argument("--lab", type=Path)
    own.add_argument("--nvrx", type=Path)
    own.add_argument("--misses", type=Path)
    own.add_argument("--calibrate", action="store_true")
    options, rest = own.parse_known_args(given)
    about = f"{(__doc__ or '').partition(chr(10))[0]} {OPTIONS}"
    return argparse.Namespace(
        **vars(options), **vars(parse_arguments(about, rest, rounds=ROUNDS, parts=tuple(PARTS)))
    )


def _calibrate(bench: Bench) -> int:
    from holdfast.diagnose.explain.confidence import sureness

    work = bench.folder / "calibrating"
    work.mkdir()
    found = makes.makes(bench.dev_cases(), bench.options.dev, [], work)
    measured = list(calibrating.samples(found.get(makes.CALIBRATING, [])))
    if not measured:
        print("nothing to measure: the labelled cases are missing. Name their folder with --dev.")
        return 2
    offset, of_rule = calibrating.fit(measured)
    print(f"OFFSET: Final = {offset:.1f}\nOF_RULE: Final = {of_rule:.1f}")
    right = calibrating.share_right(measured)
    print(f"measured on {len(measured)} answers of the foreign make, {right:.2f} of them right")
    said = [(sureness(one.support, offset, of_rule), one.right) for one in measured]
    print(f"expected calibration error on these {scoring.calibration_error(said) or 0:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
