"""Checkpoints that arrive as in a trace: batches of evaluation jobs, and the plan's note."""

from datetime import UTC, datetime, timedelta

import pytest

from holdfast.cli import simulate as simulate_commands
from holdfast.cli.eval import command as eval_commands
from holdfast.core.errors import BadUse
from holdfast.evaluate.policy import Curve
from holdfast.simulate.arrivals import MIN_JOBS, MOST, arrivals_of, arrivals_s
from holdfast.simulate.evaluate import simulate
from holdfast.simulate.plan import _stream_note
from holdfast.simulate.workload import SimCluster, SimModel, SimTask, Workload

HEAD = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,"
    "end_time,fail_time,stop_time,duration,queue,gpu_time"
)


def test_a_batch_is_what_is_submitted_without_a_pause():
    batch = [10.0 * number for number in range(60)]
    later = [7200.0 + at_s for at_s in batch]
    trial = [20_000.0 + at_s for at_s in batch[: MIN_JOBS - 1]]
    last = [40_000.0 + at_s for at_s in batch]
    assert arrivals_s([*batch, *later, *trial, *last]) == (0.0, 7200.0, 40_000.0)
    assert arrivals_s(trial) == arrivals_s([]) == ()
    many = [day * 86_400.0 + at_s for day in range(MOST + 5) for at_s in batch]
    assert len(arrivals_s(many)) == MOST


def trace(folder, batches, kind):
    begun, lines = datetime(2023, 6, 1, tzinfo=UTC), [HEAD]
    for hour, jobs in batches:
        for number in range(jobs):
            at = begun + timedelta(hours=hour, seconds=number)
            end = at + timedelta(minutes=2)
            lines.append(
                f"j{hour}-{number},u,1,1,12,100,10,{kind},COMPLETED,{at},{at},{end},,,120,0,120"
            )
    file = folder / "trace_kalos.csv"
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def test_arrivals_of_a_trace_are_those_of_its_evaluations(tmp_path):
    assert arrivals_of(trace(tmp_path, [(0, 60), (5, 63), (6, 3)], "Evaluation")) == (0.0, 18_000.0)
    with pytest.raises(BadUse, match="Name other job records"):
        arrivals_of(trace(tmp_path, [(0, 60)], "Pretrain"))


def test_a_stream_is_evaluated_as_it_comes():
    curve = Curve(
        prefill_tokens_per_s=1000.0, request_s=0.0, step_base_s=0.01, step_sequence_s=0.0, max_batch=8
    )  # fmt: skip
    task = SimTask(
        name="t", prompt_tokens=[100] * 20, new_tokens=[10] * 20, max_new_tokens=10, metric_s=[0.0] * 20
    )  # fmt: skip
    came_s = (0.0, 500.0, 1000.0)
    workload = Workload(
        tasks=(task,), models=tuple(SimModel(release_s=at_s, size_bytes=1e6) for at_s in came_s)
    )
    outcome = simulate(workload, SimCluster(nodes=1, engines_per_node=1, curve=curve), record=True)
    assert outcome.makespan_s > 1000.0
    for number, at_s in enumerate(came_s):
        assert min(one.t0 for one in outcome.timeline.requests if one.model == number) >= at_s
    note = _stream_note(outcome.timeline, came_s)
    assert note.startswith("3 checkpoints came in 0.3 h; all scores of one were there after ")
    assert 0 < float(note.split(" after ")[1].split(" s ")[0]) < 500


def test_simulate_evaluate_is_the_plan_of_an_evaluation():
    found = simulate_commands.command.commands["evaluate"]
    plan = eval_commands.command.commands["plan"]
    assert (found.callback, found.params) == (plan.callback, plan.params)
    assert (found.name, plan.name) == ("evaluate", "plan")
