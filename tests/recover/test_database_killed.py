"""A PostgreSQL that two supervisors and a console use is killed in the middle of the runs."""

import json
import urllib.error
import urllib.request

import pytest

from holdfast.core.ledger import Ledger
from holdfast.testing.postgresql import PrivatePostgreSQL, postgresql_binaries

pytest.importorskip("psycopg")
if postgresql_binaries() is None:
    pytest.skip("no PostgreSQL server is installed", allow_module_level=True)

JOB = """
import os, pathlib, signal, sys, time
import holdfast

run, name = holdfast.attach(), sys.argv[1]
fault, is_over = pathlib.Path(f"fault-{name}"), pathlib.Path("over")
step = 0
while not is_over.exists():
    step += 1
    run.emit("mark", {"number": step})
    run.step(step, loss=1 / step)
    if step == 20:
        pathlib.Path(f"trains-{name}-{os.environ['HOLDFAST_ATTEMPT']}").touch()
    if fault.exists():
        fault.rename(f"failed-{name}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
"""


def page(link):
    """Return the status and the text of a page of the console."""
    try:
        with urllib.request.urlopen(link, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_killed_database_costs_no_record_of_two_runs_and_the_console_comes_back(place):
    names = ("one", "two")
    job = place.job(JOB)
    with PrivatePostgreSQL() as server:
        ledger = ("--ledger", server.new_database())
        console = place.start(*ledger, "ui", "--port", "0", "--open-reading", "--json")
        try:
            base = json.loads(console.stdout.readline())["link"].partition("/enter")[0]
            runs = [
                place.start(*ledger, "run", "--name", name, "--", *place.ranks(1, job, name))
                for name in names
            ]
            place.wait_until(
                lambda: all((place.folder / f"trains-{name}-1").exists() for name in names)
            )
            status, text = page(f"{base}/")
            assert status == 200
            assert all(name in text for name in names)

            server.kill()
            status, text = page(f"{base}/")
            assert status == 503
            assert "cannot be reached" in text
            assert "data-retry" in text
            (place.folder / "fault-one").touch()
            # The job fails, is started again, and trains, all without the database.
            place.wait_until((place.folder / "trains-one-2").exists)
            assert page(f"{base}/")[0] == 503
            server.start()

            place.wait_until(lambda: page(f"{base}/runs/two")[0] == 200)
            (place.folder / "over").touch()
            for name, run in zip(names, runs, strict=True):
                with run:
                    out, err = run.communicate(timeout=240)
                assert run.returncode == 0, (name, out, err)
                assert "its records wait" in err + out
        finally:
            console.terminate()
            console.communicate()
        with Ledger.open(ledger[1]) as opened:
            (incident,) = opened.incidents()
            assert (incident.run_id, incident.action) == ("one", "restart")
            assert incident.resumed_at_s is not None
            for name, attempts in (("one", 2), ("two", 1)):
                assert opened.run(name).state == "completed"
                assert len(opened.attempts(name)) == attempts
                for attempt in range(1, attempts + 1):
                    marks = [
                        one.data["number"]
                        for one in opened.events(name, "mark")
                        if one.attempt == attempt
                    ]
                    assert marks == list(range(1, len(marks) + 1)), "in order, and once"
                    assert len(marks) >= 20
