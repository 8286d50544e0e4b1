"""Measure the console on a large ledger: the first page, and memory with 50 browsers.

The ledger has 1,000 runs, 1,000,000 events and ten minutes of streams. With `--quick` it has 100
runs, 5,000 events and 10 s. Five of the browsers never read. Another one comes back after it has
missed more changes than the console sends one by one.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from common.machine import OthersLoad
from common.table import Must, Row, parse_arguments, report
from holdfast.core.ledger import Attempt, Event, Ledger, Run
from holdfast.core.paths import ledger_url

KINDS = ("step_report", "checkpoint", "decision", "stop_asked", "nodes_tested")
CLIENTS = 50
SILENT = 5
"""The clients that never read what they are sent."""
MISSED = 600
"""The changes that one client misses, more than `changes.ROWS_LIMIT`."""
PAGES = ("/", "/runs", "/runs/run-0001", "/decisions")


def fill(home: Path, runs: int, events: int) -> None:
    with Ledger.open(ledger_url(home)) as ledger:
        for number in range(runs):
            run_id = f"run-{number:04d}"
            state = "running" if number >= runs - 20 else "completed"
            run = {
                "state": state,
                "command": ["x"],
                "options": {},
                "cwd": "/w",
                "host": "elsewhere",
                "pid": 1,
            }
            ledger.add_run(Run(run_id=run_id, started_at_s=1e9 + number, **run))
            ledger.add_attempt(Attempt(run_id=run_id, number=1, started_at_s=1e9 + number))
            ledger.add_events(
                [
                    Event(run_id=run_id, attempt=1, at_s=1e9 + at, kind=KINDS[at % len(KINDS)])
                    for at in range(events // runs)
                ]
            )


async def first_event(client: httpx.AsyncClient, last_id: str) -> str:
    """Return the kind of the first event for a client that comes back."""
    async with client.stream("GET", "/stream", headers={"Last-Event-ID": last_id}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                return line[7:]
    return ""


async def measure(
    home: Path, base: str, code: str, process: psutil.Process, seconds: float
) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, timeout=60.0, limits=limits) as client:
        await client.post("/enter", data={"code": code}, headers={"Origin": base})
        started_s = time.monotonic()
        first = await client.get("/")
        result: dict[str, float] = {"first_page_ms": (time.monotonic() - started_s) * 1000}
        result["first_page_bytes"] = len(first.content)
        for path in PAGES:
            took_ms = []
            for _ in range(10):
                started_s = time.monotonic()
                (await client.get(path)).raise_for_status()
                took_ms.append((time.monotonic() - started_s) * 1000)
            result[f"median_ms {path}"] = statistics.median(took_ms)
        received, last_id = [0], [""]

        async def listen() -> None:
            async with client.stream("GET", "/stream") as answer:
                async for line in answer.aiter_lines():
                    received[0] += line.startswith("event:")
                    if line.startswith("id: "):
                        last_id[0] = line[4:]

        async def read_nothing() -> None:
            async with client.stream("GET", "/stream"):
                await asyncio.Event().wait()

        clients = [asyncio.create_task(listen()) for _ in range(CLIENTS - SILENT)]
        clients += [asyncio.create_task(read_nothing()) for _ in range(SILENT)]
        await asyncio.sleep(2)
        sizes = []
        end_s = time.monotonic() + seconds
        with Ledger.open(ledger_url(home)) as ledger:
            while time.monotonic() < end_s:
                ledger.add_event(
                    Event(run_id="run-0001", attempt=1, at_s=time.time(), kind="decision")
                )
                sizes.append(process.memory_info().rss)
                await asyncio.sleep(0.2)
            before = last_id[0]
            missed = Event(run_id="run-0001", attempt=1, at_s=time.time(), kind="decision")
            ledger.add_events([missed] * MISSED)
            result["snapshot"] = float(await first_event(client, before) == "snapshot")
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        third = max(1, len(sizes) // 3)
        result["events_received"] = received[0]
        result["memory_bytes_first_third"] = statistics.median(sizes[:third])
        result["memory_bytes_last_third"] = statistics.median(sizes[-third:])
        return result


def rows_of(result: dict[str, float], *, quick: bool) -> list[Row]:
    """Return the rows; the time of the first page must hold for the large ledger."""
    first_ms = None if quick else Must("<=", 300)
    growth = result["memory_bytes_last_third"] / result["memory_bytes_first_third"]
    return [
        Row(measure="first page", unit="ms", ours=result["first_page_ms"], must=first_ms),
        Row(
            measure="first page: size",
            unit="kB",
            ours=result["first_page_bytes"] / 1e3,
            must=Must("<=", 200),
        ),
        *(
            Row(measure=f"page {path}, median of 10", unit="ms", ours=result[f"median_ms {path}"])
            for path in PAGES
        ),
        Row(
            measure=f"{CLIENTS} streams: memory",
            unit="MB",
            ours=result["memory_bytes_last_third"] / 1e6,
        ),
        Row(
            measure=f"{CLIENTS} streams: memory, last third ÷ first third",
            unit="ratio",
            ours=growth,
            must=Must("<=", 1.1),
        ),
        Row(
            measure=f"{CLIENTS} streams: events received",
            unit="events",
            ours=result["events_received"],
            must=Must(">=", 1),
        ),
        Row(
            measure=f"client that missed {MISSED} changes: receives one snapshot",
            unit="1 = yes",
            ours=result["snapshot"],
            must=Must(">=", 1),
        ),
    ]


def main() -> int:
    options = parse_arguments(__doc__ or "")
    quick = options.quick
    runs, events, seconds = (100, 5_000, 10.0) if quick else (1000, 1_000_000, 600.0)
    with OthersLoad() as others, tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fill(home, runs, events)
        command = [sys.executable, "-m", "holdfast.cli.main", "ui", "--port", "0", "--json"]
        environment = {**os.environ, "HOLDFAST_HOME": folder}
        console = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert console.stdout is not None
            base, _, code = json.loads(console.stdout.readline())["link"].partition("/enter#")
            result = asyncio.run(measure(home, base, code, psutil.Process(console.pid), seconds))
        finally:
            console.terminate()
            console.wait()
    rows = rows_of(result, quick=quick)
    notes = [f"{runs:,} runs, {events:,} events, {seconds:.0f} s of streams", others.sentence()]
    report("The console on a large ledger", rows, notes=notes, json_file=options.json)
    return 1 if any(row.met is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
