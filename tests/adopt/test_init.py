"""Test the lines that `holdfast init` adds to scripts of each kind, and what it refuses."""

import ast
import json
import os
import subprocess

import pytest
from click.testing import CliRunner
from user_scripts import (
    EPOCH_FUNCTION,
    EPOCHS,
    FSDP2,
    HUGGINGFACE,
    ITERATOR,
    KINDS,
    LIGHTNING,
    STEPS,
    TORCHTITAN,
    WHILE,
)

from holdfast.adopt import adoption_of
from holdfast.checkpoint import Batches
from holdfast.cli.main import cli
from holdfast.core.errors import BadUse, NotFound

EVERY_SCRIPT = [(kind, script) for kind, scripts in KINDS.items() for script in scripts]


@pytest.fixture
def adopt(tmp_path, monkeypatch):
    """Return the script with Holdfast, as text."""
    monkeypatch.chdir(tmp_path)

    def adopted(script):
        path = tmp_path / "train.py"
        path.write_bytes(script.encode())
        return adoption_of(path).after.decode()

    return adopted


@pytest.fixture
def init(tmp_path, monkeypatch):
    """Run `holdfast init` on a script; return the result of the command, and the path."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"

    def run(script, *options):
        path.write_text(script)
        return CliRunner().invoke(cli, ["init", "train.py", *options]), path

    return run


def refusal(adopt, script):
    with pytest.raises(BadUse) as error:
        adopt(script)
    assert str(error.value).endswith('docs/running.md, "Calls in the script".')
    return str(error.value)


def test_epochs_over_a_loader(adopt):
    after = adopt(EPOCHS)
    assert (
        """\
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)

    run = holdfast.attach()
    ckpt = holdfast.Checkpointer("checkpoints", every=100)
    batches = run.batches(loader)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = ckpt.restore(state, per_rank={"batches": batches})
    for epoch in range(batches.epoch, args.epochs):
        model.train()
        for i, (inputs, targets) in enumerate(batches, batches.position):
"""
        in after
    )
    assert (
        """\
                scheduler.step()  # a step a batch
                optimizer.zero_grad()
                step += 1
                run.step(step, loss=loss)
                if batches.position % len(batches):
                    ckpt.save(step, state, per_rank={"batches": batches})
        print(f"epoch {epoch}: loss {loss.item():.4f}")
        if len(batches) == 1:
            ckpt.save(step, state, per_rank={"batches": batches})
    ckpt.save(step, state, per_rank={"batches": batches}, force=True)
    ckpt.close()

    torch.save(model.state_dict(), args.out)
"""
        in after
    )


def test_the_number_of_a_batch_that_begins_at_1(adopt):
    after = adopt(EPOCHS.replace("enumerate(loader)", "enumerate(loader, 1)"))
    assert "enumerate(batches, 1 + batches.position):" in after
    after = adopt(EPOCHS.replace("enumerate(loader)", "tqdm(enumerate(loader, start=1), delay=9)"))
    assert "tqdm(enumerate(batches, start=1 + batches.position), delay=9):" in after


def test_the_number_of_a_batch_goes_on_after_a_restart_in_an_epoch_that_ends_early():
    def train(batches, dies_at=None):
        for epoch in range(batches.epoch, 3):
            for i, batch in enumerate(batches, batches.position):
                if i >= 5:
                    break
                seen.append((epoch, i, batch))
                if len(seen) == dies_at:
                    return batches.state_dict()
        return None

    seen = []
    train(Batches(range(20)))
    expected, seen = seen, []
    assert len(expected) == 15
    state = train(Batches(range(20)), dies_at=8)
    restarted = Batches(range(20))
    restarted.load_state_dict(state)
    train(restarted)
    assert seen == expected


def test_an_epoch_in_a_function_of_its_own(adopt):
    after = adopt(EPOCH_FUNCTION)
    assert "optimizer, epoch, *, run, ckpt, state, batches):\n" in after
    assert "in enumerate(batches, batches.position):\n" in after
    assert (
        """\
        optimizer.step()
        run.step(batches.number, loss=loss)
        if batches.position % len(batches):
            ckpt.save(batches.number, state, per_rank={"batches": batches})
"""
        in after
    )
    assert (
        """\
    run = holdfast.attach()
    ckpt = holdfast.Checkpointer("checkpoints", every=100)
    batches = run.batches(loader)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    ckpt.restore(state, per_rank={"batches": batches})
    for epoch in range(batches.epoch + 1, 4 + 1):
        print(train(net, "cpu", loader, optimizer, epoch, run=run, ckpt=ckpt, state=state, batches=batches))
        if len(batches) == 1:
            ckpt.save(batches.number, state, per_rank={"batches": batches})
        scheduler.step()
    ckpt.save(batches.number, state, per_rank={"batches": batches}, force=True)
    ckpt.close()
"""
        in after
    )


def test_a_save_after_the_last_batch_where_no_code_reads_names_of_the_loop(adopt):
    silent = EPOCHS.replace('        print(f"epoch {epoch}: loss {loss.item():.4f}")\n', "")
    assert "% len(batches):" not in adopt(silent)
    given = silent.replace("    torch.save(", "    print(loss)\n    torch.save(")
    assert "% len(batches):" not in adopt(given)


BAR = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
bar = tqdm(range(9))
for warm_up in bar:
    pass
bar = tqdm(range(10))
for step in bar:
    model(batch()).sum().backward()
    optimizer.step()
"""


def test_the_restore_comes_before_a_progress_bar_that_is_made_before_its_loop(adopt):
    assert "start = ckpt.restore(state)\nbar = tqdm(range(start, 10))\n" in adopt(BAR)
    epochs = BAR.replace(
        "for step in bar:", "loader = []\nfor epoch in bar:\n  for batch in loader:"
    )
    epochs = epochs.replace(
        "bar = tqdm(range(10))\nloader = []", "loader = []\nbar = tqdm(range(10))"
    )
    after = adopt(epochs)
    assert after.index("step = ckpt.restore(") < after.index("bar = tqdm(range(batches.epoch, 10))")


def test_steps_of_a_range_that_begins_at_1_with_a_scaler(adopt):
    after = adopt(STEPS)
    assert 'state = {"model": model, "opt": opt, "scaler": scaler}\n' in after
    assert "start = ckpt.restore(state)\nfor it in range(start + 1, max_steps + 1):\n" in after
    assert (
        "\topt.zero_grad(set_to_none=True)\n"
        "\trun.step(it, loss=loss)\n"
        "\tckpt.save(it, state, force=it + 1 == max_steps + 1)\n"
        "ckpt.close()\n"
    ) in after


def test_the_counter_that_ends_the_loop_counts_and_the_scripts_own_start_stays(adopt):
    after = adopt(WHILE)
    assert "iter_num = ckpt.restore(state) or iter_num\nwhile True:\n" in after
    assert "    iter_num += 1\n    run.step(iter_num, loss=loss)\n" in after


def test_an_iterator_is_made_of_the_wrapped_batches_after_the_restore(adopt):
    after = adopt(ITERATOR)
    block = after.index("holdfast_batches = run.batches(loader)")
    first = after.index("batches = iter(holdfast_batches)")
    assert block < after.index("start = ckpt.restore(state, per_rank=") < first
    assert after.count("iter(holdfast_batches)") == 2
    assert 'for step in tqdm(range(start, steps), desc="training"):' in after


def test_a_trainer_of_huggingface(adopt):
    after = adopt(HUGGINGFACE)
    assert 'save_strategy="no",\n        save_steps=2,' in after
    assert (
        """\
    saves = HoldfastCallback(f"{trainer.args.output_dir}/holdfast", every=2)
    trainer.add_callback(saves)
    trainer.train(resume_from_checkpoint=saves.resume(trainer))
"""
        in after
    )


def test_a_trainer_whose_arguments_are_parsed(adopt):
    after = adopt(
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "trainer = Trainer(model, args)\n"
        "result = trainer.train(args.resume_from_checkpoint)\n"
    )
    assert 'trainer.args.save_strategy = "no"  # Holdfast saves\n' in after
    assert "result = trainer.train(saves.resume(trainer))\n" in after


def test_a_trainer_of_a_class_of_the_script(adopt):
    text = "from transformers import Trainer\nclass Mine(Trainer):\n    pass\nt = Mine(model)\nt.train()\n"
    assert "t.train(resume_from_checkpoint=saves.resume(t))" in adopt(text)


def test_a_trainer_of_lightning(adopt):
    after = adopt(LIGHTNING)
    assert (
        """\
        callbacks=[saves,  # none of its own saves
            Timer(),
        ],
        plugins=[saves.plugin],
    )
    trainer.fit(Net(), loader, ckpt_path=saves.ckpt_path())
"""
        in after
    )


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "L.Trainer().fit(net)",
            "L.Trainer(callbacks=[saves], plugins=[saves.plugin]).fit(net, ckpt",
        ),
        ("t = L.Trainer(max_epochs=1,)\nt.fit(net)", "(max_epochs=1, callbacks=[saves], plugins="),
        (
            "t = L.Trainer(callbacks=cb)\nt.fit(net)",
            "(callbacks=[saves, *cb], plugins=[saves.plugin])",
        ),
        ("t = L.Trainer(callbacks=[])\nt.fit(net)", "(callbacks=[saves], plugins=[saves.plugin])"),
        ("t = L.Trainer((1))\nt.fit(net)", "L.Trainer((1), callbacks=[saves], plugins="),
    ],
)
def test_arguments_join_those_of_a_call(adopt, call, expected):
    assert expected in adopt(f"import lightning as L\n{call}\n")


def test_fsdp2_saves_the_optimizer_by_shards(adopt):
    after = adopt(FSDP2)
    assert '"optimizer": ShardedOptimizer(model, optimizer)}' in after
    assert "from holdfast.checkpoint.integrations.fsdp2 import ShardedOptimizer\n" in after


def test_configs_of_torchtitan(adopt):
    after = adopt(TORCHTITAN)
    assert "checkpoint=HoldfastCheckpointManager.Config(interval=500, enable=True),\n" in after
    assert (
        "HoldfastCheckpointManager.Config(\n        enable=True,\n        interval=100,\n" in after
    )


@pytest.mark.parametrize(("kind", "script"), EVERY_SCRIPT)
def test_the_diff_applies_and_a_second_run_says_that_it_is_done(init, kind, script):
    shown, path = init(script)
    assert shown.exit_code == 0
    assert path.read_text() == script
    assert "Nothing was changed" in shown.stderr
    done = subprocess.run(["git", "apply", "-p1"], input=shown.stdout, text=True, check=False)
    assert done.returncode == 0
    assert adoption_of(path).kind == "adopted"
    applied = path.read_text()
    again, _ = init(applied, "--write")
    assert (again.exit_code, path.read_text()) == (0, applied)
    assert again.stdout.startswith("train.py uses Holdfast already. Nothing was changed.")
    answer, _ = init(script, "--write", "--json")
    told = json.loads(answer.stdout)
    assert (told["kind"], told["written"], told["diff"]) == (kind, True, shown.stdout)
    assert path.read_text() == applied
    assert ast.parse(applied)


def test_a_loss_of_a_closure_or_of_a_call_is_not_reported(adopt):
    closure = """\
import torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.LBFGS(model.parameters())
for step in range(5):
    def closure():
        loss = model(x).sum()
        loss.backward()
        return loss
    opt.step(closure)
"""
    assert "run.step(step + 1)\n" in adopt(closure)
    inline = closure.replace("loss.backward()", "criterion(x).backward()")
    inline = inline.replace("    def closure():", "    if True:")
    assert "run.step(step + 1)\n" in adopt(inline)
    of_library = inline.replace("criterion(x).backward()", "engine.backward(loss)")
    assert "run.step(step + 1)\n" in adopt(of_library)


def test_a_position_in_the_data_that_is_not_saved_is_stated(init):
    assert "The position in the data is not saved." in init(STEPS)[0].stderr
    assert "position" not in init(EPOCHS)[0].stderr


def test_names_that_a_restart_at_the_end_does_not_set_are_stated(init):
    shown, _ = init(BAR + "print(step)\n")
    assert "Code after the loop reads `step`." in shown.stderr
    for end in ("", "print(warm_up)\n", "for step in range(3):\n    print(step)\n"):
        shown, _ = init(BAR + end)
        assert "Code after the loop reads" not in shown.stderr


def test_lines_end_as_the_script_ends_them(adopt):
    after = adopt(EPOCHS.replace("\n", "\r\n"))
    assert after.count("\n") == after.count("\r\n") > EPOCHS.count("\n")


def test_a_last_line_without_an_end(init):
    script = HUGGINGFACE.partition("def main")[0].partition("class")[0] + (
        "args = TrainingArguments('out')\nt = Trainer(m, args)\nt.train()"
    )
    shown, path = init(script)
    assert "\\ No newline at end of file\n" in shown.stdout
    subprocess.run(["git", "apply"], input=shown.stdout, text=True, check=True)
    assert path.read_text().endswith("t.train(resume_from_checkpoint=saves.resume(t))")


def test_text_that_is_not_ascii_keeps_its_place(adopt):
    text = (
        "import lightning as L\n"
        "t, größe = 0, 'ä'; print('é')\n"
        "trainer = L.Trainer(logger=L.Lögger('ü'), callbacks=[L.Ö('ß')])\n"
        "trainer.fit(größe)\n"
    )
    assert "(logger=L.Lögger('ü'), callbacks=[saves, L.Ö('ß')], plugins=[saves.plugin])" in adopt(
        text
    )


def test_written_through_a_link_with_the_same_permissions(tmp_path, monkeypatch):
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text(STEPS)
    script.chmod(0o750)
    link.symlink_to(script)
    adoption_of(link).write()
    assert link.is_symlink()
    assert script.stat().st_mode & 0o777 == 0o750
    assert "import holdfast" in script.read_text()


def test_a_script_that_changed_meanwhile_is_not_overwritten(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    adoption = adoption_of(script)
    script.write_text("changed")
    with pytest.raises(BadUse, match="has changed since it was read"):
        adoption.write()
    assert script.read_text() == "changed"


LOOP = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
"""

EPOCH_OF_A_FUNCTION = """\
def train(model, loader, optimizer):
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
for epoch in range(3):
    train(model, loader, optimizer)
"""
BEST_AT_END = """\
from transformers import Trainer, TrainingArguments as A
t = Trainer(m, A("out", load_best_model_at_end=True))
t.train()
"""


IN_A_FUNCTION = """\
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for step in range(steps):
        model(batch()).sum().backward()
        optimizer.step()
train(3)
"""
IN_A_METHOD = """\
import torch
class Learner:
    def fit(self):
        for step in range(3):
            self.model(batch()).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
"""


def test_a_function_that_is_called_once_trains(adopt):
    assert "for step in range(start, steps):" in adopt(IN_A_FUNCTION)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (IN_A_FUNCTION + "train(5)\n", "line 8: `train` trains more than once"),
        (
            IN_A_FUNCTION.replace("train(3)", "for fold in folds:\n    train(3)"),
            "line 9: `train` trains more than once",
        ),
        (IN_A_METHOD, "line 4: the loop is in a method, `fit`"),
        ("import torch\n", "neither a known trainer nor a loop with `optimizer.step()`"),
        (LOOP.replace("loader", "DataLoader(data)"), "line 5: the loop's loader has no name"),
        (
            "loader = []\n" + LOOP.replace("range(3)", "range(first, 3)"),
            "begins at neither 0 nor 1",
        ),
        ("loader = []\n" + LOOP.replace("range(3)", "names"), "not over a `range`"),
        (LOOP, "line 4: `loader` is not known in the function of the loop"),
        (f"{LOOP}loader = []\n", "`loader` is made after this line"),
        (
            BAR.replace("bar = tqdm(range(10))", "if tty:\n    bar = tqdm(range(10))"),
            "line 8: only one branch makes the loop's values",
        ),
        ("import accelerate\n" + LOOP, "trains with accelerate"),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n" + LOOP,
            "trains with FSDP1",
        ),
        (
            "loader = []\n" + LOOP + "o2 = torch.optim.SGD(model.parameters())\no2.step()\n",
            "`o2` is a second optimizer beside `optimizer`",
        ),
        (
            "loader = []\n" + LOOP + "for batch in loader:\n    optimizer.step()\n",
            "the optimizer makes a step in a second place",
        ),
        (
            "loader = []\n"
            + LOOP.replace(
                "        optimizer.step()", "        if batch:\n            optimizer.step()"
            )
            + "        scheduler.step()\n",
            "`scheduler.step()` is in another block",
        ),
        (
            EPOCH_OF_A_FUNCTION + "train(model, loader, optimizer)\n",
            "`train` trains one epoch, and",
        ),
        (EPOCH_OF_A_FUNCTION.replace("range(3)", "names"), "is not over a `range`"),
        (
            EPOCH_OF_A_FUNCTION.replace("loader, optimizer):", "loader, *, optimizer):"),
            "have another form",
        ),
        (EPOCH_OF_A_FUNCTION.replace("train(model, l", "train(*model, l"), "have another form"),
        (EPOCH_OF_A_FUNCTION, "`loader` is not known"),
        (EPOCH_OF_A_FUNCTION.partition("for epoch")[0], "`train` trains one epoch"),
        (
            "import itertools\nloader = []\nit = itertools.cycle(loader)\n"
            + LOOP.replace(
                "for epoch in range(3):\n    for batch in loader:\n",
                "while True:\n        batch = next(it)\n",
            ),
            "itertools.cycle repeats the first epoch",
        ),
        (
            LOOP.replace("for epoch in range(3):\n    for batch in loader:\n", "while True:\n"),
            "no `step += 1`",
        ),
        (
            "import pytorch_lightning as pl\npl.Trainer().fit(m)\n",
            "line 1: import lightning.pytorch",
        ),
        (
            "import lightning as L\nt = L.Trainer(**options)\nt.fit(m)\n",
            "are not all in the script",
        ),
        ("import lightning as L\nf = L.Fabric()\n" + LOOP, "trains with Lightning Fabric"),
        (
            "import torch.distributed.fsdp as f\nm = f.FullyShardedDataParallel(m)\n" + LOOP,
            "trains with FSDP1",
        ),
        (
            BEST_AT_END.replace('"out", load_best_model_at_end=True', "**options"),
            "line 2: the TrainingArguments are not all in the script",
        ),
        ("from transformers import Trainer\nt = Trainer(m)\n", "there is no `t.train(...)`"),
        (
            "from transformers import Trainer\na = Trainer(m)\nb = Trainer(m)\n",
            "line 3: there is a second `Trainer(...)`",
        ),
        (
            BEST_AT_END,
            "line 2: load_best_model_at_end needs the Trainer's own saves",
        ),
    ],
)
def test_other_forms_are_refused_in_one_sentence(adopt, script, said):
    assert said in refusal(adopt, script)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"if:\n", "is no Python script"),
        (b"\xff", "is no Python script"),
        (b"\xef\xbb\xbfx = 1\n", "byte order mark"),
    ],
)
def test_what_is_no_script_is_refused(tmp_path, text, said):
    (tmp_path / "train.py").write_bytes(text)
    with pytest.raises(BadUse, match=said):
        adoption_of(tmp_path / "train.py")


def test_a_missing_script(tmp_path):
    with pytest.raises(NotFound, match="Name a Python file"):
        adoption_of(tmp_path / "none.py")


def test_init_imports_no_torch():
    program = (
        "import sys\nsys.argv = ['holdfast', 'init', 'none.py']\n"
        "from holdfast.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [os.sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
