"""Test that a process forked from the trainer does the trainer no harm."""

import os
import signal
import traceback

import pytest
import torch
import torch.distributed.checkpoint as dcp
from waiting import until

from holdfast.checkpoint import Checkpointer, scan
from holdfast.core.errors import BadUse

MIB = 1 << 20


def in_a_child(work):
    """Return the exit status of `work` in a child, which is killed if it hangs."""
    if not (pid := os.fork()):
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    ended = []

    def has_ended():
        if not ended and (told := os.waitpid(pid, os.WNOHANG))[0]:
            ended.append(told[1])
        return bool(ended)

    try:
        until(has_ended)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(ended[0])


def state_of(value):
    return {"t": torch.full((5000,), float(value))}


def test_a_child_that_was_forked_before_anything_was_due_takes_nothing_either(tmp_path):
    """Ranks vote on the due save, with resources of their own."""
    with Checkpointer(tmp_path, every=2, on_failure="retry") as ckpt:
        ckpt.save(1, state_of(1))
        closed = []
        ckpt._votes.close, close = lambda: closed.append(True), ckpt._votes.close

        def leave():
            ckpt.close()
            assert not closed
            with pytest.raises(BadUse, match=r"belongs to the parent process"):
                ckpt.save(2, state_of(2))

        assert in_a_child(leave) == 0
        ckpt._votes.close = close
        assert ckpt.save(2, state_of(2)).result()


@pytest.mark.parametrize("attest", [True, False])
def test_a_child_that_closes_it_takes_nothing_from_the_trainer(tmp_path, attest):
    with Checkpointer(tmp_path, attest=attest) as ckpt:
        ckpt.save(1, state_of(1)).result()
        writer = ckpt._engine._writer.pid

        def leave():
            with pytest.raises(SystemExit), ckpt:
                raise SystemExit
            ckpt._at_exit()

        assert in_a_child(leave) == 0
        path = ckpt.save(2, state_of(2)).result()
        assert ckpt._engine._writer.pid == writer
    state = state_of(0)
    with pytest.warns(UserWarning, match=r"torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=path)
    assert state["t"].eq(2).all()


def test_a_child_that_trains_waits_for_no_save_of_its_parent(tmp_path):
    """The child is forked during a save, whose end no thread of the child reports."""
    with Checkpointer(tmp_path, max_write_mib_s=8) as ckpt:
        weight, large = torch.nn.Parameter(torch.ones(1)), torch.zeros(4 * MIB)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        weight.grad = torch.zeros(1)
        ckpt.save(1, {"weight": weight, "large": large}).result()
        optimizer.step()
        saved = ckpt.save(2, {"weight": weight, "large": large})
        os.kill(ckpt._engine._writer.pid, signal.SIGSTOP)  # so that no child is too slow

        def train():
            optimizer.step()
            ckpt.before_update()
            ckpt.wait()
            ckpt.close()

        assert in_a_child(train) == 0
        assert not saved.done(), "it took as long as the save"
        os.kill(ckpt._engine._writer.pid, signal.SIGCONT)
    assert [info.step for info in scan(tmp_path)] == [2, 1]


def test_a_child_is_told_to_make_its_own(tmp_path):
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state_of(1)).result()

        def use():
            for call in (lambda: ckpt.save(2, state_of(2)), lambda: ckpt.restore(state_of(0))):
                with pytest.raises(
                    BadUse, match=r"belongs to the parent process\. Create another one"
                ):
                    call()
            with Checkpointer(tmp_path / "own") as own:
                assert own.save(1, state_of(1)).result()

        assert in_a_child(use) == 0
