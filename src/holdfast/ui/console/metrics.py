"""The metrics of the console in Prometheus' text format, or in OpenMetrics for who accepts it.

The runs are those of the page Now, and the labels are a run, a state, a kind of incident and a
node. So the number of series is bounded: `docs/monitoring.md` states the bound and lists the names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from holdfast.ui.console.backend import Backend
from holdfast.ui.console.now_page import now_page
from holdfast.ui.console.queries.metrics import INCIDENT_KINDS, counts
from holdfast.ui.console.queries.paging import LIMIT_S

STATES = ("queued", "running", "lost", "completed", "failed", "stopped")
RUN = ("run",)
RUN_GAUGES = (
    ("started_at_s", "holdfast_run_start_timestamp_seconds", "Unix time of the run's first start."),
    ("step", "holdfast_run_step", "Highest completed step; a rollback lowers it."),
    ("step_at_s", "holdfast_run_last_step_timestamp_seconds", "Unix time of the newest step."),
    ("step_s", "holdfast_run_step_duration_seconds", "Duration of the newest step."),
    ("loss", "holdfast_run_loss", "Loss of the newest step."),
    ("tokens_per_s", "holdfast_run_tokens_per_second", "Rate that the script reports."),
    ("checkpoint_step", "holdfast_run_checkpoint_step", "Step of the newest usable checkpoint."),
    (
        "healthy_step",
        "holdfast_run_healthy_checkpoint_step",
        "Step of the newest checkpoint that was found healthy.",
    ),
)
"""A field of a run on the page Now, the gauge's name and its help."""


@dataclass(frozen=True)
class _Collected(Collector):
    """Families of metrics, as the client library expects them."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self.families


def exposition_of(backend: Backend, accept: str) -> tuple[bytes, str]:
    """Return the metrics, and the content type.

    Args:
        backend: the console's records.
        accept: the header `Accept` of the request.

    Raises:
        TooSlow: the ledger did not answer in time.
        LedgerError: the ledger cannot be read.
    """
    page = now_page(backend.ledger, backend.home, backend.state_of)
    runs = {one["run_id"]: one for one in [*page["active"], *page["recent"]]}
    with backend.ledger.bounded_reading(LIMIT_S) as connection:
        counted = counts(connection, runs)
    encode, kind = exposition.choose_encoder(accept)
    return encode(_Collected(list(_families(page, list(runs.values()), counted)))), kind


def _families(
    page: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], counted: Mapping[str, Any]
) -> Iterator[Metric]:
    yield InfoMetricFamily(
        "holdfast_build", "Version of the console.", value={"version": version("holdfast")}
    )
    yield _run_counts(page, counted["states"])
    yield GaugeMetricFamily(
        "holdfast_evaluations_running",
        "Evaluations under way among the newest 50.",
        value=len(page["evaluating"]),
    )
    yield from _of_nodes(counted["nodes"])
    yield _labelled(
        InfoMetricFamily("holdfast_run", "Host of the run's supervisor.", labels=RUN),
        (((one["run_id"],), {"host": one["host"]}) for one in runs),
    )
    yield _labelled(
        GaugeMetricFamily(
            "holdfast_run_state", "1 for the run's present state, else 0.", labels=(*RUN, "state")
        ),
        (
            ((one["run_id"], state), float(one["state"] == state))
            for one in runs
            for state in STATES
        ),
    )
    waiting = {one["run_id"] for one in page["proposals"]}
    yield _labelled(
        GaugeMetricFamily(
            "holdfast_run_proposal_waiting",
            "1 while a proposal of the run waits for an approval, else 0.",
            labels=RUN,
        ),
        (((one["run_id"],), float(one["run_id"] in waiting)) for one in runs),
    )
    for field, name, said in RUN_GAUGES:
        yield _labelled(
            GaugeMetricFamily(name, said, labels=RUN),
            (((one["run_id"],), float(one[field])) for one in runs if one[field] is not None),
        )
    yield _labelled(
        CounterMetricFamily("holdfast_run_attempts", "Starts of the run's processes.", labels=RUN),
        (((one["run_id"],), float(one["attempts"] or 0)) for one in runs),
    )
    yield _labelled(
        CounterMetricFamily(
            "holdfast_run_incidents", "Incidents of the run, by kind.", labels=(*RUN, "kind")
        ),
        (
            ((one["run_id"], kind), float(counted["incidents"].get(one["run_id"], {}).get(kind, 0)))
            for one in runs
            for kind in INCIDENT_KINDS
        ),
    )


def _run_counts(page: Mapping[str, Any], states: Mapping[str, int]) -> Metric:
    """Return the number of runs in each state; the lost ones are among those that go on."""
    numbers = {**dict.fromkeys(STATES, 0), **states}
    for one in page["lost"]:
        # The supervisor ended without a record, so the ledger still counts the run as running.
        numbers["running"] = max(0, numbers["running"] - 1)
        numbers[one["state"]] += 1
    return _labelled(
        GaugeMetricFamily("holdfast_runs", "Runs in the ledger, by state.", labels=("state",)),
        (((state,), float(number)) for state, number in numbers.items()),
    )


def _of_nodes(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    yield _labelled(
        GaugeMetricFamily("holdfast_node_cordoned", "1 for a cordoned node.", labels=("node",)),
        (((one["name"],), 1.0) for one in nodes),
    )
    yield _labelled(
        GaugeMetricFamily(
            "holdfast_node_fault_probability_ratio",
            "Probability that a cordoned node is faulty, by its last test.",
            labels=("node",),
        ),
        (
            ((one["name"],), float(one["probability"]))
            for one in nodes
            if one["probability"] is not None
        ),
    )


def _labelled(family: Any, samples: Iterable[tuple[Sequence[str], Any]]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    assert isinstance(family, Metric)
    return family
