import importlib
import sys

import pytest

from holdfast.core.errors import BadUse


@pytest.mark.parametrize(
    ("module", "needed", "extra"),
    [
        ("huggingface_trainer", "transformers", "huggingface"),
        ("lightning", "lightning.fabric.plugins.io.torch_io", "lightning"),
        ("torchtitan", "torchtitan.components.checkpointer", "torchtitan"),
        ("torchtitan_data", "torchtitan.components.dataloader", "torchtitan"),
    ],
)
def test_a_trainer_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch, module, needed, extra
):
    monkeypatch.setitem(sys.modules, needed, None)
    monkeypatch.delitem(sys.modules, f"holdfast.checkpoint.integrations.{module}", raising=False)
    with pytest.raises(BadUse, match=rf"This needs {needed}.*pip install 'holdfast\[{extra}\]'"):
        importlib.import_module(f"holdfast.checkpoint.integrations.{module}")
