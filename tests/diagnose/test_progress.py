"""Test that each trainer's line reports the step that `progress.yaml` names, and errors none."""

from importlib import resources

import pytest
import yaml

from holdfast.diagnose.logs.lines import clean_line
from holdfast.diagnose.logs.progress import PROGRESS, reported_step

GIVEN = yaml.safe_load(
    (resources.files("holdfast.diagnose.logs") / "progress.yaml").read_text("utf-8")
)


@pytest.mark.parametrize("one", GIVEN, ids=lambda one: one["id"])
def test_example_reports_its_step(one):
    line, step = one["example"]
    assert reported_step(line) == step
    if step is not None:
        assert PROGRESS.search(line.encode())


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 37 loss 2.31", 37),
        (
            "step: 10  loss:  7.4123  grad_norm:  1.2345  memory: 45.12GiB(57.01%)  tps: 6,412  mfu: 32.36%",
            10,
        ),
        ("\x1b[31mstep: 10  \x1b[32mloss:  7.4123  \x1b[38;2;180;60;0mgrad_norm:  1.2345", 10),
        (
            "[2024-06-01 03:11:47,123] [INFO] [logging.py:96:log_dist] [Rank 0] step=120, skipped=3, lr=[1e-05]",
            120,
        ),
        ("steps: 120 loss: 2.3145 iter time (s): 1.234 samples/sec: 830.12", 120),
        (
            " samples/sec: 30.1 | iteration      120/  143000 | elapsed time per iteration (ms): 3 | lm_loss: 2.1",
            120,
        ),
        ("iter 100: loss 4.1234, time 412.33ms, mfu 37.12%", 100),
        ("step 250: train loss 3.2, val loss 3.3", 250),
        (
            "step  100/18865 | loss 6.012345 (+0.12z)| norm 0.8100 | lr 6.00e-04 | 412.3 ms | 1271234 tok/s",
            100,
        ),
        ("Step 20 | loss:2.3012 lr:2e-05 tokens_per_second_per_gpu:812.1", 20),
        ("iteration: 118 / 5200 | consumed_tokens: 123M | lm_loss: 2.3 | lr: 0.0003", 118),
        ("[rank 0] Step: 118 | Loss: 2.30 | Global batch size: 64", 118),
        ("eta: 2:17:05  iter: 119  total_loss: 1.2  lr: 0.02", 119),
        ("tflops=180.1 step=118 loss=2.30 tgs (tokens/gpu/second)=3911.1 lr=1e-5", 118),
        ("| Iter:    118 | loss: 2.3012 | lr: 1.0e-04, scale: 1024.0000 | time: 1.62", 118),
        (
            "Training epoch 0, iteration 120/149 | lr: 3e-05 | global_step: 120 | reduced_train_loss: 1.233",
            120,
        ),
        ("iter 480: loss 2.3012, time: 412.33ms", 480),
        ("step 118: {'train/loss': 0.31}", 118),
        ("Steps:   2%|2         | 118/5200 [03:11<2:17:05,  1.62s/it]", 118),
        (
            "(TaskRunner pid=811) Training Progress:   0%|          | 2/624 [21:47<114:32:27, 662.94s/it]",
            2,
        ),
        ("Progress on:train 19.0it/70.0it rate:1.2s/it remaining:01:00 elapsed:00:23", 19),
        ("Epoch: [3][118/984]\tTime 0.5 (0.6)\tLoss 2.30", 3070),
        ("Train: [3/300][118/1251]\teta 0:23:21 lr 0.001 loss 2.3", 3871),
        ("118/984 ━━━━━━━━━━━━━━━━━━━━ 2:01 140ms/step - accuracy: 0.41 - loss: 2.30", 118),
        ("12: [rank3]:   7%|7         | 41/620 [01:07<50:20,  4.98s/it]", 41),
    ],
)
def test_trainers_that_share_a_form(line, step):
    assert PROGRESS.search(line.encode())
    assert reported_step(clean_line(line.encode(), 1).text) == step


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: NaN at step 118",
        "saved checkpoint of step 40",
        "Map (num_proc=8):  45%|####5     | 451/1000 [00:01<00:01, 410.31 examples/s]",
        "Downloading shards:  45%|####5     | 4/10 [00:01<00:01,  1.31it/s]",
        "Validation DataLoader 0:  45%|####5     | 4/10 [00:01<00:01,  1.31it/s]",
        "Progress on:eval 19.0it/70.0it rate:1.2s/it",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
        "micro_step=480",
    ],
)
def test_what_is_no_progress_reports_no_step(line):
    assert reported_step(line) is None


def test_a_match_keeps_to_its_line():
    block = b"  3%|x\n| 4/7 [\r\nstep 4\nloss 2\r\n7%|x| 5/9 ["
    assert [match.group() for match in PROGRESS.finditer(block)] == [b"7%|x| 5/9 ["]
