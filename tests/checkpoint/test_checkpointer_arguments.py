"""Show which arguments a Checkpointer accepts, and that a bad one is refused with its name."""

import pathlib

import numpy as np
import pytest
import torch

from holdfast.checkpoint import Best, Checkpointer, Retention, scan
from holdfast.checkpoint.format.manifest import read_manifest
from holdfast.core.errors import BadUse


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            {"every": 0},
            "every is 0; allowed is a whole number of steps from 1 on, a datetime.timedelta above 0, or",
        ),
        ({"every": "10min"}, "every is '10min'"),
        ({"every": True}, "every is True"),
        ({"keep": 0}, "keep is 0"),
        ({"on_failure": "exit"}, "on_failure is 'exit'; allowed are 'raise', 'warn' and 'retry'"),
        ({"when_busy": "drop"}, "when_busy is 'drop'; allowed are 'wait' and 'skip'"),
        ({"when_busy": "replace"}, 'no longer exists. Use when_busy="skip"'),
        ({"timeout_s": 0}, "timeout_s is 0; allowed is a number above 0"),
        ({"max_write_mib_s": -1}, "max_write_mib_s is -1; allowed is a number above 0"),
        ({"max_memory_gib": 0}, "max_memory_gib is 0; allowed is a number above 0"),
        (
            {"max_device_memory_gib": -1},
            "max_device_memory_gib is -1; allowed is a number from 0 on",
        ),
        ({"sigterm_grace_s": 0}, "sigterm_grace_s is 0; allowed is a number above 0"),
    ],
)
def test_bad_arguments_are_named_before_any_work(tmp_path, arguments, named):
    with pytest.raises(BadUse) as raised:
        Checkpointer(tmp_path / "new", **arguments)
    assert named in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "step", [-1, 1.0, True, "8", None, torch.tensor(7.0), torch.tensor(True), np.array([1, 2])]
)
def test_a_bad_step_is_named(tmp_path, step):
    with pytest.raises(BadUse, match="step is"):
        Checkpointer(tmp_path).save(step, {}).result()


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.array, torch.tensor])
def test_a_number_of_another_type_is_taken_as_the_number_it_is(tmp_path, number):
    """Loaders and schedulers count steps in such types."""
    keep = Retention(
        last=number(2),
        every_steps=number(50),
        best=(Best(metric="loss", count=number(1), mode="min"),),
    )
    with Checkpointer(tmp_path, every=number(10), keep=keep) as ckpt:
        for step in (5, 10, 20, 50, 60, 70):
            handle = ckpt.save(number(step), {"a": step}, per_rank={"b": step})
            handle.result()
        assert type(handle.step) is int
        assert ckpt.per_rank_states(number(50)) == [{"b": 50}]
    assert [info.step for info in scan(tmp_path)] == [70, 60, 50]
    assert type(read_manifest(tmp_path / "step-0000000070", step=70).step) is int
    with Checkpointer(tmp_path, keep=number(1)) as ckpt:
        ckpt.save(number(80), {"a": 80}).result()
    assert [info.step for info in scan(tmp_path)] == [80]


def test_a_folder_below_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/checkpoints"):
        with pytest.raises(BadUse, match=r"is a file\. Give Checkpointer a folder"):
            Checkpointer(tmp_path / place)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("s3://bucket/run", "push_to='s3://bucket/run'"),
        ("gs://bucket/run", "push_to='gs://bucket/run'"),
        ("hf+x://a", "push_to='hf[+]x://a'"),
        (pathlib.PurePosixPath("s3://bucket/run"), "push_to='s3://bucket/run'"),
        ("file:///data/x", "plain path: /data/x$"),
        ("$STORAGE/run", "push_to='s3://bucket/run'"),
        ("", "is empty"),
        (" ", "is empty"),
        (None, "The path is None"),
        ("$NOT_SET_HERE/run", "[$]NOT_SET_HERE, which is not set"),
        ("${NOT_SET_HERE}/run", "[$]{NOT_SET_HERE}, which is not set"),
        ("~no-such-user/run", "a user without a home"),
    ],
)
def test_what_is_no_local_folder_is_refused_and_none_of_that_name_is_made(
    tmp_path, monkeypatch, given, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STORAGE", "s3://bucket")
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    with pytest.raises(BadUse, match=said):
        Checkpointer(given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", ["~/run", "$HOME/run", "${HOME}/run", b"~/run", "../home/run"])
def test_home_and_variables_are_expanded(tmp_path, monkeypatch, given):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Checkpointer(given) as ckpt:
        path = ckpt.save(1, {"a": 1}).result()
    assert path.resolve() == tmp_path / "home" / "run" / "step-0000000001"
    assert list((tmp_path / "work").iterdir()) == []


def test_a_folder_whose_name_looks_like_a_variable_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    (tmp_path / "a$NOT_SET_HERE").mkdir()
    with Checkpointer(tmp_path / "a$NOT_SET_HERE") as ckpt:
        assert ckpt.save(1, {"a": 1}).result().parent == tmp_path / "a$NOT_SET_HERE"


def test_closing_twice_does_no_harm_and_saving_after_is_refused(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {}).result()
        ckpt.wait()
    ckpt.close()
    with pytest.raises(BadUse, match="closed"):
        ckpt.save(2, {}).result()
