"""Test the integrations' reports to a supervisor: steps, losses, speed and sections.

`test_huggingface_trainer.py` and `test_lightning.py` test those of these frameworks.
"""

from importlib.util import find_spec

import pytest
from supervised_link import supervised

from holdfast.checkpoint.integrations.reporting import END_LIMIT_S, Reporter
from holdfast.core import link as link_module
from holdfast.core.link import Unsupervised


@pytest.fixture
def link(monkeypatch):
    return supervised(monkeypatch)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
def test_torchtitan(tmp_path, link):
    from test_torchtitan import Training

    class Processor:
        def log(self, step, global_avg_loss, global_max_loss, grad_norm):
            self.logged = step

    class Validator:
        def validate(self, model_parts, step):
            link.reported.append(f"validating {step}")

    training = Training(tmp_path)
    training.metrics_processor, training.validator, training.ntokens_seen = (
        Processor(),
        Validator(),
        0,
    )
    save = training.checkpointer.save

    def log_and_save(step, *, last_step):
        """Log and save in the order of torchtitan's trainer."""
        training.ntokens_seen += 100
        if step % 2 == 0:
            training.metrics_processor.log(step, training.losses[-1], 9.0, 1.0)
        save(step, last_step=last_step)
        if step == 3:
            training.validator.validate([], step)

    training.checkpointer.save = log_and_save
    training.run(4)
    assert [(step, loss) for step, loss, _ in link.steps] == [
        (1, None),
        (2, training.losses[1]),
        (3, None),
        (4, training.losses[3]),
    ]
    assert all(metrics["tokens_per_second"] > 0 for _, _, metrics in link.steps[1:])
    assert link.order() == [
        "watch",
        1,
        2,
        3,
        "enter evaluate",
        "validating 3",
        "leave evaluate",
        4,
    ]
    assert training.metrics_processor.logged == 4


def test_what_follows_the_training_keeps_the_limit_of_the_end(monkeypatch):
    limits = []

    class Limits(Unsupervised):
        def section(self, name, *, limit_s=None):
            limits.append((name, limit_s))
            return super().section(name)

    monkeypatch.setattr(link_module, "_link", Limits())
    reporter = Reporter()
    reporter.begin(0)
    reporter.enter("evaluate")
    reporter.leave()
    reporter.end()
    reporter.enter("evaluate", limit_s=5)
    reporter.leave()
    reporter.begin(0)
    reporter.enter("evaluate", limit_s=5)
    end = END_LIMIT_S
    assert limits == [
        ("evaluate", None),
        ("end", end),
        ("evaluate", end),
        ("end", end),
        ("evaluate", 5),
    ]


def test_without_a_supervisor_nothing_is_reported():
    reporter = Reporter()
    reporter.begin(3)
    reporter.step(4, loss=1.0)
    reporter.enter("evaluate")
    reporter.leave()
    reporter.end()
    assert reporter.step_reported == 4
