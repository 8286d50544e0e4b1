"""Show what `holdfast diagnose` answers people and programs, how its options act, and what it costs."""

import contextlib
import gzip
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from diagnose_calls import answer, holdfast

from holdfast.cli import progress
from holdfast.cli.diagnosis_view import ACTIONS, at_fault, ranges
from holdfast.core.errors import BadUse, HoldfastError
from holdfast.diagnose import diagnose, study
from holdfast.diagnose.rules.packaged import packaged_rules
from holdfast.diagnose.rules.taxonomy import CATEGORIES
from holdfast.testing.model_endpoint import ModelServer, Words

RULES = """
order: 1
hot: [flux capacitor]
defaults:
  kind: exception
  action: user_must_fix
  restart_helps: false
  mitigation: Charge it.
  confidence: 0.95
  source: ours
rules:
  - id: flux
    pattern: 'flux capacitor (?:empty|dry)'
    reason: OSError
    match: ["flux capacitor empty"]
    no_match: ["flux capacitor full"]
"""


# What it answers


def test_the_answer_is_that_of_the_library(job):
    found = answer(job)
    assert found == diagnose(job).to_json()
    assert (found["reason"], found["scope"], found["restart_helps"]) == (
        "KeyError",
        {"rank": 1},
        False,
    )
    assert found["root_line"] == {
        "file": str(job / "rank-1.log"),
        "line": 45,
        "text": "KeyError: 'warmup'",
    }


def test_real_answers_are_as_the_schema_says(job, log, tmp_path, schema):
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "gpu.log").write_text(
        "[  12.5] NVRM: Xid (PCI:0000:4e:00): 79, pid=7, GPU has fallen off the bus.\n"
    )
    said = [
        answer(job, "--explain", "--compressed"),
        *map(
            json.loads,
            holdfast(
                "--each", log, tmp_path / "*.log", tmp_path / "missing", "--explain"
            ).splitlines(),
        ),
    ]
    assert len(said) == 5
    for one in said:
        jsonschema.validate(one, schema, cls=jsonschema.Draft202012Validator)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**said[0], "action": "pray"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            {key: value for key, value in said[0].items() if key != "scope"}, schema
        )


def test_the_schema_knows_every_key_reason_and_action(job, schema):
    known = schema["$defs"]["answer"]
    optional = {"path", "candidates", "compressed"}
    assert (
        set(known["properties"]) - optional
        == set(answer(job))
        == {"schema", "version", *known["required"]}
    )
    assert set(schema["$defs"]["reason"]["enum"]) == set(CATEGORIES)
    assert set(known["properties"]["action"]["enum"]) == set(ACTIONS)


def test_the_person_is_told_the_cause_the_place_and_the_step(job):
    said = holdfast(job)
    lines = said.splitlines()
    assert lines[0].endswith("KeyError: 'warmup'.")
    assert "reason    KeyError (Script), confidence" in said
    assert "at fault  rank 1" in said
    assert (
        "Fix the program or its input first (user_must_fix; a restart alone does not help)." in said
    )
    root = next(line for line in lines if line.lstrip().startswith(">"))
    assert root.split() == [">", "45", "KeyError:", "'warmup'"]
    around = lines[lines.index(root) - 5 : lines.index(root)]
    assert [line.split()[0] for line in around] == ["40", "41", "42", "43", "44"]
    assert any("x 63 ranks" in line and "Connection closed by peer" in line for line in lines)


def test_a_cause_that_nobody_knows_is_answered_too(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2\nbye\n")
    said = holdfast(log)
    assert said.startswith("The job still runs, as far as its log goes.\n")
    assert "--compressed" in said
    assert (answer(log)["reason"], answer(log)["action"]) == ("Unknown", "none")
    log.write_text("step 1 loss 2\ncontainer trainer exited with code 7\n")
    said = holdfast(log)
    assert said.startswith("No cause was found.\n") or "exited with code 7" in said
    assert "the logs do not say" in said


def test_explain_gives_the_sums(job):
    said = holdfast(job, "--explain")
    assert "Each line that may have begun the failure is scored" in said
    assert "that it began by itself" in said
    first, *others = answer(job, "--explain")["candidates"]
    assert (first["reason"], first["line"]) == ("KeyError", 45)
    assert others, "the lost peers are candidates too"
    assert all(one["cost"] >= first["cost"] for one in others)
    assert first["cost"] == pytest.approx(
        first["alone"] + first["end"] + sum(one["cost"] for one in first["others"]), abs=0.01
    )
    assert {one["how"] for one in first["others"]} == {"follows"}


def test_compressed_prints_the_lines_that_matter_and_nothing_else(job, log):
    said = holdfast(log, "--compressed")
    assert "45: KeyError: 'warmup'" in said
    assert "reason" not in said
    assert answer(log, "--compressed")["compressed"] == said
    assert "--compressed prints the lines alone" in holdfast(
        log, "--compressed", "--explain", fails=BadUse
    )


def test_a_run_that_ended_well_is_said_first_and_nothing_is_to_do(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2\nKeyError: 'a'\nTraining complete!\ntorchrun exit code: 0\n")
    said = holdfast(log)
    assert said.startswith("The job ended well: nothing to do.\n")
    assert "completed (line 4: torchrun exit code: 0)" in said
    assert "restart" not in said
    found = answer(log)
    assert (found["outcome"], found["action"], found["id"]) == ("completed", "none", None)
    assert found["end_line"]["line"] == 4


def test_only_what_failed_is_remembered_and_has_an_id(log, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    done = tmp_path / "done.log"
    done.write_text("step 1 loss 2\nTraining complete!\n")
    assert answer(done, "--remember")["id"] is None
    assert answer(log, "--remember")["id"] == "m1"


# Several jobs


def test_each_path_is_a_job_of_its_own_and_a_missing_one_does_not_stop_the_rest(log, tmp_path):
    binary = tmp_path / "weights.log"
    binary.write_bytes(bytes(range(8)) * 4000)
    said = [
        json.loads(line)
        for line in holdfast("--each", tmp_path / "missing", log, binary).splitlines()
    ]
    assert [one["path"] for one in said] == [str(tmp_path / "missing"), str(log), str(binary)]
    assert [one.get("reason") for one in said] == [None, "KeyError", None]
    assert "There is no log" in said[0]["error"]["message"]
    assert said[0]["error"]["next_step"] == "Give a log file, or the folder of the job's logs."
    assert "binary" in said[2]["error"]["message"]
    assert {(one["schema"], one["version"]) for one in said} == {("holdfast.diagnosis", 2)}


def test_each_takes_the_matches_of_a_pattern_apart(job):
    said = [json.loads(line) for line in holdfast("--each", job / "rank-[0-3].log").splitlines()]
    assert [one["path"] for one in said] == [str(job / f"rank-{rank}.log") for rank in range(4)]
    assert [one["reason"] == "KeyError" for one in said] == [False, True, False, False]


def test_each_fails_where_nothing_could_be_answered(tmp_path):
    assert json.loads(holdfast("--each", tmp_path / "missing", code=2))["error"]


def test_each_of_one_folder_is_one_job(job):
    (said,) = map(json.loads, holdfast("--each", job).splitlines())
    assert {key: value for key, value in said.items() if key != "path"} == answer(job)


# Options


def test_rules_of_ones_own_decide(tmp_path):
    log, rules = tmp_path / "job.log", tmp_path / "rules"
    rules.mkdir()
    log.write_text("the flux capacitor empty\n")
    (rules / "ours.yaml").write_text(RULES)
    found = answer(log, "--rules", rules)
    assert (found["reason"], found["decided_by"]) == ("OSError", ["flux"])
    assert answer(log)["reason"] == "Unknown"


def test_the_rules_of_the_guide_work(tmp_path):
    guide = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text()
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "ours.yaml").write_text(
        guide.partition("```yaml\n")[2].partition("```")[0]
    )
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2\nFluxFS: lost connection to store-7\n")
    found = answer(log, "--rules", tmp_path / "rules")
    assert (found["reason"], found["scope"], found["decided_by"]) == (
        "S3StorageError",
        {"node": "store-7"},
        ["fluxfs-lost"],
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            '["flux capacitor empty"]',
            '["flux capacitor gone"]',
            "does not match 'flux capacitor gone'",
        ),
        ("hot: [flux capacitor]", "hot: [other]", "add a word of the line to `hot`"),
        ('["flux capacitor full"]', '["flux capacitor dry"]', "which it should not"),
        ('["flux capacitor empty"]', '["Segmentation fault flux capacitor dry"]', ""),
        ("reason: OSError", "reason: Oops", "reason is 'Oops'"),
    ],
)
def test_a_broken_rule_of_ones_own_is_named(log, tmp_path, old, new, said):
    (tmp_path / "ours.yaml").write_text(RULES.replace(old, new))
    if said:
        told = holdfast(log, "--rules", tmp_path, fails=BadUse)
        assert said in told
        assert "ours.yaml: rule flux" in told
    else:
        holdfast(log, "--rules", tmp_path)


def test_a_folder_without_rules_is_bad_use(log, tmp_path):
    assert "There are no rules in" in holdfast(log, "--rules", tmp_path / "none", fails=BadUse)


def test_a_model_must_be_named_before_it_is_asked(log, monkeypatch):
    monkeypatch.delenv("HOLDFAST_LLM_URL", raising=False)
    assert "HOLDFAST_LLM_URL" in holdfast(log, "--model", fails=HoldfastError)


def test_remember_shows_what_is_like_it_the_second_time(log, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    assert answer(log)["similar"] == []
    assert not (tmp_path / "home").exists(), "without --remember nothing is written"
    assert answer(log, "--remember")["similar"] == []
    other = tmp_path / "rank-3.log"
    other.write_text("step 7 loss 1\n" + log.read_text())
    said = holdfast(other, "--remember")
    assert "Seen before" in said
    (like,) = answer(log, "--remember")["similar"][:1]
    assert (like["reason"], like["root"]) == ("KeyError", "KeyError: 'warmup'")


def test_the_model_is_asked_about_what_rules_leave_open_and_only_then(
    log, tmp_path, monkeypatch, schema
):
    puzzle = tmp_path / "job.log"
    puzzle.write_text("step 1 loss 2.0\nthe flux capacitor is dry on shelf 3\n")
    with ModelServer(lambda _: Words("I cannot say.")) as server:
        monkeypatch.setenv("HOLDFAST_LLM_URL", server.url)
        monkeypatch.setenv("HOLDFAST_LLM_MODEL", "stub")
        rules_alone = answer(log)
        assert answer(log, "--model") == rules_alone
        answer(puzzle)
        assert not server.asked, "neither a case that is decided, nor without --model"
        found = answer(puzzle, "--model")
        assert server.asked
    assert "flux capacitor" in server.asked[0].text
    assert found["reason"] == "Unknown"
    assert any("stub" in note for note in found["notes"])
    jsonschema.validate(found, schema, cls=jsonschema.Draft202012Validator)


# How it looks and what it costs


def on_terminal(arguments, columns):
    """Return the text that a terminal of so many columns shows."""
    main, other = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", "diagnose", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=other, stderr=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        os.close(other)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while data := os.read(main, 65536):
                shown += data
        assert process.wait(30) == 0, process.stderr.read()
    os.close(main)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 200])
def test_it_keeps_to_the_width_of_the_terminal(job, columns):
    shown = on_terminal([job, "--explain"], columns)
    assert "KeyError: 'warmup'" in shown
    assert max(map(len, shown.splitlines())) <= columns


def test_help_and_options_import_nothing_heavy():
    script = (
        "import sys\nfrom holdfast.cli.main import cli\ncli.get_command(None, 'diagnose')\n"
        "print(sorted({'torch', 'sqlalchemy', 'rich', 're2', 'psutil', 'yaml', 'httpx'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_progress_counts_bytes_against_the_size_of_plain_files(log, tmp_path):
    told = []
    packed = tmp_path / "rank-2.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    show = lambda what, done, total: told.append((what, done, total))  # noqa: E731
    study.study([str(log)], packaged_rules(), show)
    assert told[-1] == ("Reading", log.stat().st_size, log.stat().st_size)
    study.study([str(packed)], packaged_rules(), show)
    assert told[-1][0].startswith("Reading, ")
    assert told[-1][2] is None


def test_a_large_input_is_told_of_in_plain_lines(log, monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET_S", -1.0)
    with progress.shown() as show:
        study.study([str(log)], packaged_rules(), show)
    assert "Reading 100%" in capsys.readouterr().err


def test_the_words_for_who_is_at_fault():
    assert ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert ranges(range(0, 100, 2)).endswith(" …")
    scope = {"rank": [0, 1, 2], "node": "gn07", "gpu": ["0000:4e:00", "0000:b3:00"], "link": 4}
    assert at_fault(scope) == "ranks 0-2, node gn07, GPUs 0000:4e:00, 0000:b3:00, link 4"
    assert at_fault({}) == "the logs do not say"


def test_surroundings_of_a_line_beyond_the_first_block(tmp_path):
    path = tmp_path / "long.log"
    path.write_text("".join(f"line {number}\n" for number in range(1, 300_001)))
    assert path.stat().st_size > 3 << 20
    for at in (1, 2, 100_000, 149_999, 299_999, 300_000):
        root = study.LogLine(file=str(path), line=at, text=f"line {at}")
        found = study.surroundings(root, lambda *_: None)
        wanted = range(max(1, at - study.BEFORE), min(300_000, at + study.AFTER) + 1)
        assert found == [(number, f"line {number}") for number in wanted]
    other = study.LogLine(
        file=str(path), line=7, text="what stood there before the file was rotated"
    )
    assert study.surroundings(other, lambda *_: None) == []


def test_standard_input_that_is_no_file_is_kept_for_a_second_reading(monkeypatch):
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

    before = io.TextIOWrapper(Pipe(b"one\ntwo\n"))
    monkeypatch.setattr(sys, "stdin", before)
    with study.stdin_kept(lambda *_: None):
        assert sys.stdin.buffer.read() == b"one\ntwo\n"
        sys.stdin.buffer.seek(0)
        assert sys.stdin.buffer.read() == b"one\ntwo\n"
    assert sys.stdin is before
