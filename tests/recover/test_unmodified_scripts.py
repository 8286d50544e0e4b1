"""Scripts that know nothing of `holdfast.attach()` survive kill after kill."""

import psutil
import pytest

ACCELERATE = """
import pathlib, shutil, time
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
completed_steps = 0
folders = sorted(pathlib.Path("out").glob("step_*"), key=lambda folder: int(folder.name[5:]))
if folders:
    accelerator.load_state(str(folders[-1]))
    completed_steps = int(folders[-1].name[5:])
while not pathlib.Path("enough").exists():
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        completed_steps += 1
        time.sleep(0.02)
        if completed_steps % 5 == 0:
            accelerator.save_state("writing")
            shutil.move("writing", f"out/step_{completed_steps}")
            pathlib.Path("progress").write_text(str(completed_steps))
"""
LIGHTNING = """
import os, pathlib, time
import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_batch_end(self, *_):
        pathlib.Path("progress").write_text(str(self.global_step))
        self.trainer.should_stop = os.path.exists("enough")

loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
saves = pl.callbacks.ModelCheckpoint("out", every_n_train_steps=5, save_last=True)
trainer = pl.Trainer(
    accelerator="cpu", devices=1, max_epochs=-1, callbacks=[saves], logger=False, enable_progress_bar=False
)
trainer.fit(Module(), loader, ckpt_path="last")
"""
CHECKPOINTER = """
import pathlib, time
import torch
from holdfast import Checkpointer

state = {"weights": torch.zeros(8)}
ckpt = Checkpointer("checkpoints", every=5)
step = ckpt.restore(state)
while not pathlib.Path("enough").exists():
    state["weights"] += 1
    step += 1
    time.sleep(0.02)
    ckpt.save(step, state)
    pathlib.Path("progress").write_text(str(step))
assert (state["weights"] == step).all()
"""


def rank_of(place, process, killed):
    for child in psutil.Process(process.pid).children(recursive=True):
        if (
            child.pid not in killed
            and child.parent() is not None
            and place.command(child)[1:] in (["job.py"], ["-u", "job.py"])
        ):
            return child
    return None


@pytest.mark.parametrize(
    ("script", "kills"),
    [
        pytest.param(CHECKPOINTER, 2, id="checkpointer"),
        pytest.param(ACCELERATE, 1, id="accelerate", marks=pytest.mark.slow),
        pytest.param(LIGHTNING, 1, id="lightning", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_does_not_attach_survives_kills(place, script, kills):
    """Killed from outside, each time after it made some steps that it then saved or lost."""
    progress, killed = place.folder / "progress", []
    job = place.job(script)
    # The other scripts meet at the store of torchrun.
    command = place.ranks(1, job) if script is CHECKPOINTER else ["python", job]
    with (
        place.start("run", "--name", "r", "--", *command) as process,
        place.ledger() as ledger,
    ):
        for number in range(kills):
            progress.unlink(missing_ok=True)
            place.wait_until(progress.exists, timeout_s=300)
            if script is CHECKPOINTER:  # else it gained nothing
                newest = max((one.step for one in ledger.checkpoints("r")), default=0)
                place.wait_until(
                    lambda known=newest: any(one.step > known for one in ledger.checkpoints("r"))
                )
            rank = rank_of(place, process, killed)
            killed.append(rank.pid)
            rank.kill()
            place.wait_until(lambda count=number + 1: len(ledger.incidents("r")) == count)
        (place.folder / "enough").touch()
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert [incident.action for incident in ledger.incidents("r")] == ["restart"] * kills
        assert len(ledger.attempts("r")) == kills + 1
