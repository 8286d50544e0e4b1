"""The training script of the demonstration, run as a user runs it."""

import importlib
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from holdfast.demo import train
from holdfast.demo.model import GPT, GPTConfig

SHORT = ["--steps", "9", "--save-every", "3", "--eval-every", "4"]


@pytest.fixture
def without_supervisor(monkeypatch):
    """Let a training run in this process as without `holdfast run`, and leave nothing behind."""
    for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(importlib.import_module("holdfast.recover.attach"), "_run", None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
def test_a_run_that_broke_and_went_on_ends_with_the_same_bits(without_supervisor, tmp_path, capsys):
    """One rank; that two do is in `tests/e2e/test_demo.py`."""
    breaking = [*SHORT, "--checkpoints", str(tmp_path / "broken"), "--fail-at-step", "8"]
    broken = subprocess.run(
        [sys.executable, "-m", "holdfast.demo.train", *breaking],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert broken.returncode != 0
    assert (
        "CorruptVocabulary: step 8: token 40961 is outside the vocabulary of 256 bytes"
        in broken.stderr
    )

    weights = {}
    for name, start in (("whole", 0), ("broken", 6)):
        train.main([*SHORT, "--checkpoints", str(tmp_path / name)])
        said = capsys.readouterr().out
        assert f"from step {start} to 9" in said
        weights[name] = re.search(r"^done: weights ([0-9a-f]{16})$", said, re.MULTILINE)[1]
        if start == 0:
            assert re.search(
                r"^step 4 loss \d\.\d{4} lr \d\.\de-0\d val \d\.\d\d$", said, re.MULTILINE
            )
    assert weights["broken"] == weights["whole"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps is 0: give at least 1"),
        (["--save-every", "-5"], "--save-every is -5: give at least 1"),
        (["--steps", "30"], "--steps 30 is not a multiple of --save-every 20"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        train.parse_arguments(["--checkpoints", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_batches_are_left_out_by_number():
    arguments = train.parse_arguments(["--checkpoints", "x", "--leave-out", "4-5,9-9"])
    left = [number for number in range(1, 12) if train.in_ranges(number, arguments.leave_out)]
    assert left == [4, 5, 9]
    assert train.parse_arguments(["--checkpoints", "x"]).leave_out == ()


def test_the_learning_rate_warms_up_then_falls_to_a_tenth():
    shares = [train.cosine(step, 300) for step in range(301)]
    peak = train.WARMUP_STEPS
    assert shares[0] == pytest.approx(1 / peak)
    assert shares[peak] == max(shares) == pytest.approx(1)
    assert shares[:peak] == sorted(shares[:peak])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[300] == pytest.approx(0.1)


def test_a_run_shorter_than_its_warm_up_has_a_learning_rate():
    assert all(0 < train.cosine(step, 5) <= 1 for step in range(6))


def test_only_matrices_decay():
    decayed, kept = train.parameter_groups(GPT(GPTConfig(layers=1)))
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert kept["weight_decay"] == 0.0


def test_a_token_outside_the_vocabulary_is_named():
    train.check_vocabulary(torch.tensor([[0, 255]]), 3)
    with pytest.raises(train.CorruptVocabulary, match="step 3: token 256 is outside"):
        train.check_vocabulary(torch.tensor([[0, 256]]), 3)


def test_an_evaluation_leaves_no_trace_in_the_training():
    model = GPT(GPTConfig(layers=1, width=16, heads=1))
    batch = torch.randint(256, (2, 8)), torch.randint(256, (2, 8))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = torch.get_rng_state()
        first, second = train.evaluate(model, [batch]), train.evaluate(model, [batch, batch])
    finally:
        dist.destroy_process_group()
    assert first == pytest.approx(second)
    assert first == pytest.approx(5.55, abs=0.2)  # ln 256
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(before, torch.get_rng_state())


def test_the_fingerprint_sees_one_bit():
    model = GPT(GPTConfig(layers=1, width=16, heads=1))
    before = train.fingerprint(model)
    assert train.fingerprint(model) == before
    with torch.no_grad():
        model.head.weight.view(torch.int32)[0, 0] ^= 1
    assert train.fingerprint(model) != before
