"""Small jobs and clusters, and a replay that checks the nodes after every event."""

import random

import numpy as np

from holdfast.simulate.cluster import Jobs, Policy, classes, replay
from holdfast.simulate.cluster.engine import _Replay


def jobs(rows, *, predicted=True):
    """Make jobs of (submission, run time, GPUs, type); predictions are the run times."""
    submit_s, run_s, gpus, types = zip(*rows, strict=True)
    columns = {"submit_s": submit_s, "run_s": run_s, "gpus": gpus, "type": types}
    return Jobs.of(columns | ({"predicted_s": run_s} if predicted else {}))


def random_jobs(seed, number=300, *, predicted=True):
    """Make jobs that overload two nodes of 4 GPUs now and then."""
    rng = random.Random(seed)
    at_s, rows = 0.0, []
    for _ in range(number):
        at_s += rng.choice([0.0, 0.0, rng.expovariate(1 / 20)])
        kind = rng.choice(["Pretrain", "Evaluation", "Evaluation", "Other"])
        gpus = rng.choice([1, 1, 2, 3, 4, 6, 8] if kind != "Evaluation" else [1, 2])
        rows.append((at_s, float(rng.choice([0, 1, 8, 30, 90])), gpus, kind))
    return jobs(rows, predicted=predicted)


def replayed(given, policy, *, nodes, per):
    """Replay jobs under a policy."""
    sorted_into = classes(given, policy, nodes=nodes, gpus_per_node=per)
    return replay(given, sorted_into, gpus_per_node=per, mode=policy.mode)


class Watched(_Replay):
    """A replay that notes reservations and calls `look` with itself after every event."""

    def __init__(self, given, policy, *, nodes, per, look=lambda run: None):
        sorted_into = classes(given, policy, nodes=nodes, gpus_per_node=per)
        super().__init__(given, sorted_into, per, policy.mode, None)
        self.reservations = []
        self.sorted_into = sorted_into
        self.look = look

    def _reserve(self, queue, job):
        super()._reserve(queue, job)
        self.reservations.append((job, queue.shadow_s))

    def _schedule(self, freed, new):
        super()._schedule(freed, new)
        self.look(self)


POLICIES = {
    "first come": Policy(best_effort=()),
    "reserved": Policy(reserved_nodes={"Pretrain": 2}),
    "reserved, idle": Policy(reserved_nodes={"Pretrain": 2}, mode="idle"),
    "limited": Policy(limit_gpus={"Other": 8, "Evaluation": 2}, mode="idle"),
}
NODES, PER = 4, 4


def starts(outcome):
    """Return the starts in the order of submission."""
    return np.asarray(outcome.start_s).tolist()
