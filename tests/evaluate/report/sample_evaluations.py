"""Make an evaluation with a random timeline, for the tests of reports."""

import random

from holdfast.evaluate.policy import account
from holdfast.evaluate.types.evaluation import BoundTerm, Evaluation, PathStep
from holdfast.evaluate.types.scores import scores_of
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    JudgeSpan,
    Line,
    MetricSpan,
    NodeSpan,
    RequestSpan,
    Timeline,
    timeline_of,
)

RESULTS = {
    "results": {
        "mmlu": {"alias": "mmlu", "acc,none": 0.5, "acc_stderr,none": 0.01, "sample_len": 200},
        "mmlu_a": {
            "alias": "a", "acc_norm,none": 0.45, "acc_norm_stderr,none": 0.021, "acc,none": 0.4,
            "acc_stderr,none": 0.02, "sample_len": 100,
        },
        "mmlu_b": {"alias": "b", "acc,none": 0.6, "acc_stderr,none": 0.02, "sample_len": 100},
        "gsm8k": {
            "alias": "gsm8k", "exact_match,strict-match": 0.31, "exact_match_stderr,strict-match": 0.012,
            "exact_match,flexible-extract": 0.33, "exact_match_stderr,flexible-extract": 0.0129, "sample_len": 1319,
        },
        "wikitext": {"alias": "wiki<b>text", "word_perplexity,none": 12.3456, "word_perplexity_stderr,none": "N/A"},
    },
    "groups": {"mmlu": {"alias": "mmlu", "acc,none": 0.5, "acc_stderr,none": 0.01}},
    "group_subtasks": {"mmlu": ["mmlu_b", "mmlu_a"]},
    "versions": {"gsm8k": 3, "mmlu": 2, "mmlu_a": 1.0, "mmlu_b": 1.0, "wikitext": 2},
    "n-shot": {"gsm8k": 5, "mmlu": 0, "mmlu_a": 0, "mmlu_b": 0, "wikitext": 0},
    "higher_is_better": {
        "gsm8k": {"exact_match": True}, "wikitext": {"word_perplexity": False}, "mmlu": {"acc": True},
        "mmlu_a": {"acc": True, "acc_norm": True},
    },
    "n-samples": {"wikitext": {"original": 62, "effective": 62}},
    "configs": {},
}  # fmt: skip
"""As lm-eval has them: a group of two tasks, two filters, a metric without a standard error."""
NUMERICS = "hf exact float32 cpu torch 2.13"
WHY_NOT = "Its metric raised ValueError: bad <doc> 3. Look at logs/humaneval.log."


def made_lines(
    *, engines: int = 4, samples: int = 120, tasks: int = 9, seed: int = 0
) -> list[Line]:
    """Make lines of engines that load, answer samples in turn, and end at different times."""
    draw = random.Random(seed)
    names = [f"task_{number}" if number else "first<script>" for number in range(tasks)]
    lines: list[Line] = [Begin(started_at_s=1.79e9, suite="nightly", tasks=names)]
    free_s = [draw.uniform(8, 9) for _ in range(engines)]
    loaded_s = list(free_s)
    lines += [
        EngineSpan(what="load", engine=e, node=e // 2, t0=0.5, t1=free_s[e]) for e in range(engines)
    ]
    lines += [
        NodeSpan(what="fetch", node=n, t0=0.5, t1=4.0 + n, remote_bytes=10**9)
        for n in range((engines + 1) // 2)
    ]
    for sample in range(samples):
        engine = min(range(engines), key=free_s.__getitem__)
        task, took_s, t0 = (
            int(draw.paretovariate(0.7)) % tasks,
            draw.expovariate(0.5) + 0.1,
            free_s[engine],
        )
        for _ in range(draw.choice((1, 1, 4))):
            t1 = t0 + took_s * draw.uniform(0.7, 1)
            lines.append(
                RequestSpan(engine=engine, task=task, sample=sample, new_tokens=20, t0=t0, t1=t1)
            )
        free_s[engine] = t0 + took_s * draw.uniform(0.8, 1.2)
        if task % 3 == 0:
            lines.append(
                MetricSpan(
                    node=engine // 2, task=task, sample=sample, t0=t0 + took_s, t1=t0 + took_s + 1
                )
            )
        if task == 4:
            lines.append(
                JudgeSpan(task=task, sample=sample, t0=t0 + took_s, t1=t0 + took_s + 3, waited_s=1)
            )
    end_s = max(free_s) + 4
    lines.append(EngineSpan(what="swap", engine=1, node=0, model=1, t0=free_s[1], t1=free_s[1] + 1))
    lines += [
        EngineSpan(what="serve", engine=e, node=e // 2, t0=loaded_s[e], t1=end_s)
        for e in range(engines)
    ]
    lines.append(End(state="done", t1=end_s))
    return lines


def made_evaluation(
    timeline: Timeline, folder: str = "/somewhere/e-1", **other: object
) -> Evaluation:
    """Make an evaluation that fits a timeline, with an invented account and bound."""
    engine_seconds = 1000.0
    fields: dict[str, object] = {
        "id": "e-1",
        "suite": "nightly",
        "model": "/models/llama-7b/step_12000",
        "started_at_s": 1.79e9,
        "results": RESULTS,
        "scores": scores_of(RESULTS),
        "errors": {"humaneval": WHY_NOT},
        "makespan_s": timeline.makespan_s,
        "bound": (
            BoundTerm(name="sample", seconds=12.0),
            BoundTerm(name="engines", seconds=timeline.makespan_s / 1.08),
            BoundTerm(name="storage", seconds=6.0, detail="2 GB at 350 MB/s"),
        ),
        "engines": 4,
        "nodes": 2,
        "engine_seconds": engine_seconds,
        "account": {
            account.START: 80.0,
            account.USEFUL: 800.0,
            account.TAIL_SAMPLE: 60.0,
            account.UNDERFILLED: 50.0,
            account.SWAP: 10.0,
        },
        "critical_path": (
            PathStep(what="load", t0=0, t1=8.5),
            PathStep(what="answer", t0=8.5, t1=60, detail="task_1"),
        ),
        "samples": 120,
        "requests": 240,
        "reused": 30,
        "remote_bytes": 2 * 10**9,
        "digest": "abc123",
        "numerics": NUMERICS,
        "mode": "exact",
        "harness_versions": {"lm-eval": "0.4.13"},
        "folder": folder,
        **other,
    }
    return Evaluation(**fields)  # type: ignore[arg-type]


def made_timeline(**how: int) -> Timeline:
    """Return the timeline of `made_lines`."""
    return timeline_of(made_lines(**how))
