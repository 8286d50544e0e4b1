"""Every command answers in JSON, and so does every error of every command."""

import ast
import json
import sys
from pathlib import Path

import jsonschema
import pytest

import json_schemas
from holdfast.cli import output
from holdfast.cli.main import COMMANDS, asks_for_json, cli, main


def leaves(group, *names):
    """Yield the words of every command below a group, with the command."""
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    for name, command in commands.items():
        if hasattr(command, "list_commands"):
            yield from leaves(command, *names, name)
        else:
            yield (*names, name), command


EVERY = dict(leaves(cli))


def ran(monkeypatch, capsys, *words):
    """Run the program in this process; return its exit code, standard output and errors."""
    monkeypatch.setattr(sys, "argv", ["holdfast", *words])
    with pytest.raises(SystemExit) as left:
        main()
    out, err = capsys.readouterr()
    return left.value.code, out, err


def test_the_walk_meets_all_commands():
    assert {words[0] for words in EVERY} == set(COMMANDS)
    assert ("rules", "good", "add") in EVERY


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_takes_json_and_answers_a_wrong_use_with_the_error_object(
    words, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path))
    names = {name for parameter in EVERY[words].params for name in parameter.opts}
    assert "--json" in names
    code, out, err = ran(monkeypatch, capsys, *words, "--json", "--no-such-option")
    assert (code, err) == (2, "")
    said = json_schemas.check(json.loads(out))
    assert said["schema"] == "holdfast.error"
    if words != ("eval", "lm_eval"):  # whose options are those of lm-eval's own parser
        assert "--no-such-option" in said["error"]["message"]
        assert said["error"]["next_step"].endswith("--help")


FAILURES = {
    "runs show nope": "lists those there are",
    "runs stop nope": "lists those there are",
    "runs approve nope": "lists those there are",
    "runs rm nope": "lists those there are",
    "runs report nope": "lists those there are",
    "run": "holdfast run -- python train.py",
    "explain": "Start one",
    "logs": "Start one",
    "incidents show": "Start one",
    "incidents confirm 7": "holdfast incidents ls",
    "incidents correct 7 --reason KeyError": "holdfast incidents ls",
    "nodes return nope": "",
    "nodes cordon n --why \n": "Give one line",
    "rules show nope": "lists those there are",
    "rules withdraw nope": "",
    "rules check /nope": "",
    "rules good add /nope": "Give",
    "checkpoint ls": "Start one",
    "checkpoint ls /nope": "Give the folder",
    "checkpoint verify": "Start one",
    "checkpoint show": "Start one",
    "checkpoint prune /nope --last 1": "Give the folder",
    "profile report nope": "",
    "profile record": "",
    "trace report /nope": "",
    "trace check /nope": "",
    "trace query SELECT /nope": "",
    "simulate cluster /nope": "",
    "ledger downgrade 0001": "--ledger URL",
    "plan nope": "lists those there are",
    "eval show nope": "holdfast eval ls",
    "eval why nope": "holdfast eval ls",
    "eval compare": "lists the evaluations",
    "diagnose /nope": "Give a log file",
}


@pytest.mark.parametrize("line", FAILURES)
def test_a_failure_is_the_same_in_json_as_in_words(line, monkeypatch, capsys, tmp_path):
    """The same exit code, the same sentences; nothing else is printed."""
    monkeypatch.setenv("HOLDFAST_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    words = line.split(" ")
    code, out, err = ran(monkeypatch, capsys, *words)
    assert (code, out) == (2, "")
    code_too, out, nothing = ran(monkeypatch, capsys, *words, "--json")
    assert (code_too, nothing) == (code, "")
    said = json_schemas.check(json.loads(out))["error"]
    assert f"holdfast: {said['message']} {said['next_step']}".rstrip() == err.rstrip()
    assert FAILURES[line] in said["next_step"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["runs", "ls", "--json"], True),
        (["diagnose", "--each", "log"], True),
        (["run", "--", "python", "train.py", "--json"], False),
        (["run", "--json", "--", "python", "train.py"], True),
        (["runs", "ls"], False),
    ],
)
def test_what_the_users_own_command_takes_is_not_holdfasts(words, expected):
    assert asks_for_json(words) is expected


def test_an_interrupt_is_an_object_too(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    code, out, err = ran(monkeypatch, capsys, "runs", "ls", "--json")
    assert (code, err) == (130, "")
    assert json_schemas.check(json.loads(out))["error"]["message"] == "Interrupted."


def printed_names():
    """Return the name of each schema that a module of the command line prints."""
    for path in Path(output.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print_json":
                assert isinstance(node.args[0], ast.Constant | ast.Name), path
                if isinstance(node.args[0], ast.Constant):
                    yield f"holdfast.{node.args[0].value}"


def test_every_answer_has_a_published_schema_and_every_schema_an_answer():
    assert set(printed_names()) == set(json_schemas.published())


def test_a_key_that_no_schema_names_is_found():
    row = {"schema": "holdfast.withdraw", "version": 1, "id": "r"}
    json_schemas.check(row)
    with pytest.raises(jsonschema.ValidationError, match="more"):
        json_schemas.check({**row, "more": 1})
    with pytest.raises(jsonschema.ValidationError, match="'id' is a required property"):
        json_schemas.check({"schema": "holdfast.withdraw", "version": 1})


def test_a_demo_that_is_stopped_answers_with_an_error(monkeypatch, capsys, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from holdfast import demo

    class Stopped:
        save_every = 12

        def __init__(self, **_):
            pass

        def run(self, _observe):
            return None

    monkeypatch.setattr(demo, "Demonstration", Stopped)
    monkeypatch.chdir(tmp_path)
    code, out, err = ran(monkeypatch, capsys, "demo", "--json")
    assert (code, err) == (4, "")
    assert "demo-report" in json_schemas.check(json.loads(out))["error"]["next_step"]
