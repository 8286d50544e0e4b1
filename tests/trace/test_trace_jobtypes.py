"""Check types assigned by names, sizes, durations and users, and the errors in files of rules."""

import duckdb
import pytest

from holdfast.core.errors import BadUse
from holdfast.trace.clusters import Cluster
from holdfast.trace.jobtypes import Rule, Rules, add_types, read_rules
from holdfast.trace.sources.reading import Reading

COLUMNS = ("cluster", "name", "username", "gpu_num", "run_s")


def told(rows, rules=None):
    """Return (type, type_rule) of jobs given as (name, user, GPUs, run seconds)."""
    connection = duckdb.connect()
    connection.execute(
        "CREATE TABLE jobs_0 (cluster VARCHAR, name VARCHAR, username VARCHAR, gpu_num DOUBLE, run_s DOUBLE)"
    )
    connection.executemany("INSERT INTO jobs_0 VALUES ('C', ?, ?, ?, ?)", rows)
    reading = Reading(
        table="jobs_0", columns=frozenset(COLUMNS), clusters=(Cluster(name="C", source="slurm"),)
    )
    reading = add_types(connection, reading, rules or read_rules())
    assert {"type", "type_rule"} <= reading.columns
    return connection.execute("SELECT type, type_rule FROM jobs_0 ORDER BY rowid").fetchall()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eval-7b-mmlu", "Evaluation"),
        ("runEval2", "Evaluation"),
        ("medieval-corpus-x", None),
        ("LlamaPretrain_v3", "Pretrain"),
        ("sft_eval_chat", "Evaluation"),
        ("lora-13b", "SFT"),
        ("llava stage1", "MLLM"),
        ("pretrain_debug", "Debug"),
        ("vllm-serving", "Other"),
        ("tokenize shard 3", "Other"),
        ("x", None),
        ("", None),
    ],
)
def test_a_name_tells_the_type(name, expected):
    assert told([(name, "u", 1, 60)]) == [(expected, "name" if expected else None)]


def test_a_large_long_job_without_a_telling_name_is_a_guess():
    assert told([("run42", "u", 64, 7200), ("run42", "u", 64, 7199), ("run42", "u", 63, 7200)]) == [
        ("Pretrain", "guess"),
        (None, None),
        (None, None),
    ]


def test_a_users_habit_tells_the_rest_of_his_jobs_within_their_sizes():
    rules = Rules(rules=read_rules().rules, habit_jobs=4, habit_share=0.8)
    jobs = [("eval", "ann", size, 60) for size in (1, 2, 4, 8)] + [("sft", "ann", 8, 60)]
    rest = [("x", "ann", 8, 60), ("x", "ann", 16, 60), ("x", "bob", 8, 60)]
    assert told(jobs + rest, rules)[-3:] == [("Evaluation", "habit"), (None, None), (None, None)]
    # With one more job of another type, no type is four fifths of the user's jobs.
    assert told([*jobs, ("sft", "ann", 8, 60), *rest], rules)[-3] == (None, None)


def test_a_trace_that_has_types_keeps_them():
    reading = Reading(table="t", columns=frozenset({*COLUMNS, "type"}), clusters=())
    assert add_types(duckdb.connect(), reading, read_rules()) is reading


def test_nothing_is_guessed_of_a_trace_without_names():
    reading = Reading(table="t", columns=frozenset({"cluster", "gpu_num", "run_s"}), clusters=())
    assert add_types(duckdb.connect(), reading, read_rules()) is reading


def test_text_of_a_rule_cannot_leave_its_quotes():
    rules = Rules(
        rules=(Rule(type="Debug", users=("o'brien'; DROP TABLE jobs_0; --",)),), habit_jobs=None
    )
    assert told([("x", "o'brien'; DROP TABLE jobs_0; --", 1, 1), ("x", "u", 1, 1)], rules) == [
        ("Debug", "user"),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rules: 3", "no list `rules`"),
        ("rules: [{type: Lunch, words: [a]}]", "'Lunch'"),
        ("rules: [{type: SFT, wrods: [a]}]", "'wrods'"),
        ("rules: [{type: SFT, words: a}]", "list of texts"),
        ("rules: [{type: SFT, words: ['a|b']}]", "not a word"),
        ("rules: [{type: SFT, min_gpus: many}]", "must be a number"),
        ("rules: [{type: SFT}]", "no condition"),
        ("rules: [SFT]", "rule 1 is not a mapping"),
        ("rules: []\nhabit: {jobs: few}", "`habit`"),
        ("rules: [", "line 1"),
    ],
)
def test_a_mistake_in_a_file_of_rules_is_named(tmp_path, text, named):
    path = tmp_path / "types.yaml"
    path.write_text(text)
    with pytest.raises(BadUse, match=r"types\.yaml") as error:
        read_rules(path)
    assert named in str(error.value)
