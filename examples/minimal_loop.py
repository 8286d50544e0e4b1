"""One process, a plain PyTorch loop: predicts a byte from the sixteen before it.

python examples/minimal_loop.py --checkpoints /tmp/minimal
"""

import argparse

import torch
from torch import nn

import holdfast
from holdfast.demo.corpus import Sampler, load_corpus

CONTEXT = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(CONTEXT * 32, 256),
        nn.GELU(),
        nn.Linear(256, 256),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sampler = Sampler(load_corpus().train, batch_size=128, context=CONTEXT, seed=0)

    run = holdfast.attach()  # Holdfast (1)
    ckpt = holdfast.Checkpointer(args.checkpoints, every=args.save_every, keep=3)  # Holdfast (2)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    start = ckpt.restore(state)
    print(f"from step {start}", flush=True)

    for step in range(start + 1, args.steps + 1):
        inputs, targets = sampler.draw()
        loss = nn.functional.cross_entropy(model(inputs), targets[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        run.step(step, loss=loss)  # Holdfast (3)
        ckpt.save(step, state, force=step == args.steps)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    ckpt.close()


if __name__ == "__main__":
    main()
