"""Real runs whose trainers are started again below the launcher and the shims that are there."""

import psutil

TRAIN = """
import os, pathlib, signal, time
import torch, torch.distributed as dist
import holdfast

run = holdfast.attach()
rank, attempt = int(os.environ["RANK"]), os.environ["HOLDFAST_ATTEMPT"]
dist.init_process_group("gloo")
progress = pathlib.Path("progress")
start = int(progress.read_text()) if progress.exists() else 0
for step in range(start + 1, 100_000):
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    run.step(step)
    if step == start + 5:
        with open(f"at-work-{rank}", "a") as facts:
            print(attempt, os.getpid(), file=facts)
        if attempt == "1" and rank == 1:  # before there are warm processes
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:  # it may be killed at any moment
        pathlib.Path("progress-next").write_text(str(step))
        os.replace("progress-next", progress)
    is_enough = torch.tensor([float(pathlib.Path("enough").exists())])
    dist.all_reduce(is_enough)
    if is_enough.item():  # the ranks may have looked at different moments, but end together
        break
    time.sleep(0.01)
dist.destroy_process_group()
"""


class Job:
    """A run of two gloo ranks, and the observed processes."""

    def __init__(self, place):
        self._place = place
        command = ["run", "--name", "r", "--nproc", "2", "--", "python", place.job(TRAIN)]
        self._supervisor = place.start(*command)

    def trainers(self, attempt):
        """The trainers of an attempt, in the order of their ranks, once both have made some steps."""
        found = {}

        def are_at_work():
            for rank in range(2):
                path = self._place.folder / f"at-work-{rank}"
                for line in path.read_text().splitlines() if path.exists() else ():
                    number, pid = map(int, line.split())
                    if number == attempt and psutil.pid_exists(pid):
                        found[rank] = psutil.Process(pid)
            return len(found) == 2

        self._place.wait_until(are_at_work)
        return [found[0], found[1]]

    def launcher(self):
        (launcher,) = {shim.parent() for shim in self.shims()}
        return launcher

    def shims(self):
        return sorted(
            (
                one
                for one in self._place.processes()
                if _runs(one, "holdfast.recover.shim.rank_shim", at=2)
            ),
            key=lambda shim: shim.environ()["RANK"],
        )

    def warm(self):
        """The warm processes, in the order of their ranks, once both are there."""
        found = []

        def are_there():
            children = [child for shim in self.shims() for child in shim.children()]
            found[:] = [
                child
                for child in children
                if _runs(child, "holdfast.recover.shim.trainer", at=3) and child.cmdline()[5]
            ]
            return len(found) == 2

        self._place.wait_until(are_there)
        return found

    def end(self):
        (self._place.folder / "enough").touch()
        _, err = self._supervisor.communicate(timeout=240)
        assert self._supervisor.returncode == 0, err


def _runs(process, module, *, at):
    return process.cmdline()[at : at + 1] == [module]


def test_trainers_are_started_again_below_whatever_is_there(place):
    """New interpreters at first, forks of warm processes later.

    A new launcher where a shim is gone.
    """
    job = Job(place)
    second = job.trainers(2)
    launcher, shims = job.launcher(), job.shims()
    assert [one.parent() for one in second] == shims, "new interpreters"
    warm = job.warm()
    second[0].kill()
    third = job.trainers(3)
    assert [one.parent() for one in third] == warm
    third[1].kill()
    fourth = job.trainers(4)
    assert [one.parent() for one in fourth] == warm, "the same ones again"
    warm[0].kill()
    fifth = job.trainers(5)
    assert [one.parent() for one in fifth] == [shims[0], warm[1]]
    assert (job.launcher(), job.shims()) == (launcher, shims)
    shims[1].kill()
    job.trainers(6)
    assert job.launcher() != launcher
    job.end()
    with place.ledger() as ledger:
        incidents = ledger.incidents()
    blamed = [(one.kind, one.rank, one.action) for one in incidents]
    expected = [("exit", rank, "restart") for rank in (1, 0, 1, 0, 1)]
    assert blamed == expected, [(one.attempt, one.explanation) for one in incidents]


EARLY = """
import os, sys
import holdfast

attempt = int(os.environ["HOLDFAST_ATTEMPT"])
with open("attempts", "a") as attempts:
    print(os.getppid(), os.environ["TORCHELASTIC_RESTART_COUNT"], file=attempts)
run = holdfast.attach()
if attempt != 2:
    for step in range(1, 11):
        run.step(10 * attempt + step)
sys.exit(0 if attempt == 4 else 1)  # once its steps are sent
"""


def test_what_fails_before_its_first_step_gets_a_new_launcher(place):
    code, _, err = place.holdfast("run", "--", "python", place.job(EARLY))
    assert code == 0, err
    lines = (place.folder / "attempts").read_text().splitlines()
    shims, restarts = zip(*map(str.split, lines), strict=True)
    assert restarts == ("0", "1", "0", "1")
    assert shims[0] == shims[1] != shims[2] == shims[3]
