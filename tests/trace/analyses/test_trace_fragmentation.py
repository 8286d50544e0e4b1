"""Compare the state of nodes at whole hours with a replay of every job."""

import numpy as np
import pandas as pd
import pytest
from job_tables import made_up, rows_of, trace_of

from holdfast.trace.analyses.fragmentation import fragmentation, placement
from holdfast.trace.clusters import Cluster
from holdfast.trace.errors import LeftOut

NODES = [f"node-{number}" for number in range(13)]


def placed(seed=0):
    """Place jobs on nodes of 8 GPUs without overlap: each job takes whole nodes or a free part of
    one node.
    """
    random = np.random.default_rng(seed)
    free_at = {(node, gpu): pd.Timestamp(0) for node in NODES[:-1] for gpu in range(8)}
    rows = []
    at = pd.Timestamp("2023-06-01")
    for number in range(400):
        at += pd.Timedelta(seconds=int(random.exponential(900)))
        gpus = int(random.choice([1, 2, 4, 8, 16]))
        free = {node: [gpu for gpu in range(8) if free_at[node, gpu] <= at] for node in NODES[:-1]}
        each = min(gpus, 8)
        nodes = [node for node in random.permutation(NODES[:-1]) if len(free[node]) >= each][
            : max(1, gpus // 8)
        ]
        if len(nodes) < max(1, gpus // 8):
            continue
        end = at + pd.Timedelta(seconds=int(random.exponential(9 * 3600)))
        for node in nodes:
            for gpu in free[node][:each]:
                free_at[node, gpu] = end
        rows.append(
            {
                "cluster": "Seren",
                "job_id": str(number),
                "state": "COMPLETED",
                "submit_at": at,
                "start_at": at,
            }
            | {"end_at": end, "gpu_num": float(gpus), "nodes": [str(node) for node in nodes]}
        )
    return pd.DataFrame(rows)


def replayed(frame, moment):
    """Count the GPUs in use on each node at a moment."""
    used = dict.fromkeys(NODES, 0.0)
    for row in frame.itertuples():
        if row.start_at <= moment and not moment >= row.end_at:  # a running job has no end
            for node in row.nodes:
                used[node] += row.gpu_num / len(row.nodes)
    return used


@pytest.mark.parametrize("known", [True, False])
def test_nodes_are_as_a_replay_has_them(known):
    frame = placed()
    runs_on = frame.iloc[[100]].assign(
        state="RUNNING", end_at=pd.NaT, gpu_num=8.0, nodes=[[NODES[-1]]]
    )
    frame = pd.concat([frame, runs_on])
    size = {"node_num": 14, "gpus_per_node": 8} if known else {}
    with trace_of(frame, clusters=[Cluster(name="Seren", source="test", **size)]) as trace:
        found, result = placement(trace, "Seren"), fragmentation(trace)
    nodes = 14 if known else 13
    assert found.nodes == nodes
    assert (found.first_hour + len(found.partly_used) - 1) * 3600 <= frame[
        "submit_at"
    ].max().timestamp()
    for place in range(len(found.partly_used)):
        used = replayed(frame, pd.Timestamp((found.first_hour + place) * 3600, unit="s"))
        free = [8 - gpus for gpus in used.values()] + [8] * (nodes - 13)
        assert found.partly_used[place] == sum(0 < gpus < 8 for gpus in free)
        assert found.free_on_partly_used[place] == sum(gpus for gpus in free if gpus < 8)
        assert found.free_nodes[place] == sum(gpus == 8 for gpus in free)
        assert found.largest_fit[place] == max(8 * sum(gpus == 8 for gpus in free), *free)
    key = "seren.fragmentation"
    assert result.numbers[f"{key}.mean_share_of_nodes_partly_used"] == pytest.approx(
        found.partly_used.mean() / nodes
    )
    assert result.numbers[f"{key}.median_largest_fit_gpus"] == np.median(found.largest_fit)
    assert rows_of(result.table)["largest_fit_gpus"].tolist() == found.largest_fit.tolist()
    assert len(result.chart.panels) == 3


def test_without_placement_it_is_left_out_and_says_so():
    with trace_of(made_up()) as trace, pytest.raises(LeftOut, match="the trace has no nodes"):
        fragmentation(trace)
    frame = placed().assign(nodes=[[]] * len(placed()))
    with trace_of(frame) as trace, pytest.raises(LeftOut, match="names its nodes"):
        fragmentation(trace)
