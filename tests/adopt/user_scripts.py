"""Training scripts as users write them, without Holdfast. Each leaves its final weights."""

EPOCHS = '''\
"""Fine-tune a small network.

python train.py --epochs 3 --accumulation 2
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


def build_model(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--out", default="model.pt")
    args = parser.parse_args()

    torch.manual_seed(42)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(150, 8), torch.randn(150, 1))
    loader = DataLoader(data, batch_size=5, shuffle=True)
    model = build_model(16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)

    for epoch in range(args.epochs):
        model.train()
        for i, (inputs, targets) in enumerate(loader):
            loss = F.mse_loss(model(inputs), targets)
            (loss / args.accumulation).backward()

            if (i + 1) % args.accumulation == 0 or i + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()  # a step a batch
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
'''

EPOCH_FUNCTION = """\
import torch
from torch import nn


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"{epoch} [{batch_idx}/{len(train_loader)}] of {len(train_loader.dataset)}")
    return loss.item()


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.Adadelta(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    for epoch in range(1, 4 + 1):
        print(train(net, "cpu", loader, optimizer, epoch))
        scheduler.step()
    torch.save(net.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
"""

STEPS = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", enabled=False)
max_steps = 40
for it in range(1, max_steps + 1):
\tfor micro in range(2):
\t\tx = torch.randn(8, 4)
\t\tloss = model(x).square().mean() / 2
\t\tscaler.scale(loss).backward()
\tscaler.step(opt); scaler.update()
\topt.zero_grad(set_to_none=True)
torch.save(model.state_dict(), "model.pt")
"""

WHILE = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = model.configure_optimizers(0.1)
iter_num = 0
local_iter_num = 0
if resume:
    iter_num = torch.load("ckpt.pt")["iter_num"]
while True:
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    local_iter_num += 1
    iter_num += 1
    if iter_num > 30:
        break
"""

ITERATOR = """\
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

def train(model, optimizer, loader, steps):
    batches = iter(loader)
    for step in tqdm(range(steps), desc="training"):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

HUGGINGFACE = """\
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 6) % 32
        return {"input_ids": tokens, "labels": tokens}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(7)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    training_args = TrainingArguments(
        output_dir="out",
        max_steps=args.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=LlamaForCausalLM(config), args=training_args, train_dataset=Text())
    trainer.train()
    torch.save(trainer.model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
"""

LIGHTNING = """\
import lightning as L
import torch
from lightning.pytorch.callbacks import Timer


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    L.seed_everything(1)
    loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=5, logger=False,
        callbacks=[  # none of its own saves
            Timer(),
        ]
    )
    trainer.fit(Net(), loader)
"""

FSDP2 = """\
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

TORCHTITAN = """\
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.trainer import Trainer

def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(interval=500),
    )

def llama3_70b() -> Trainer.Config:
    config = llama3_8b()
    config.checkpoint = CheckpointManager.Config(
        enable=False,
        interval=100,
    )
    return config
"""

KINDS = {
    "loop": [EPOCHS, EPOCH_FUNCTION, STEPS, WHILE, ITERATOR],
    "huggingface": [HUGGINGFACE],
    "lightning": [LIGHTNING],
    "fsdp2": [FSDP2],
    "torchtitan": [TORCHTITAN],
}
