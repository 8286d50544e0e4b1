"""Check that each contradiction in job records is found, counted, and mended, dropped or kept."""

from datetime import datetime, timedelta

import duckdb
import pytest

from holdfast.trace.checks import CHECKS, check_jobs
from holdfast.trace.clusters import Cluster
from holdfast.trace.schema import JOB_COLUMNS
from holdfast.trace.sources.reading import Reading

BEGAN = datetime(2024, 1, 1)  # noqa: DTZ001 - tables hold UTC without a zone
LATER = datetime(2030, 1, 1)  # noqa: DTZ001
NOW_S = 1_800_000_000.0
SOUND = {
    "cluster": "C",
    "job_id": "1",
    "state": "COMPLETED",
    "submit_at": BEGAN,
    "start_at": BEGAN + timedelta(seconds=10),
    "end_at": BEGAN + timedelta(seconds=110),
    "run_s": 100.0,
    "queue_s": 10.0,
    "reported_duration_s": 100.0,
    "reported_gpu_time_s": 800.0,
    "gpu_num": 8.0,
    "node_num": 1,
}


def job(**changes):
    return SOUND | changes


def checked(jobs, *, counts_queue=False, resolution_s=1.0, columns=tuple(SOUND)):
    """Return (notes, rows after) for a table of jobs."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(
        f"CREATE TABLE t ({', '.join(f'{name} {JOB_COLUMNS[name]}' for name in columns)})"
    )
    places = ", ".join("?" for _ in columns)
    connection.executemany(
        f"INSERT INTO t VALUES ({places})", [[one[name] for name in columns] for one in jobs]
    )
    cluster = Cluster(
        name="C", source="x", gpu_num=64, gpus_per_node=8, duration_counts_queue=counts_queue,
        time_resolution_s=resolution_s,
    )  # fmt: skip
    notes = check_jobs(
        connection, Reading(table="t", columns=frozenset(columns), clusters=(cluster,)), now_s=NOW_S
    )
    rows = connection.execute("SELECT * FROM t ORDER BY rowid").fetchall()
    return notes, [dict(zip(columns, row, strict=True)) for row in rows]


WRONG = {
    "end-before-start": job(end_at=BEGAN, run_s=None, reported_duration_s=None),
    "negative-run-time": job(run_s=-1.0),
    "start-before-submission": job(
        start_at=BEGAN - timedelta(seconds=5), end_at=BEGAN + timedelta(seconds=95)
    ),
    "negative-waiting-time": job(queue_s=-5.0),
    "negative-gpus": job(gpu_num=-8.0, reported_gpu_time_s=-800.0),
    "in-the-future": job(
        submit_at=LATER,
        start_at=LATER,
        end_at=LATER + timedelta(seconds=100),
    ),
    "longer-than-a-year": job(
        run_s=4e7,
        reported_duration_s=4e7,
        reported_gpu_time_s=3.2e8,
        end_at=BEGAN + timedelta(seconds=4e7 + 10),
    ),
    "duration-contradicts-times": job(reported_duration_s=103.0, reported_gpu_time_s=824.0),
    "gpu-time-contradicts-duration": job(reported_gpu_time_s=900.0),
    "wider-than-the-cluster": job(gpu_num=72.0, node_num=9, reported_gpu_time_s=7200.0),
    "more-gpus-than-their-nodes-have": job(gpu_num=16.0, reported_gpu_time_s=1600.0),
    "ended-without-an-end": job(end_at=None),
    "completed-without-a-start": job(
        start_at=None, run_s=None, queue_s=None, reported_duration_s=None, reported_gpu_time_s=None
    ),
    "running-with-an-end": job(state="RUNNING"),
    "unknown-state": job(state=None),
}


def test_there_is_a_wrong_job_for_every_check():
    assert set(WRONG) == {check.name for check in CHECKS}


@pytest.mark.parametrize("name", WRONG)
def test_each_contradiction_is_found_alone_and_counted(name):
    notes, rows = checked([job(job_id="0"), WRONG[name], WRONG[name] | {"job_id": "2"}])
    assert [(note.check, note.rows, note.cluster) for note in notes] == [(name, 2, "C")]
    assert notes[0].examples == ("1", "2")
    assert notes[0].sentence.startswith("2 jobs ")
    assert len(rows) == 3
    assert rows[0] == job(job_id="0")
    assert (rows[1] == WRONG[name]) is (notes[0].action == "kept")


def test_what_is_mended_contradicts_no_longer():
    mended = [name for name in WRONG if next(check for check in CHECKS if check.name == name).mend]
    assert len(mended) == 5
    for name in mended:
        _, rows = checked([WRONG[name]])
        again, _ = checked(rows)
        # An impossible end is now unknown, which is reported.
        assert {note.check for note in again} <= {"ended-without-an-end"} | (
            {name} if "start" in name else set()
        )


def test_a_sound_table_has_no_note():
    notes, rows = checked([job(job_id=str(number)) for number in range(5)])
    assert notes == ()
    assert len(rows) == 5


def test_a_duration_that_counts_the_queue_is_compared_from_submission():
    waited = job(reported_duration_s=110.0, reported_gpu_time_s=880.0)
    assert checked([waited], counts_queue=True)[0] == ()
    assert [note.check for note in checked([job()], counts_queue=True)[0]] == [
        "duration-contradicts-times"
    ]


def test_coarse_clocks_do_not_contradict():
    minute = job(reported_duration_s=150.0, reported_gpu_time_s=1200.0)
    assert checked([minute], resolution_s=60.0)[0] == ()
    assert len(checked([minute], resolution_s=49.0)[0]) == 1


def test_of_jobs_with_one_id_the_last_to_end_is_kept():
    early = job(
        end_at=BEGAN + timedelta(seconds=60),
        run_s=50.0,
        reported_duration_s=50.0,
        reported_gpu_time_s=400.0,
    )
    notes, rows = checked([early, job(), job(end_at=None, run_s=None), job(job_id="2")])
    (note,) = (note for note in notes if note.check == "repeated-job-id")
    assert (note.rows, note.action, note.examples) == (2, "dropped", ("1",))
    assert rows == [job(), job(job_id="2")]


def test_attempts_of_a_job_are_no_repetition():
    columns = (*SOUND, "attempt")
    notes, rows = checked([job(attempt=0), job(attempt=1)], columns=columns)
    assert (notes, len(rows)) == ((), 2)


def test_jobs_without_an_id_are_not_taken_for_one():
    notes, rows = checked([job(job_id=None), job(job_id=None)])
    assert (notes, len(rows)) == ((), 2)


def test_days_without_submissions_in_a_busy_trace_are_told():
    def on(day, number):
        at = BEGAN + timedelta(days=day)
        return job(
            job_id=f"{day}-{number}", submit_at=at, start_at=at + timedelta(seconds=10),
            end_at=at + timedelta(seconds=110),
        )  # fmt: skip

    notes, _ = checked([on(day, number) for day in (0, 1, 4) for number in range(100)])
    assert [(note.check, note.rows, note.examples) for note in notes] == [
        ("days-without-submissions", 2, ("after 2024-01-02",))
    ]
    quiet, _ = checked([on(day, number) for day in (0, 1, 4) for number in range(3)])
    assert quiet == ()


def test_a_missing_column_leaves_its_checks_out():
    columns = ("cluster", "job_id", "gpu_num")
    notes, _ = checked([job(gpu_num=72.0)], columns=columns)
    assert [note.check for note in notes] == ["wider-than-the-cluster"]
