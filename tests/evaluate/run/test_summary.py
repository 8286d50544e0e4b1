"""Check the result of an evaluation, from its files."""

import msgspec
import pytest

from holdfast.core.paths import EvaluationPaths
from holdfast.evaluate.coordinator.config import CoordinatorFiles
from holdfast.evaluate.metrics.judge.journal import JudgeJournal, journal_of
from holdfast.evaluate.policy import account
from holdfast.evaluate.run.options import EvaluateOptions, JudgeLimits
from holdfast.evaluate.run.summary import summarize, write_slice
from holdfast.evaluate.types.engine import Curve
from holdfast.evaluate.types.suite import Suite, TaskEntry
from holdfast.evaluate.types.timeline import (
    Begin,
    End,
    EngineSpan,
    MetricSpan,
    ModelSpan,
    NodeSpan,
    RequestSpan,
    TimelineFile,
    read_timeline,
)

SUITE = Suite(name="s", entries=(TaskEntry(name="t"),))
CURVE = Curve(
    prefill_tokens_per_s=1000.0, request_s=0.0, step_base_s=1.0, step_sequence_s=0.5, max_batch=2
)


@pytest.fixture
def paths(tmp_path):
    paths = EvaluationPaths(tmp_path, "e")
    with TimelineFile(paths.timeline) as writer:
        writer.append(
            Begin(started_at_s=1000.0, suite="s", tasks=["t"]),
            NodeSpan(what="fetch", node=0, t0=0.0, t1=2.0, remote_bytes=100),
            EngineSpan(what="load", engine=0, node=0, t0=0.0, t1=5.0),
            EngineSpan(what="serve", engine=0, node=0, t0=5.0, t1=200.0),
            RequestSpan(engine=0, task=0, sample=0, new_tokens=2, t0=6.0, t1=9.0),
            MetricSpan(node=0, task=0, sample=0, t0=9.0, t1=199.0),
            End(state="done", t1=200.0),
        )
    CoordinatorFiles(paths.root).folder.mkdir()
    CoordinatorFiles(paths.root).curve.write_bytes(msgspec.json.encode(CURVE))
    return paths


def terms_and_account(paths, **changes):
    found = summarize(SUITE, "m", paths, {}, None, EvaluateOptions(metric_slots=1, **changes))
    return {term.name: term.seconds for term in found.bound}, found.account


def test_a_run_has_its_bound_and_where_the_rest_went(paths):
    terms, spent = terms_and_account(paths)
    assert terms == {"engines": 7.0, "sample": 198.0, "metrics": 198.0, "storage": 8.0}
    assert spent[account.WEIGHTS] == 2.0
    assert spent[account.START] == 3.0
    assert spent[account.TAIL_METRIC] == 191.0


def test_what_the_judge_was_asked_is_found_in_its_journal(paths):
    paths.answers.mkdir()
    journal = JudgeJournal(journal_of("http://j/v1", paths.answers), "run")
    for number in range(100):
        journal.reserve(1010.0 + number, number, 500, 1)
        journal.settle(1011.0 + number, number, 50, 1)
    journal.close()
    terms, spent = terms_and_account(
        paths, judge=JudgeLimits(url="http://j/v1", requests_per_minute=30.0)
    )
    assert terms["judge"] == 140.0, "30 at once, and 70 at 30 a minute"
    assert terms["sample"] == 5.0 + 3.0 + 1.0
    assert spent[account.TAIL_JUDGE] == 101.0
    assert spent[account.TAIL_METRIC] == 90.0


def test_without_an_engine_there_is_no_bound(paths):
    CoordinatorFiles(paths.root).curve.unlink()
    assert terms_and_account(paths) == ({}, {})


def test_a_model_of_a_stream_begins_when_an_engine_turned_to_it(tmp_path):
    session, paths = EvaluationPaths(tmp_path, "stream"), EvaluationPaths(tmp_path, "second")
    with TimelineFile(session.timeline) as writer:
        writer.append(
            Begin(started_at_s=1000.0, suite="s", tasks=["t"]),
            EngineSpan(what="load", engine=0, node=0, model=0, t0=0.0, t1=5.0),
            NodeSpan(what="fetch", node=0, model=1, t0=6.0, t1=8.0, remote_bytes=100),
            EngineSpan(what="serve", engine=0, node=0, model=0, t0=5.0, t1=16.0),
            EngineSpan(what="swap", engine=0, node=0, model=1, t0=16.0, t1=17.0),
            RequestSpan(engine=0, model=1, task=0, sample=0, new_tokens=2, t0=17.0, t1=20.0),
            ModelSpan(model=0, name="a", t0=0.0, t1=21.0),
            ModelSpan(model=1, name="b", t0=0.5, t1=24.0),
        )
    whole = read_timeline(session.timeline)
    found = write_slice(whole, session, paths, 1)
    assert (found.begin.started_at_s, found.makespan_s) == (1016.0, 8.0)
    assert [(span.what, span.t0, span.t1) for span in found.engines] == [
        ("swap", 0.0, 1.0),
        ("serve", 1.0, 8.0),
    ]
    assert [(span.t0, span.t1) for span in found.requests] == [(1.0, 4.0)]
    spent = account.account(found, CURVE).seconds
    assert (spent[account.SWAP], spent[account.ABSENT], spent[account.TAIL_METRIC]) == (
        1.0,
        0.0,
        4.0,
    )
    first = write_slice(whole, session, paths, 0)
    assert (first.begin.started_at_s, first.makespan_s) == (1000.0, 21.0), (
        "the first begins when it was added"
    )
