"""The training script of the demonstration, run as a user runs it."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from holdfast.demo import train
from holdfast.demo.model import GPT, GPTConfig

ALONE = [sys.executable]
SHORT = ["--steps", "9", "--save-every", "3", "--eval-every", "4"]


def run(*command):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
    }
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [str(part) for part in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def final_weights(done):
    assert done.returncode == 0, done.stderr
    return re.search(r"^done: weights ([0-9a-f]{16})$", done.stdout, re.MULTILINE)[1]


@pytest.mark.slow
def test_a_run_that_broke_and_went_on_ends_with_the_same_bits(tmp_path):
    """One rank; that two do is in `tests/e2e/test_demo.py`."""
    script = [*ALONE, "-m", "holdfast.demo.train", *SHORT, "--checkpoints"]
    whole = run(*script, tmp_path / "whole")
    broken = run(*script, tmp_path / "broken", "--fail-at-step", "8")
    resumed = run(*script, tmp_path / "broken")

    assert broken.returncode != 0
    assert (
        "CorruptVocabulary: step 8: token 40961 is outside the vocabulary of 256 bytes"
        in broken.stderr
    )
    assert "from step 0 to 9" in whole.stdout
    assert "from step 6 to 9" in resumed.stdout
    assert re.search(
        r"^step 4 loss \d\.\d{4} lr \d\.\de-0\d val \d\.\d\d$", whole.stdout, re.MULTILINE
    )
    assert final_weights(resumed) == final_weights(whole)


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
