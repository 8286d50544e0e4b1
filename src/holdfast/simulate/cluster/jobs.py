"""Hold the jobs of a trace as columns, and predict their run times from earlier jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import BadUse

if TYPE_CHECKING:
    from holdfast.trace import Trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EVALUATION: Final = "Evaluation"
UNKNOWN: Final = "unknown"
FIRST_PREDICTION_S: Final = 86_400.0
"""The predicted run time, in seconds, of a job without a similar earlier job: a day, which is a
usual default time limit.
"""
_NEEDED: Final = ("submit_at", "run_s", "gpu_num")


@dataclass(frozen=True, kw_only=True, eq=False)
class Jobs:
    """GPU jobs as columns, in the order of submission. Shape: N jobs."""

    submit_s: Floats
    """(N) The submission times in seconds since the first submission, ascending."""
    run_s: Floats
    """(N) The seconds for which the job holds its GPUs."""
    gpus: Ints
    """(N) The number of whole GPUs."""
    user: Ints
    """(N) A number that identifies the user; 0 for all jobs if the trace names no users."""
    type: Ints
    """(N) The index in `types`."""
    pool: Ints
    """(N) The index in `pools`."""
    predicted_s: Floats
    """(N) The run time that the scheduler assumes, in seconds."""
    queue_s: Floats
    """(N) The wait that the trace recorded, in seconds; NaN if the trace has none for the job."""
    types: tuple[str, ...]
    pools: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.submit_s)

    def take(self, kept: npt.NDArray[Any]) -> Self:
        """Return the jobs that a boolean mask or an array of indices selects."""
        columns = {
            field.name: getattr(self, field.name)[kept]
            for field in fields(self)
            if field.name not in ("types", "pools")
        }
        return replace(self, **columns)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Self:
        """Make jobs from rows in any order; predict the run times if the columns have none.

        Args:
            columns: arrays of equal length. `submit_s`, `run_s` and `gpus` are required; `user`,
                `type`, `pool` (texts or numbers), `queue_s` and `predicted_s` are optional.
                Fractions of a GPU are rounded up.
        """
        submit_s = np.asarray(columns["submit_s"], dtype=float)
        order = np.argsort(submit_s, kind="stable")
        number = len(submit_s)

        def column(name: str, default: Any) -> npt.NDArray[Any]:
            return np.asarray(columns.get(name, np.full(number, default)))[order]

        types, type_ = np.unique(column("type", UNKNOWN).astype(str), return_inverse=True)
        pools, pool = np.unique(column("pool", UNKNOWN).astype(str), return_inverse=True)
        _, user = np.unique(column("user", 0), return_inverse=True)
        jobs = cls(
            submit_s=submit_s[order] - (submit_s.min() if number else 0.0),
            run_s=column("run_s", 0.0).astype(float),
            gpus=np.ceil(column("gpus", 1.0)).astype(np.int64),
            user=user.astype(np.int64),
            type=type_.astype(np.int64),
            pool=pool.astype(np.int64),
            predicted_s=column("predicted_s", 0.0).astype(float),
            queue_s=column("queue_s", np.nan).astype(float),
            types=tuple(types.tolist()),
            pools=tuple(pools.tolist()),
        )
        return jobs if "predicted_s" in columns else jobs.predicted()

    def predicted(self) -> Self:
        """Return the jobs with run times predicted from earlier jobs.

        The prediction is the mean run time of the last two jobs with the same user, type and number
        of GPUs. If there are none, the user is ignored. Only jobs that had ended before the
        submission count, under the assumption that each job started without a wait. Source:
        Tsafrir, Etsion and Feitelson, IEEE TPDS 18(6), 2007.
        """
        scale = int(self.gpus.max(initial=0)) + 1
        alike = self.type * scale + self.gpus
        own = (self.user + 1) * (len(self.types) * scale) + alike
        last: dict[int, tuple[float, float]] = {}
        ending: list[tuple[float, int]] = []
        found = []
        own_of, alike_of, run_of = own.tolist(), (-alike - 1).tolist(), self.run_s.tolist()
        for job, now_s in enumerate(self.submit_s.tolist()):
            while ending and ending[0][0] <= now_s:
                _, ended = heappop(ending)
                run_s = run_of[ended]
                for key in (own_of[ended], alike_of[ended]):
                    last[key] = (last[key][1] if key in last else run_s, run_s)
            known = last.get(own_of[job]) or last.get(alike_of[job])
            found.append(FIRST_PREDICTION_S if known is None else (known[0] + known[1]) / 2)
            heappush(ending, (now_s + run_of[job], job))
        return replace(self, predicted_s=np.array(found, dtype=float))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The jobs of one cluster in a trace, and the size of the cluster."""

    jobs: Jobs
    cluster: str
    nodes: int
    gpus_per_node: int
    left_out: Mapping[str, int]
    """The number of jobs that cannot be replayed, by reason."""
    on_parts_of_gpus: int = 0
    """The number of jobs that hold a fraction of a GPU in the trace, and a whole GPU in the replay.
    """


def jobs_of(trace: "Trace") -> Replayed:
    """Read the GPU jobs of the only cluster in a trace.

    Raises:
        BadUse: there are several clusters, the size is unknown, or the trace lacks times or GPUs.
    """
    names = [name for name in trace.clusters if name not in trace.compared]
    if len(names) != 1:
        raise BadUse(
            f"The trace holds {len(names)} clusters: {', '.join(names)}. Give the jobs of one of them."
        )
    name = names[0]
    known = trace.clusters[name]
    if known.node_num is None or known.gpus_per_node is None:
        raise BadUse(
            f"The size of {name} is not known. Give it as --capacity NODESxGPUS, such as 286x8."
        )
    if missing := [column for column in _NEEDED if not trace.has(column)]:
        raise BadUse(
            f"The trace has no {' and no '.join(missing)}, so no job can be replayed. Use another trace."
        )
    # Texts are replaced by numbers, since a million text objects would need more memory than all
    # the other columns.
    texts = {"user": "username", "type": "type", "pool": "pool"}
    coded = ", ".join(
        f"dense_rank() OVER (ORDER BY coalesce({column}, '{UNKNOWN}')) - 1 AS {key}"
        for key, column in texts.items()
    )
    table = trace.query(
        f"SELECT epoch(submit_at) AS submit_s, run_s, gpu_num AS gpus, queue_s, {coded} FROM jobs "
        "WHERE cluster = ? AND gpu_num > 0 ORDER BY submit_at, job_id, attempt",
        [name],
    )
    words = {
        key: tuple(
            trace.query(
                f"SELECT DISTINCT coalesce({column}, '{UNKNOWN}') AS word FROM jobs "
                "WHERE cluster = ? AND gpu_num > 0 ORDER BY 1",
                [name],
            )["word"].tolist()
        )
        for key, column in texts.items()
        if key != "user"
    }
    columns = {key: np.asarray(table[key], dtype=float) for key in table.columns}
    reasons = {
        "no submission": np.isnan(columns["submit_s"]),
        "not started or not ended": np.isnan(columns["run_s"]),
        "larger than the cluster": columns["gpus"] > known.node_num * known.gpus_per_node,
        "a negative run time": columns["run_s"] < 0,
    }
    kept, left_out = np.ones(len(table), dtype=bool), {}
    for reason, those in reasons.items():
        if number := int((those & kept).sum()):
            left_out[reason] = number
        kept &= ~those
    if not kept.any():
        raise BadUse(f"{name} has no GPU job that started and ended. Use another trace.")
    submit_s = columns["submit_s"][kept]
    jobs = Jobs(
        submit_s=submit_s - submit_s[0],
        run_s=columns["run_s"][kept],
        gpus=np.ceil(columns["gpus"][kept]).astype(np.int64),
        user=columns["user"][kept].astype(np.int64),
        type=columns["type"][kept].astype(np.int64),
        pool=columns["pool"][kept].astype(np.int64),
        predicted_s=np.zeros(len(submit_s)),
        queue_s=columns["queue_s"][kept],
        types=words["type"],
        pools=words["pool"],
    )
    return Replayed(
        jobs=jobs.predicted(),
        cluster=name,
        nodes=known.node_num,
        gpus_per_node=known.gpus_per_node,
        left_out=left_out,
        on_parts_of_gpus=int((columns["gpus"][kept] % 1 > 0).sum()),
    )


def places(names: Sequence[str], wanted: str) -> int | None:
    """Return the index of a name, or None if the name is missing."""
    return names.index(wanted) if wanted in names else None
