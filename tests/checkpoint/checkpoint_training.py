"""A small model that really trains, for the tests of this folder and the scripts that they start."""

import torch


class Training:
    """A model with a buffer, AdamW and a schedule; every step draws from torch's generator."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 3),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)

    def run(self, steps):
        for _ in range(steps):
            loss = self.model(torch.randn(5, 6)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
        return self

    @property
    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


class Wide(Training):
    """The same training with a layer whose tensors are copied after the call."""

    def __init__(self, seed=0):
        super().__init__(seed)
        wide = torch.nn.Sequential(
            torch.nn.Linear(6, 1000), torch.nn.BatchNorm1d(1000), torch.nn.Linear(1000, 3)
        )
        self.model = torch.nn.Sequential(wide, torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=50)


def assert_same(left, right, where="state"):
    """Check that two states are bit-equal and of the same types, at every depth."""
    assert type(left) is type(right), f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, where
        assert left.shape == right.shape, where
        raw = [each.detach().contiguous().flatten().view(torch.uint8) for each in (left, right)]
        assert torch.equal(*raw), where
    elif isinstance(left, dict):
        assert list(map(repr, left)) == list(map(repr, right)), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}.{index}")
    else:
        assert repr(left) == repr(right), where
