"""Compare the text and the JSON of a real Slurm, and both with the submitted jobs."""

import json
import time
from pathlib import Path

import pytest
from normalised_rows import notes_of, read_file, unix_s

from holdfast.testing.slurm import PrivateSlurm
from holdfast.trace.sources.slurm.sacct import SOURCE

MISSING = PrivateSlurm.missing(accounting=True)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=MISSING or "")]

FIELDS = (
    "Cluster,JobIDRaw,JobID,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,AllocTRES,ReqTRES,NodeList,"
    "ExitCode,Reason,JobName"
)
ODD_NAME = "a|b 'c' ünï\nline | two\n3|3|root"
DEADLINE_S = 240


class Exports:
    """A cluster that ran a job of each kind, and sacct's output about the jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ids: dict[str, str] = {}
        with PrivateSlurm(folder / "c", nodes=2, cpus=8, gpus_per_node=4, accounting=True) as slurm:
            self.slurm = slurm
            self._run_jobs()
            self.text = self._export("text.txt", "--duplicates", "--parsable2", "--format", FIELDS)
            self.unix = self._export(
                "unix.txt",
                "--duplicates",
                "--allocations",
                "--parsable2",
                "--format",
                FIELDS,
                SLURM_TIME_FORMAT="%s",
            )
            self.json = self._export("all.json", "--duplicates", "--json")

    def _export(self, name: str, *options: str, **variables: str) -> Path:
        path = self.folder / name
        self.slurm.environment.update(variables)
        path.write_text(
            self.slurm.run(["sacct", "--allusers", "--starttime", "2020-01-01", *options])
        )
        for variable in variables:
            del self.slurm.environment[variable]
        return path

    def _submit(self, kind: str, *options: str, run: str = "true") -> None:
        argv = ["sbatch", "--parsable", "--output", "/dev/null", *options, "--wrap", run]
        self.ids[kind] = self.slurm.run(argv).strip()

    def _run_jobs(self) -> None:
        self._submit("well", "--gres=gpu:2", "--nodes=2", "--mem=100M")
        self._submit("odd", "--gres=gpu:1", "--job-name", ODD_NAME)
        self._submit("failed", "--gres=gpu:1", run="exit 3")
        self._submit("killed", run="kill -9 $$")
        self._submit("array", "--array=0-2%2", "--gres=gpu:1", run="exit $SLURM_ARRAY_TASK_ID")
        self._submit("mixed", "--gres=gpu:1", "--nodes=1", ":", "--gres=gpu:2", "--nodes=1")
        self._submit(
            "requeued", "--gres=gpu:3", run="[ ${SLURM_RESTART_COUNT:-0} -gt 0 ] || sleep 300"
        )
        self._submit("cancelled", "--gres=gpu:1", run="sleep 300")
        self._await(
            lambda told: all(
                f"{self.ids[kind]} RUNNING" in told for kind in ("requeued", "cancelled")
            )
        )
        # The job that waits is submitted last, so that no job waits for it.
        self._submit("running", "--gres=gpu:1", run="sleep 300")
        self._submit("waiting", "--array=1-4%1", "--exclusive", "--nodes=2", "--gres=gpu:4")
        self._submit("never", "--exclusive", "--nodes=2", "--gres=gpu:4")
        self.slurm.run(["scancel", self.ids["cancelled"], self.ids["never"]])
        self.slurm.run(["scontrol", "requeue", self.ids["requeued"]])
        left = {"running", "waiting"}
        self._await(
            lambda told: (
                {line.split()[0].split("_")[0] for line in told}
                == {self.ids[kind] for kind in left}
            )
        )
        self._await(lambda _: self._accounted())

    def _await(self, holds) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not holds(
            told := self.slurm.run(["squeue", "--noheader", "--format", "%i %T"]).splitlines()
        ):
            assert time.monotonic() < deadline_s, told
            time.sleep(0.2)

    def _accounted(self) -> bool:
        """Return True if the accounting has all that squeue printed; it is updated seconds later."""
        told = self.slurm.run(
            ["sacct", "-aXnPD", "-S", "2020-01-01", "-o", "JobIDRaw,State"]
        ).splitlines()
        ended = {
            line.split("|")[0] for line in told if line.split("|")[1] not in ("RUNNING", "PENDING")
        }
        requeued = [line for line in told if line.startswith(f"{self.ids['requeued']}|COMPLETED")]
        known = {line.split("|")[0] for line in told}
        return (
            bool(requeued)
            and known - ended == {self.ids["running"], self.ids["waiting"]}
            and len(told) == 15
        )


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    return Exports(tmp_path_factory.mktemp("s"))


def compared(rows):
    """Return the rows without the run time of running jobs, which differs between exports."""
    return [
        row | {"reported_duration_s": None} if row["state"] == "RUNNING" else row for row in rows
    ]


def test_every_job_is_as_it_was_asked_for(exports):
    assert SOURCE.recognises(exports.unix)
    reading, rows = read_file(SOURCE, exports.unix)
    by_id: dict[str, list[dict]] = {}
    for row in rows:
        by_id.setdefault(row["job_id"], []).append(row)

    def only(kind):
        (row,) = by_id[exports.ids[kind]]
        return row

    well = only("well")
    assert (well["state"], well["gpu_num"], well["node_num"], well["exit_code"]) == (
        "COMPLETED",
        4,
        2,
        0,
    )
    assert (well["nodes"], well["pool"], well["cluster"]) == (["n1", "n2"], "main", "holdfast")
    assert only("odd")["name"] == ODD_NAME
    assert (only("failed")["state"], only("failed")["exit_code"]) == ("FAILED", 3)
    assert (only("killed")["state"], only("killed")["exit_code"], only("killed")["gpu_num"]) == (
        "FAILED",
        137,
        0,
    )
    assert (only("cancelled")["state"], only("cancelled")["start_at"] is None) == (
        "CANCELLED",
        False,
    )
    never = only("never")
    assert (never["state"], never["start_at"], never["queue_s"], never["gpu_num"]) == (
        "CANCELLED",
        None,
        None,
        8,
    )
    assert (only("running")["state"], only("running")["end_at"]) == ("RUNNING", None)
    waiting = only("waiting")
    assert (waiting["state"], waiting["gpu_num"], waiting["start_at"]) == ("PENDING", 8, None)
    runs = by_id[exports.ids["requeued"]]
    assert [(run["attempt"], run["state"], run["gpu_num"]) for run in runs] == [
        (0, "PREEMPTED", 3),
        (1, "COMPLETED", 3),
    ]
    assert runs[1]["submit_at"] >= runs[0]["end_at"]
    leader = int(exports.ids["mixed"])
    assert [by_id[str(job_id)][0]["gpu_num"] for job_id in (leader, leader + 1)] == [1, 2]
    assert notes_of(reading) == {
        "slurm-never-started": 1,
        "slurm-pending-arrays": 1,
        "slurm-heterogeneous": 2,
        "slurm-requeued": 1,
    }


def test_tasks_of_an_array_are_jobs(exports):
    _, rows = read_file(SOURCE, exports.unix)
    shown = {
        line.split("|")[1]: line.split("|")[2]
        for line in exports.unix.read_text().splitlines()
        if line.startswith("holdfast|")
    }
    tasks = {
        shown[row["job_id"]]: row
        for row in rows
        if shown[row["job_id"]].startswith(exports.ids["array"] + "_")
    }
    array = exports.ids["array"]
    assert {task: (row["state"], row["exit_code"]) for task, row in tasks.items()} == {
        f"{array}_0": ("COMPLETED", 0),
        f"{array}_1": ("FAILED", 1),
        f"{array}_2": ("FAILED", 2),
    }


def test_local_times_with_steps_give_the_same_jobs(exports):
    _, unix = read_file(SOURCE, exports.unix)
    zone = time.strftime("%z")
    reading, local = read_file(SOURCE, exports.text, zone=f"{zone[:3]}:{zone[3:]}")
    assert compared(local) == compared(unix)
    assert notes_of(reading)["slurm-steps"] > 8


def test_the_json_gives_the_same_jobs_as_the_text(exports):
    assert SOURCE.recognises(exports.json)
    reading, from_json = read_file(SOURCE, exports.json)
    _, from_text = read_file(SOURCE, exports.unix)
    lost = notes_of(reading).get("slurm-exit-code-lost", 0)  # a defect of Slurm 22.05's JSON
    for row in from_text:
        if lost and row["state"] == "FAILED" and row["exit_code"] < 128:
            row["exit_code"] = None
    assert compared(from_json) == compared(from_text)
    failed = [
        job
        for job in json.loads(exports.json.read_text())["jobs"]
        if "FAILED" in job["state"]["current"]
    ]
    assert lost in (0, len(failed) - 1)
    times = {unix_s(row["submit_at"]) for row in from_json}
    assert times == {
        float(job["time"]["submission"]) for job in json.loads(exports.json.read_text())["jobs"]
    }
