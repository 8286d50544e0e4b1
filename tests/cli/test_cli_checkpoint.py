"""`holdfast checkpoint …`, over checkpoints that a Checkpointer and DCP alone wrote."""

import importlib.util
import json
import shutil
import subprocess
import sys
import warnings

import click
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

from holdfast.checkpoint import Checkpointer, inspect_checkpoint, scan
from holdfast.checkpoint.catalog.annotations import note_metrics, read_marks, want
from holdfast.cli.checkpoint_rules import policy_of
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, CheckpointError, HoldfastError, NotFound


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, keep=None) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(
                step,
                {"model": {"w": torch.full((4,), float(step))}, "n": step, "same": torch.ones(2)},
            )
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Steps 1 to 3."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def ran(*arguments):
    """Run a command; return its output and its exit code, and raise its errors."""
    result = CliRunner().invoke(cli, ["checkpoint", *map(str, arguments)], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout, result.return_value or 0


def ran_json(*arguments):
    printed, code = ran(*arguments, "--json")
    (line,) = printed.splitlines()
    return json.loads(line), code


def path_of(folder, step):
    return folder / f"step-{step:010}"


def damage(path):
    data = next(path.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    at = content.index(torch.ones(2).numpy().tobytes())
    content[at] ^= 1
    data.write_bytes(content)


def stock_save(path, state):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    return path


def test_ls_shows_the_marks(folder):
    ran("pin", path_of(folder, 1), "--why", "the paper's")
    want(path_of(folder, 1), "eval-7", now_s=1.0)
    note_metrics(path_of(folder, 1), {"loss": 0.125, "odd": float("nan")}, now_s=1.0)
    text, code = ran("ls", folder)
    assert code == 0
    assert "pinned (the paper's), wanted by eval-7, loss=0.125" in text
    said, _ = ran_json("ls", folder)
    assert (said["schema"], [one["step"] for one in said["checkpoints"]]) == (
        "holdfast.checkpoints",
        [3, 2, 1],
    )
    assert said["checkpoints"][0]["marks"] == {}
    marks = said["checkpoints"][2]["marks"]
    assert marks["pinned"]["why"] == "the paper's"
    assert marks["metrics"] == {"loss": 0.125, "odd": "nan"}


def test_verify_notes_what_it_found_and_leaves_with_1_where_one_is_damaged(folder):
    damage(path_of(folder, 2))
    said, code = ran_json("verify", folder)
    assert code == 1
    assert [one["state"] for one in said["checkpoints"]] == ["verified", "damaged", "verified"]
    assert "does not match its checksum" in said["checkpoints"][1]["marks"]["damaged"]["why"]
    assert "found damaged" in ran("ls", folder)[0]
    assert ran("verify", path_of(folder, 3))[1] == 0
    assert ran("verify", path_of(folder, 2))[1] == 1


def test_verify_of_what_dcp_alone_wrote(folder):
    stock_save(folder / "plain", {"t": torch.ones(2)})
    said, code = ran_json("verify", folder)
    assert code == 0
    assert (said["checkpoints"][-1]["state"], said["checkpoints"][-1]["step"]) == ("checked", None)
    assert [path.name for path in (folder / "plain").iterdir() if "marks" in path.name] == []
    torch.serialization.set_crc32_options(False)
    try:
        stock_save(folder / "step-0000000009", {"t": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    text, code = ran("verify", folder / "step-0000000009")
    assert code == 4
    assert "structure ok" in text
    damage(folder / "plain")
    assert ran("verify", folder)[1] == 1


def test_verify_of_one_that_lost_its_manifest(folder):
    (path_of(folder, 3) / "holdfast.json").unlink()
    shutil.copytree(path_of(folder, 3), folder / "copy")
    assert ran("verify", path_of(folder, 3))[1] == 1
    said, code = ran_json("verify", folder)
    assert code == 1
    assert [(one["step"], one["state"]) for one in said["checkpoints"]] == [
        (3, "incomplete"),
        (2, "verified"),
        (1, "verified"),
        (None, "damaged"),
    ]
    assert "there is no manifest" in said["checkpoints"][0]["reason"]
    assert "Holdfast wrote it, and its manifest is missing" in said["checkpoints"][-1]["reason"]
    text, code = ran("show", path_of(folder, 3))
    assert code == 0
    assert "incomplete (there is no manifest" in text
    text, code = ran("show", folder / "copy")
    assert code == 0
    assert "copy: without a manifest" in text


def test_show(folder):
    ran("pin", path_of(folder, 3))
    text, _ = ran("show", path_of(folder, 3))
    assert "step 3, " in text
    assert "1 rank, torch " in text
    assert "marks: pinned" in text
    assert "model.w" not in text
    rows = [line.split() for line in ran("show", path_of(folder, 3), "--tensors")[0].splitlines()]
    assert ["model.w", "float32", "[4]", "0.0"] in [row[:4] for row in rows]
    said, _ = ran_json("show", path_of(folder, 3))
    assert said["schema"] == "holdfast.checkpoint-contents"
    assert (said["step"], said["world_size"], said["state"]) == (3, 1, "written")
    assert "pinned" in said["marks"]
    entries = {one["entry"]: one for one in said["entries"]}
    assert (
        entries["model"]["tensors"],
        entries["model"]["size_bytes"],
        entries["n"]["plain_values"],
    ) == (1, 16, 1)
    (tensor,) = [one for one in said["tensors"] if one["name"] == "model.w"]
    assert (tensor["dtype"], tensor["shape"]) == ("float32", [4])
    assert set(tensor["files"]) <= {one["path"] for one in said["files"]}
    assert said["size_bytes"] == sum(one["size_bytes"] for one in said["files"])


def test_show_of_what_dcp_alone_wrote(tmp_path):
    stock_save(tmp_path / "plain", {"t": torch.ones(2)})
    assert "without a manifest" in ran("show", tmp_path / "plain")[0]
    said, _ = ran_json("show", tmp_path / "plain")
    assert (said["step"], said["torch"], said["marks"]) == (None, None, {})


def test_verify_of_a_folder_without_any_is_no_success(tmp_path):
    with pytest.raises(NotFound, match=r"There is no checkpoint in .*\. Give one, or the folder"):
        ran("verify", tmp_path)


def test_verify_leaves_out_what_is_deleted_meanwhile(folder, monkeypatch):
    def inspect_late(path):
        if path == path_of(folder, 1) and path.is_dir():
            shutil.rmtree(path)
        return inspect_checkpoint(path)

    monkeypatch.setattr("holdfast.cli.checkpoint.inspect_checkpoint", inspect_late)
    monkeypatch.setattr(
        "holdfast.cli.checkpoint.checkpoints_at",
        lambda _: [path_of(folder, 2), path_of(folder, 1)],
    )
    said, code = ran_json("verify", folder)
    assert code == 0
    assert [each["step"] for each in said["checkpoints"]] == [2]


def test_diff_leaves_as_diff_does(folder):
    one, two = path_of(folder, 1), path_of(folder, 2)
    assert ran("diff", one, one)[1] == 0
    text, code = ran("diff", one, two)
    assert code == 1
    assert "4 of 4 elements, by at most 1" in text
    said, code = ran_json("diff", one, two)
    assert (code, said["is_same"]) == (1, False)
    (tensor,) = [each for each in said["different"] if each["name"] == "model.w"]
    assert (tensor["elements"], tensor["differing"], tensor["max_abs_difference"]) == (4, 4, 1.0)
    assert "same" not in {each["name"] for each in said["different"]}
    (one / ".metadata").write_bytes(b"")
    with pytest.raises(BadUse):  # which leaves with 2
        ran("diff", one, two)


def test_diff_that_cannot_compare_does_not_say_that_they_differ(folder, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadUse, match="torch"):
        ran("diff", path_of(folder, 1), path_of(folder, 2))


def test_diff_says_what_only_one_has(tmp_path):
    a = stock_save(tmp_path / "a", {"t": torch.ones(2), "f": torch.tensor([float("nan")])})
    b = stock_save(tmp_path / "b", {"u": torch.ones(2), "f": torch.tensor([1.0])})
    text, _ = ran("diff", a, b)
    assert f"only in {a}: t\nonly in {b}: u\n" in text
    said, _ = ran_json("diff", a, b)
    assert said["only_in_a"] == ["t"]
    assert said["different"][0]["max_abs_difference"] == "nan"


def test_a_pinned_one_is_never_deleted_until_it_is_unpinned(folder):
    assert (
        ran("pin", path_of(folder, 1))[0] == f"Pinned {path_of(folder, 1)}: nothing deletes it.\n"
    )
    ran("prune", folder, "--last", "1")
    assert [info.step for info in scan(folder)] == [3, 1]
    with Checkpointer(folder, keep=1) as ckpt:
        ckpt.save(4, {"n": 4})
    assert [info.step for info in scan(folder)] == [4, 3, 1], "3 is the newest verified one"
    assert ran_json("unpin", path_of(folder, 1))[0]["pinned"] is False
    ran("prune", folder, "--last", "1")
    assert 1 not in [info.step for info in scan(folder)]


def test_prune_says_what_goes_and_why_the_others_stay(folder):
    text, _ = ran("prune", folder, "--every", "2", "--dry-run")
    assert "Nothing was deleted. Without --dry-run, 1 checkpoint would go" in text
    assert len(scan(folder)) == 3
    said, _ = ran_json("prune", folder, "--every", "2")
    assert said["deleted"] == [str(path_of(folder, 1))]
    assert said["freed_bytes"] > 0
    assert [(one["step"], one["stays"], one["why"]) for one in said["checkpoints"]] == [
        (3, True, ["the newest"]),
        (2, True, ["every 2 steps"]),
        (1, False, ["no rule keeps it"]),
    ]
    assert read_marks(path_of(folder, 3)).verified is not None
    assert "Deleted 0 checkpoints" in ran("prune", folder, "--every", "2")[0]


def test_prune_by_a_metric_and_by_age(folder):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        note_metrics(path_of(folder, step), {"valid/loss": loss}, now_s=1.0)
    assert ran_json("prune", folder, "--within", "1h")[0]["deleted"] == []
    assert ran_json("prune", folder, "--best", "valid/loss=1")[0]["deleted"] == [
        str(path_of(folder, 1))
    ]
    assert ran_json("prune", folder, "--best", "valid/loss:max=1")[0]["deleted"] == [
        str(path_of(folder, 2))
    ]


def test_a_variable_that_is_not_set_is_not_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    for given, said in (
        ("", "path is empty"),
        ("$NOT_SET_HERE", "is not set"),
        ("s3://bucket/run", "is a URL"),
    ):
        with pytest.raises(click.UsageError, match=said):
            ran("prune", given, "--last", "1")
    assert len(scan(folder)) == 3


def test_restore_writes_one_file(folder, tmp_path):
    text, _ = ran("restore", path_of(folder, 2), "--to", tmp_path / "one.pt")
    assert text.endswith(f"MiB, in {tmp_path / 'one.pt'}\n")
    assert torch.load(tmp_path / "one.pt", weights_only=True)["model"]["w"].tolist() == [2.0] * 4
    said, _ = ran_json(
        "restore", path_of(folder, 2), "--to", tmp_path / "two.pt", "--entry", "model"
    )
    assert (said["schema"], said["entries"], said["tensors"]) == ("holdfast.restore", ["model"], 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (("verify", "nowhere"), NotFound, "There is no folder nowhere"),
        (("show", "nowhere"), NotFound, "There is no checkpoint"),
        (("show", "."), NotFound, "is not a checkpoint"),
        (("diff", "nowhere", "."), NotFound, "There is no checkpoint"),
        (("pin", "."), NotFound, "is not a checkpoint"),
        (("unpin", "step-0000000001"), NotFound, "is not a checkpoint"),
        (("prune", "nowhere", "--last", "1"), NotFound, "There is no folder"),
        (("prune", "."), BadUse, "No rule names the checkpoints to keep"),
        (("prune", ".", "--within", "0s"), BadUse, "--within 0s is not a duration"),
        (("prune", ".", "--within", "soon"), BadUse, "--within soon is not a duration"),
        (("prune", ".", "--best", "loss"), BadUse, "Write METRIC:min=N"),
        (("prune", ".", "--best", "loss=x"), BadUse, "Write METRIC:min=N"),
        (("prune", ".", "--best", "delta=1"), BadUse, "Write delta:max=N or delta:min=N"),
        (("prune", ".", "--best", "loss=1"), BadUse, "has a metric 'loss'"),
        (("restore", "nowhere", "--to", "file"), NotFound, "There is no checkpoint"),
        (("restore", "nowhere", "--to", "."), BadUse, "exists already"),
    ],
)
def test_wrong_use_is_a_sentence_with_the_next_step(tmp_path, monkeypatch, arguments, kind, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HoldfastError, match=r"\.$") as error:
        ran(*arguments)
    assert type(error.value) is kind
    assert said in str(error.value).replace(f"{tmp_path}/", "")
    assert error.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_neither_shown_nor_restored(folder, tmp_path):
    damage(path_of(folder, 1))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        ran("restore", path_of(folder, 1), "--to", tmp_path / "one.pt")
    (path_of(folder, 1) / ".metadata").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"is damaged: \.metadata .*Take another checkpoint\."
    ):
        ran("show", path_of(folder, 1))


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("loss=1", "min"),
        ("eval/valid_loss=1", "min"),
        ("wikitext.perplexity=1", "min"),
        ("acc=1", "max"),
        ("gsm8k/exact_match=1", "max"),
        ("hellaswag:acc_norm=1", "max"),
        ("acc,none=1", "max"),
        ("reward:min=1", "min"),
        ("loss:max=1", "max"),
    ],
)
def test_the_direction_of_a_metric_is_what_its_name_says_unless_it_is_given(text, mode):
    (best,) = policy_of(last=None, every_steps=None, best=(text,), within=None).best
    assert (best.mode, best.count) == (mode, 1)


@pytest.mark.parametrize(
    "text", ["delta=1", "loss_over_acc=1", "error_free_rate=1", "blocks=1", "none=1"]
)
def test_a_direction_that_nobody_knows_is_asked_for(text):
    with pytest.raises(BadUse, match="does not show whether more"):
        policy_of(last=None, every_steps=None, best=(text,), within=None)


@pytest.mark.parametrize(
    ("text", "within_s"),
    [("90s", 90), ("1.5h", 5400), ("30min", 1800), ("7d", 604_800), ("2 w", 1_209_600)],
)
def test_times_have_units(text, within_s):
    assert policy_of(last=None, every_steps=None, best=(), within=text).within_s == within_s


def test_what_needs_no_torch_imports_none(folder):
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom holdfast.cli.main import cli\n"
        "folder, one = sys.argv[1:]\n"
        "for arguments in (['ls', folder], ['verify', folder], ['pin', one], ['prune', folder, '--last', '1'],"
        " ['unpin', one]):\n"
        "    assert not CliRunner().invoke(cli, ['checkpoint', *arguments]).exception, arguments\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(folder), str(path_of(folder, 1))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert [info.step for info in scan(folder)] == [3, 1]


def test_import_says_what_it_made(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(
            {"t": torch.arange(300_000.0)}, storage_writer=dcp.FileSystemWriter(tmp_path / "plain")
        )
    out, code = ran("import", tmp_path / "plain", "--to", tmp_path / "here", "--step", "12")
    assert (code, out) == (
        0,
        f"Step 12: 1.1 MiB, in {tmp_path}/here/step-0000000012; every value matches its CRC-32\n",
    )
    out, code = ran(
        "import", tmp_path / "plain", "--to", tmp_path / "there", "--step", "3", "--json"
    )
    told = json.loads(out)
    assert (told["step"], told["unchecked"]) == (3, None)
    with pytest.raises(BadUse, match="step-0000000012 already"):
        ran("import", tmp_path / "plain", "--to", tmp_path / "here", "--step", "12")
