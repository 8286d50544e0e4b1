"""Wall clocks that jump by hours while a job trains: no restart, and an account that stays whole."""

import pytest

from holdfast.core.accounting import summarize
from holdfast.core.clock import SteadyClock, elapsed_s, wall_offset_s
from holdfast.core.ledger import Incident, Ledger, Run
from holdfast.core.paths import RunPaths, ledger_url
from holdfast.recover import policy
from holdfast.recover.attempt import AttemptView
from holdfast.recover.channel import Peer
from holdfast.recover.detectors.hang import HangLimits
from holdfast.recover.policy import Phase
from holdfast.recover.spec import RunSpec
from holdfast.recover.supervisor import Supervisor
from holdfast.testing import FakeClock

HOUR_S = 3600.0
JUMPS_S = (3 * HOUR_S, -7 * HOUR_S, 26 * HOUR_S, -50 * HOUR_S)
RANKS = [
    Peer(role="rank", attempt=1, rank=rank, local_rank=rank, world_size=2, pid=10 + rank)
    for rank in range(2)
]


class World:
    """A supervisor of two ranks, on a host whose wall clock jumps."""

    def __init__(self, folder):
        self.host = FakeClock()
        self.clock = SteadyClock(
            self.host.now_s() - self.host.monotonic_s(),
            elapsed_s=self.host.monotonic_s,
            monotonic_s=self.host.monotonic_s,
        )
        self.began_s = self.clock.now_s()
        self.ledger = Ledger.open(ledger_url(folder))
        run = {"run_id": "r", "state": "running", "command": ["true"], "options": {"nproc": 2}}
        self.ledger.add_run(Run(**run, cwd="/", host="h", pid=1, started_at_s=self.began_s))
        spec = RunSpec(command=("true",), cwd=str(folder))
        self.paths = RunPaths(folder, "r")
        self.paths.attempt_logs(1).mkdir(parents=True)
        self.supervisor = Supervisor(
            spec, self.paths, self.ledger, token="x", generation=1, clock=self.clock
        )
        self.conduct, self.recorder = self.supervisor._conduct, self.supervisor._recorder
        self.told = []
        self.supervisor._decide_on = self.told.append
        self.step = 0

    def begin(self, attempt):
        self.conduct.view = AttemptView.begin(attempt, HangLimits())
        self.conduct.launches.attempt = attempt
        self.conduct.state = policy.State(phase=Phase.RUNNING)
        self.recorder.attempt_began(attempt)
        self.ranks = [Peer(**{**vars(rank), "attempt": attempt}) for rank in RANKS]
        for rank in self.ranks:
            self.hear(rank, {"kind": "hello"})
            self.hear(rank, {"kind": "watch"})

    def hear(self, rank, message):
        at_s = self.clock.monotonic_s()
        self.supervisor.received(rank, message, at_s, again=False)

    def train(self, steps):
        """Make steps of a second each; the ranks read the host's own clock."""
        for _ in range(steps):
            self.host.advance(1.0)
            self.step += 1
            for rank in self.ranks:
                report = {"step": self.step, "step_s": 1.0, "loss": None, "metrics": {}}
                self.hear(rank, {"kind": "step", **report, "at_s": self.host.now_s()})
            assert self.conduct.view.check(self.clock.monotonic_s()) is None
        self.recorder.flush()

    def account(self):
        return summarize(self.ledger, self.paths.home, "r")


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.conduct.close()
    world.recorder.close()
    world.ledger.close()


def test_a_job_that_trains_is_not_touched_while_the_wall_clock_jumps_by_hours(world):
    world.begin(1)
    for jump_s in JUMPS_S:
        world.train(30)
        world.host.jump(jump_s)
    world.train(30)
    assert [type(event) for event in world.told if not isinstance(event, policy.Tick)] == []
    assert world.step == 150


def one_fault(world, jumps_s):
    """Train, lose a rank, train on from a checkpoint; the clock jumps at each stage.

    Return the account.
    """
    first, second, third, fourth = jumps_s
    world.host.advance(2.0)
    world.begin(1)
    world.train(20)
    world.host.jump(first)
    saved = {"path": "/c/20", "size_bytes": 1, "stall_s": 0.5}
    world.hear(
        world.ranks[0], {"kind": "event", "event": "checkpoint", "data": {"step": 20, **saved}}
    )
    world.train(15)
    fault_at_s = world.clock.now_s()
    world.host.advance(1.0)
    incident = Incident(
        run_id="r",
        attempt=1,
        kind="exit",
        rank=1,
        step=35,
        fault_at_s=fault_at_s,
        detected_at_s=world.clock.now_s(),
        diagnosis={},
        action="restart",
    )
    incident_id = world.recorder.incident(incident)
    world.host.jump(second)
    world.host.advance(2.0)
    world.recorder.attempt_ended(outcome="failed", last_step=35)
    world.step = 20
    world.begin(2)
    world.hear(
        world.ranks[0],
        {"kind": "event", "event": "restored", "data": {"step": 20, "restore_s": 1.0}},
    )
    world.host.jump(third)
    world.train(40)
    world.recorder.resumed(incident_id, fault_at_s + 6.0, 20)
    world.host.jump(fourth)
    world.recorder.attempt_ended(outcome="completed", last_step=60)
    world.recorder.run_ended(state="completed", exit_code=0, outcome="The job completed.")
    return world.account()


def test_the_account_of_a_run_is_the_same_with_and_without_jumps(tmp_path):
    accounts = []
    for name, jumps_s in (("steady", (0.0,) * 4), ("jumping", JUMPS_S)):
        world = World(tmp_path / name)
        accounts.append(one_fault(world, jumps_s))
        world.conduct.close()
        world.recorder.close()
        world.ledger.close()
    steady, jumping = accounts
    assert steady.wall_s == pytest.approx(80.0)
    assert jumping.wall_s == pytest.approx(steady.wall_s)
    assert vars(jumping.breakdown) == pytest.approx(vars(steady.breakdown))
    assert jumping.ettr == pytest.approx(steady.ettr)
    for found in accounts:
        assert found.lost_time.total_s == pytest.approx(2 * 80.0), "each second of each rank"
        assert found.steps_lost == 15


def test_the_steady_clock_of_this_machine_shows_its_time():
    clock = SteadyClock(wall_offset_s())
    assert clock.now_s() - elapsed_s() == pytest.approx(wall_offset_s(), abs=60)
