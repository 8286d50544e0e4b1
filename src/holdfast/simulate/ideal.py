"""Compute a lower bound for the time of a simulated evaluation, from its true costs."""

from holdfast.evaluate.policy import Bound, Quota, RunWork, SampleWork, Transfer, lower_bound
from holdfast.simulate.workload import SimCluster, Workload


def bound_of(workload: Workload, cluster: SimCluster) -> Bound:
    """Return a lower bound for the time of any schedule of `workload` on `cluster`.

    The bound includes the times that no schedule can avoid: building the requests, starting the
    engines (all at the same time), transferring the weights at full network speed, and copying them
    into the devices. The bound leaves out messages, swaps of the weights, and the slowness of
    single engines.
    """
    curve = cluster.curve
    first_bytes = workload.models[0].size_bytes if workload.models else 0.0
    engine_s = (
        cluster.node_start_s + cluster.engine_start_s + first_bytes / cluster.device_bytes_per_s
    )
    samples: list[SampleWork] = []
    wire: list[Transfer] = []
    for model in workload.models:
        fetched_s = model.release_s + cluster.fetch_s(model.size_bytes)
        ready_s = max(
            fetched_s + model.size_bytes / cluster.device_bytes_per_s, cluster.prepare_s, engine_s
        )
        shortest_s = float("inf")
        for task in workload.tasks:
            for prompt, new, metric_s in zip(
                task.prompt_tokens, task.new_tokens, task.metric_s, strict=True
            ):
                alone_s = curve.alone_s(prompt, new)
                shortest_s = min(shortest_s, alone_s)
                samples.append(
                    SampleWork(
                        ready_s=ready_s,
                        engine_s=curve.saturated_s(prompt, new) * task.choices,
                        alone_s=alone_s,
                        metric_s=metric_s,
                        tokens=new,
                        judge_requests=1.0 if cluster.judge_per_s and metric_s else 0.0,
                    )
                )
        copied_s = model.size_bytes / cluster.device_bytes_per_s
        wire.append(
            Transfer(
                ready_s=model.release_s,
                size_bytes=model.size_bytes,
                bytes_per_s=cluster.store_bytes_per_s,
                then_s=copied_s + (0.0 if shortest_s == float("inf") else shortest_s),
            )
        )
    return lower_bound(
        RunWork(
            samples=samples,
            curve=curve,
            engines_there_s=[engine_s] * cluster.engines,
            slots_there_s=[cluster.node_start_s] * (cluster.nodes * cluster.metric_slots),
            judge_requests=Quota(rate_per_s=cluster.judge_per_s, burst=1.0)
            if cluster.judge_per_s
            else None,
            transfers=[wire],
        )
    )
