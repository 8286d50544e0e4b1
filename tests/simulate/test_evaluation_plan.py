"""The prediction of `holdfast eval plan` for an evaluation that was never run."""

import itertools
import json

import msgspec
import psutil
import pytest

from holdfast.core.errors import BadUse
from holdfast.core.ledger import Ledger
from holdfast.core.ledger.records import EvaluationRecord
from holdfast.core.paths import EvaluationPaths, ledger_url
from holdfast.evaluate.coordinator.config import CoordinatorConfig, CoordinatorFiles
from holdfast.evaluate.coordinator.engine_slots import Orders
from holdfast.evaluate.policy.priors import TaskHistory
from holdfast.evaluate.run import forecast
from holdfast.evaluate.run.forecast import engines_per_node_of, fit_of, history_note
from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits
from holdfast.evaluate.run.plan import Planned
from holdfast.evaluate.types.engine import Curve, EngineSpec
from holdfast.evaluate.types.harness import SampleRequests
from holdfast.evaluate.types.model_manifest import ModelManifest
from holdfast.evaluate.types.requests import Request, Sampling, pack_tokens
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.types.timeline import EngineSpan, NodeSpan, TimelineFile
from holdfast.evaluate.wire.messages import NodeReport
from holdfast.simulate.plan import plan
from holdfast.testing import FakeClock

GIB = 2**30
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
SMALL = LLAMA_70B | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


class Harness:
    """Ten samples of an entry: "generate" has 8 tokens each, anything else log-probabilities."""

    def prepare(self, entries):
        pass

    def run(self, entry, client, folder):
        client.ask(samples(entry.name))


def samples(kind, count=10):
    sampling = Sampling(max_new_tokens=8) if kind == "generate" else None
    request = Request(
        kind="generate" if sampling else "loglikelihood",
        prompt=pack_tokens(range(100)),
        continuation=b"" if sampling else pack_tokens([1]),
        sampling=sampling,
    )
    metric_key = b"m" * 16 if kind == "metric" else b""
    return [
        SampleRequests(sample=number, requests=[request], metric_key=metric_key)
        for number in range(count)
    ]


def options(home, **changes):
    engine = EngineSpec(kind="openai", url="http://h:1/v1", model_name="m", mode="free")
    return EvaluateOptions(**{"home": home, "engine": engine, "family": "f"} | changes)


SUITE = Suite(
    name="s",
    entries=tuple(
        TaskEntry(name=name, harness=f"{__name__}:Harness") for name in ("generate", "score")
    ),
)


def test_what_an_earlier_evaluation_measured_is_in_the_bound(tmp_path):
    curve = Curve(
        prefill_tokens_per_s=1000.0,
        request_s=0.0,
        step_base_s=0.1,
        step_sequence_s=0.0,
        max_batch=1,
    )
    paths = EvaluationPaths(tmp_path, "before")
    with TimelineFile(paths.timeline) as writer:
        writer.append(EngineSpan(what="load", engine=0, node=0, t0=0.0, t1=7.0))
        writer.append(NodeSpan(what="fetch", node=0, t0=0.0, t1=2.0, remote_bytes=10))
    CoordinatorFiles(paths.root).folder.mkdir()
    CoordinatorFiles(paths.root).curve.write_bytes(msgspec.json.encode(curve))
    with Ledger.open(ledger_url(tmp_path)) as ledger:
        ledger.add_evaluation(
            EvaluationRecord(
                evaluation_id="before", suite="s", model="m", family="f", state="done", started_at_s=1.0,
                folder=str(paths.root), mode="free",
            )
        )  # fmt: skip
    made = plan(SUITE, "m", options=options(tmp_path))
    found = made.evaluation
    assert found.samples == 20
    terms = {term.name: term.seconds for term in found.bound}
    guessed_tokens = made.timeline.requests[0].new_tokens or made.timeline.requests[-1].new_tokens
    assert terms["engines"] == pytest.approx(7.0 + 20 * 0.1 + 10 * guessed_tokens * 0.1, rel=0.01)
    assert 1.0 <= found.ratio < 1.1
    assert made.notes[1] == "The speed of the engines is taken from evaluation before."


def test_notes_of_what_is_not_known(tmp_path):
    judge = JudgeLimits(url="http://j/v1", requests_per_minute=5)
    made = plan(SUITE, "m", options=options(tmp_path, judge=judge))
    assert made.notes[0] == (
        "These tasks were never measured: lengths are estimated from their limits. "
        "1 entry reads prompts alone, whose lengths are known."
    )
    assert made.notes[1].startswith("No evaluation of this family (f) was measured yet")
    assert made.notes[2].startswith("The judge is left out")
    assert len(made.notes) == 3, "its engines have the model themselves"


def test_the_note_counts_what_history_could_say():
    def note(known, *kinds):
        names = [f"{kind}{number}" for number, kind in enumerate(kinds)]
        history = [
            TaskHistory(task=names[one], numbers=b"", new_tokens=b"", metric_s=b"") for one in known
        ]
        return history_note(history, names, [samples(kind, 1) for kind in kinds])

    assert note([], "score", "score") == "All entries read prompts alone, whose lengths are known."
    assert note([0], "generate", "score", "score").endswith(
        "for every entry that generates. 2 entries read prompts alone, whose lengths are known."
    )
    assert note([0], "generate", "metric").endswith("for 1 of 2 entries that generate.")
    assert note([], "generate", "metric").startswith("These tasks were never measured")


def fit(config, told_gib, *, nodes=1, engines_per_node=0, on="local", **spec):
    manifest = ModelManifest(
        source="/m",
        form="dcp",
        files=[],
        chunks=[],
        hf_config={"config.json": json.dumps(config).encode()},
    )
    how = EvaluateOptions(
        engine=EngineSpec(**spec), nodes=nodes, engines_per_node=engines_per_node, on=on
    )
    return fit_of(Planned(suite=SUITE, model="m", manifest=manifest, options=how), told_gib)


def test_the_target_is_as_told():
    with pytest.raises(
        BadUse, match=r"1 x 80.0 GiB of memory hold 72.0 GiB of it. Use --engine vllm --tp 2"
    ):
        fit(LLAMA_70B, 80)
    assert "GiB of weights in 2 x 80.0 GiB of a GPU: room for" in fit(
        LLAMA_70B, 80, kind="vllm", tensor_parallel=2
    )
    assert fit(LLAMA_70B, None, kind="vllm", on="slurm").startswith(
        "Whether the model fits is not known"
    )


def test_an_engine_on_a_cpu_needs_the_nodes_memory():
    with pytest.raises(BadUse, match=r"1 x 100.0 GiB of memory .* Use fewer engines a node"):
        fit(LLAMA_70B, 200, device="cpu", engines_per_node=2)
    assert "200.0 GiB of a node's memory: room for" in fit(
        LLAMA_70B, 200, device="cpu", engines_per_node=1
    )
    here_gib = psutil.virtual_memory().total / 2 / 2**30
    assert f"1 x {here_gib:.1f} GiB of a node's memory: room for" in fit(
        SMALL, None, device="cpu", nodes=2
    )
    with pytest.raises(BadUse, match="its weights"):
        fit(SMALL | {"num_hidden_layers": 10**9}, None, device="cpu")
    assert fit(SMALL, None, device="cpu", on="slurm").startswith(
        "Whether the model fits is not known"
    )


def counted(**how):
    spec = {"tensor_parallel": how.pop("tensor_parallel", 1), **how.pop("spec", {"kind": "vllm"})}
    options = EvaluateOptions(engine=EngineSpec(**spec), **how)
    return engines_per_node_of(Planned(suite=SUITE, model="m", manifest=None, options=options))


def test_engines_are_counted_as_a_live_node_counts_them(monkeypatch):
    for gpus, tensor_parallel, engines_per_node in itertools.product(
        (0, 1, 2, 7, 8), (1, 2, 4), (0, 3)
    ):
        how = {"tensor_parallel": tensor_parallel, "engines_per_node": engines_per_node}
        monkeypatch.setattr(forecast, "gpu_count", lambda gpus=gpus: gpus)
        config = CoordinatorConfig(
            evaluation_id="e", suite=SUITE, spec=EngineSpec(kind="vllm", tensor_parallel=tensor_parallel),
            engines_per_node=engines_per_node, nodes=1, folder="", journals="",
        )  # fmt: skip
        report = NodeReport(host="h", cores=2, memory_bytes=1, gpus=gpus, store="")
        if gpus == 0 or gpus >= tensor_parallel:
            assert counted(**how)[0] == Orders(config, FakeClock(), {}, {}).engines_of(report)
    assert counted() == (8, "8 engines on each node, by this machine's 8 GPUs.")
    assert counted(engines_per_node=3) == (3, "")
    monkeypatch.setattr(forecast, "gpu_count", lambda: 0)
    assert counted() == (1, "")


def test_engines_on_other_machines_are_assumed_and_it_is_said(monkeypatch):
    monkeypatch.setattr(forecast, "gpu_count", lambda: 8)  # not theirs
    assert counted(on="slurm", tensor_parallel=2) == (
        1,
        "1 engine on each node, for the 2 GPUs that were requested.",
    )
    assert counted(on="slurm", spec={}) == (
        1,
        "1 engine on each node is assumed, since its GPUs are unknown. Give --engines-per-node.",
    )
    assert counted(on="ray", engines_per_node=4) == (4, "")


def test_a_plan_has_so_many_engines(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "gpu_count", lambda: 4)
    monkeypatch.setattr(forecast, "describe_model", lambda *_: None)
    made = plan(
        SUITE, "m", options=options(tmp_path, engine=EngineSpec(kind="vllm", mode="free"), nodes=2)
    )
    assert made.evaluation.engines == 8
    assert "4 engines on each node, by this machine's 4 GPUs." in made.notes


def test_engines_that_need_no_gpu_are_one_a_node(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "gpu_count", lambda: 4)
    assert plan(SUITE, "m", options=options(tmp_path, nodes=2)).evaluation.engines == 2


def test_a_batch_that_does_not_fit_is_said():
    assert "give --max-batch" not in fit(LLAMA_70B, 200, device="cpu", mode="exact")
    assert "A batch may have 32: give --max-batch" in fit(LLAMA_70B, 200, device="cpu", mode="free")
    assert "give --max-batch" not in fit(LLAMA_70B, 200, device="cpu", mode="free", max_batch=2)


def test_no_memory_at_all_is_refused(tmp_path):
    with pytest.raises(BadUse, match="device_memory_gib is 0"):
        plan(SUITE, "m", options=options(tmp_path), device_memory_gib=0.0)
