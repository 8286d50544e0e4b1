"""Test the integrations' reports to a supervisor: steps, losses, speed and sections."""

import signal
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from deferred import Deferred
from holdfast.checkpoint.integrations.reporting import END_LIMIT_S, Reporter
from holdfast.core import link as link_module
from holdfast.core.link import Unsupervised

huggingface_training = Deferred("huggingface_training")
lightning_training = Deferred("lightning_training")


class Supervised(Unsupervised):
    """Record the reports in order."""

    def __init__(self):
        self.reported = []

    def watch(self):
        self.reported.append("watch")

    def take_back_sigterm(self, replaced):
        self.reported.append("take back")

    def step(self, step, loss, metrics):
        self.reported.append((step, None if loss is None else float(loss), dict(metrics)))

    @contextmanager
    def section(self, name, *, limit_s=None):
        if name in ("save", "restore"):  # reported by the Checkpointer
            yield
            return
        self.reported.append(f"enter {name}")
        yield
        self.reported.append(f"leave {name}")

    @property
    def steps(self):
        return [each for each in self.reported if isinstance(each, tuple)]

    def order(self):
        return [each if isinstance(each, str) else each[0] for each in self.reported]


@pytest.fixture
def link(monkeypatch):
    link = Supervised()
    monkeypatch.setattr(link_module, "_link", link)
    return link


def test_hugging_faces_trainer(tmp_path, link):
    trainer = huggingface_training.train(
        tmp_path, saving={"every": 4}, include_num_input_tokens_seen="all"
    )
    last = huggingface_training.STEPS
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    assert {step: loss for step, loss, _ in link.steps} == losses
    assert [step for step, _, _ in link.steps] == list(range(1, last + 1))
    for _, _, metrics in link.steps:
        assert metrics.keys() == {
            "samples_per_second",
            "tokens_per_second",
            "grad_norm",
            "learning_rate",
        }
        assert metrics["tokens_per_second"] > metrics["samples_per_second"] > 0
    order = link.order()
    assert order[0] == "watch"
    assert "take back" not in order, (
        "this trainer has no handler of its own; one that is there is the script's"
    )
    assert order.count("enter evaluate") == order.count("leave evaluate") == 3
    assert order[-1] == "enter end"
    link.reported.clear()
    trainer.evaluate()
    assert link.order() == ["leave end", "enter evaluate", "leave evaluate", "enter end"]


def test_a_step_that_hugging_faces_trainer_does_not_log_is_reported(tmp_path, link):
    huggingface_training.train(tmp_path, saving={"every": 100}, logging_steps=4, eval_steps=100)
    assert [step for step, _, _ in link.steps] == list(range(1, huggingface_training.STEPS + 1))
    assert [step for step, loss, _ in link.steps if loss is not None] == [4, 8]


def test_lightning(tmp_path, link):
    _, module = lightning_training.train(
        tmp_path, every=4, trainer_options={"num_sanity_val_steps": 0}
    )
    steps = lightning_training.EPOCHS * lightning_training.BATCHES
    assert [step for step, _, _ in link.steps] == list(range(1, steps + 1))
    assert [loss for _, loss, _ in link.steps] == pytest.approx(
        [module.losses[step] for step in range(steps)]
    )
    assert all(metrics["samples_per_second"] > 0 for _, _, metrics in link.steps)
    order = link.order()
    assert order[:2] == ["watch", "take back"]
    assert (
        order.count("enter evaluate") == order.count("leave evaluate") == lightning_training.EPOCHS
    )
    assert order[-1] == "enter end"


def test_lightning_reports_the_optimizers_steps(tmp_path, link):
    lightning_training.train(tmp_path, every=4, trainer_options={"accumulate_grad_batches": 2})
    assert [step for step, _, _ in link.steps] == list(range(1, 1 + lightning_training.EPOCHS * 2))


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


@pytest.mark.parametrize("chains", [True, False])
def test_lightnings_handler_alone_is_taken_the_place_of(tmp_path, monkeypatch, chains):
    """A script's own handler, set after the callback was made, stays in use by Lightning."""
    replaced_by_lightning = []

    class Taken(Supervised):
        def take_back_sigterm(self, replaced):
            replaced_by_lightning.extend(replaced)

    def handler(_number, _frame):
        pass

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(link_module, "_link", Taken())
    try:
        if chains:
            signal.signal(signal.SIGTERM, handler)
        lightning_training.train(tmp_path, every=100)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (handler in replaced_by_lightning) == chains


def test_without_a_supervisor_nothing_is_reported():
    reporter = Reporter()
    reporter.begin(3)
    reporter.step(4, loss=1.0)
    reporter.enter("evaluate")
    reporter.leave()
    reporter.end()
    assert reporter.step_reported == 4
