"""Run the demonstration with several seeds: each must end bit-identical, without a person.

Each seed injects five faults into a training run of two nodes: a killed rank, a damaged newest
checkpoint, a frozen rank, a loss that becomes NaN, and a node that turns bad. The steps of the
faults depend on the seed. The final weights are compared with those of a run left alone. There is
no peer: torchrun sees neither a frozen rank nor a damaged checkpoint (`recover.py` measures the
faults that torchrun sees). The limit is the same seed's run without faults. The exit status is 1 if
any seed fails.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.jobs import HOLDFAST, adopt_orphans, job, last_words, say
from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, print_table, report
from holdfast.core.accounting import RunSummary, summarize
from holdfast.core.explanation import explain
from holdfast.core.ledger import Event, Ledger
from holdfast.core.paths import ledger_url
from holdfast.demo.faults import KINDS
from holdfast.demo.outcome import FaultRow, fault_rows

SEEDS, STEPS = 5, 144
QUICK_STEPS = 96
"""The fewest steps with room for all faults."""
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The result of one seed."""

    seed: int
    wall_s: float
    """The time of the whole demonstration, its three runs."""
    failures: tuple[str, ...]
    identical: bool = False
    right: int = 0
    """Faults that were found at their true place."""
    rows: tuple[FaultRow, ...] = ()
    interventions: int | None = None
    faulty: RunSummary | None = None
    reference: RunSummary | None = None


def show(seed: int, steps: int) -> Shown:
    """Run `holdfast demo` once and read its ledger."""
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as name:
        folder = Path(name)
        out = folder / "report"
        command = (
            *HOLDFAST,
            "demo",
            "--seed",
            str(seed),
            "--steps",
            str(steps),
            "--out",
            str(out),
            "--json",
        )
        began_s = time.monotonic()
        with job(command, folder) as process:
            try:
                code: int | None = process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                code = None
        wall_s = time.monotonic() - began_s
        if code != 0:
            how = f"not over within {TIMEOUT_S:.0f} s" if code is None else f"exit code {code}"
            say(f"seed {seed}: {how}:\n{last_words(folder)}")
        try:
            return shown_by(seed, wall_s, out / "holdfast", code)
        except Exception as error:  # a ledger that cannot be read is a failed seed, told as one
            return Shown(
                seed=seed, wall_s=wall_s, failures=(f"exit code {code}; its ledger: {error}",)
            )


def shown_by(seed: int, wall_s: float, home: Path, code: int | None) -> Shown:
    """Read the result of a demonstration with exit code `code` from its ledger."""
    with Ledger.open(ledger_url(home)) as ledger:
        faulty, reference = (summarize(ledger, home, run) for run in ("faults", "reference"))
        events = ledger.events("faults")
        rows = fault_rows(explain(ledger, home, "faults"), events)
    injected = [event.data for event in events if event.kind == "fault_injected"]
    identical = faulty.proof is not None and bool(faulty.proof["identical"])
    missed = [
        row.fault
        for row, fault in zip(rows, injected, strict=False)
        if not is_right(row, fault, events)
    ]
    checks = {
        f"exit code {code}": code == 0,
        "the final weights differ": identical,
        f"{faulty.interventions} interventions": faulty.interventions == 0,
        f"injected were {[fault['fault'] for fault in injected]}": sorted(
            one["fault"] for one in injected
        )
        == sorted(KINDS),
        f"not found where they were: {', '.join(missed)}": not missed,
        f"{len(rows)} incidents of faults": len(rows) == len(KINDS),
    }
    return Shown(
        seed=seed,
        wall_s=wall_s,
        failures=tuple(text for text, holds in checks.items() if not holds),
        identical=identical,
        right=len(rows) - len(missed),
        rows=tuple(rows),
        interventions=faulty.interventions,
        faulty=faulty,
        reference=reference,
    )


def is_right(row: FaultRow, fault: Mapping[str, Any], events: Sequence[Event]) -> bool:
    """Return True if a fault was found at the rank, the node or the batch where it was."""
    match fault["fault"]:
        case "Bad node":
            tested = [event.data for event in events if event.kind == "nodes_tested"]
            return fault["node"] in {name for one in tested for name in one["cordoned"]}
        case "Loss became NaN":
            left_out = [event.data for event in events if event.kind == "leave_out"]
            return any(one["first"] <= fault["step"] + 1 <= one["last"] for one in left_out)
        case _:
            return bool(row.rank == fault["rank"])


def _costs(shown: Sequence[Shown], name: str, fault: str | None = None) -> list[float]:
    """Return a figure of each fault, of one kind or of all."""
    return [
        float(value)
        for one in shown
        for row in one.rows
        if (value := getattr(row, name)) is not None and fault in (None, row.fault)
    ]


def _seed_lines(shown: Sequence[Shown]) -> list[tuple[object, ...]]:
    lines: list[tuple[object, ...]] = []
    for one in shown:
        faulty = one.faulty
        lines.append(
            (
                one.seed,
                "identical" if one.identical else "NOT",
                "" if one.interventions is None else one.interventions,
                f"{one.right}/{len(KINDS)}",
                (faulty.ettr or 0.0) if faulty is not None else "",
                " ".join(f"{row.seconds_to_detect:.2f}" for row in one.rows),
                " ".join(f"{row.seconds_to_restart or 0:.1f}" for row in one.rows),
                " ".join(f"{row.rank_seconds_lost:.0f}" for row in one.rows),
                f"{one.wall_s:.0f}",
                "; ".join(one.failures) or "-",
            )
        )
    return lines


def rows_of(shown: Sequence[Shown]) -> list[Row]:
    """Return the rows of all seeds together, then of each seed."""
    count, faults = len(shown), len(shown) * len(KINDS)
    known = [one for one in shown if one.faulty is not None and one.reference is not None]
    interventions = sum(one.interventions or 0 for one in shown) if len(known) == count else None
    rows = [
        Row(
            measure=f"seeds that end bit-identical, of {count}",
            ours=sum(one.identical for one in shown),
            limit=count,
            unit="seeds",
            must=Must("=", count),
        ),
        Row(
            measure=f"faults found, at the right rank, node or batch, of {faults}",
            ours=sum(one.right for one in shown),
            limit=faults,
            unit="faults",
            must=Must("=", faults),
        ),
        Row(
            measure="interventions by people",
            ours=interventions,
            limit=0,
            unit="",
            must=Must("=", 0),
        ),
    ]
    for fault in KINDS:
        for words, name, unit in (
            ("fault → detected", "seconds_to_detect", "s"),
            ("detected → first new step", "seconds_to_restart", "s"),
            ("lost", "rank_seconds_lost", "rank-s"),
        ):
            values = _costs(shown, name, fault)
            rows.append(
                Row(
                    measure=f"{fault}: {words}, median",
                    ours=statistics.median(values) if values else None,
                    unit=unit,
                )
            )
    for one in known:
        assert one.faulty is not None
        assert one.reference is not None
        rows += [
            Row(
                measure=f"seed {one.seed}: ETTR",
                ours=one.faulty.ettr,
                limit=one.reference.ettr,
                unit="",
            ),
            Row(
                measure=f"seed {one.seed}: the run with injected faults, its wall time",
                ours=one.faulty.wall_s,
                limit=one.reference.wall_s,
                unit="s",
            ),
        ]
    return rows


def main() -> int:
    args = parse_arguments(__doc__ or "")
    adopt_orphans()
    steps, seeds = (QUICK_STEPS, 1) if args.quick else (STEPS, SEEDS)
    shown = []
    with OthersLoad() as others:
        for seed in range(args.seed, args.seed + seeds):
            shown.append(show(seed, steps))
            say(
                f"seed {seed}: {'; '.join(shown[-1].failures) or 'as it must be'}, {shown[-1].wall_s:.0f} s"
            )
    columns = (
        "seed",
        "weights",
        "interv.",
        "found",
        "ETTR",
        "detect s",
        "restart s",
        "rank-s lost",
        "wall s",
        "wrong",
    )
    print_table(f"holdfast demo, {steps} steps", columns, _seed_lines(shown))
    limit = "limit: the same seed's run that is left alone; ETTR counts start-up as lost, which is much of a run this short"  # noqa: E501
    values = (
        "detect, restart and rank-s lost: a value for each of the five faults in their order; the hang "
        "floor is 3 s, so that no frozen rank can be detected much sooner"
    )
    notes = (limit, values, others.sentence())
    report("All seeds", rows_of(shown), notes=notes, json_file=args.json)
    return 1 if any(one.failures for one in shown) else 0


if __name__ == "__main__":
    sys.exit(main())
