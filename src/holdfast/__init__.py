"""Holdfast keeps LLM development running on GPU clusters.

In a training script:

    run = holdfast.attach()
    ckpt = holdfast.Checkpointer("checkpoints")
    ...
    run.step(step, loss=loss)
    ckpt.save(step, state)

Everything else is imported from its room, for example `from holdfast.diagnose import diagnose`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint import Checkpointer
    from holdfast.recover import attach

__version__ = "0.1.0"
__all__ = ["Checkpointer", "__version__", "attach"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `holdfast --help` and the rank shim start without torch.
    if name == "attach":
        from holdfast.recover import attach

        return attach
    if name == "Checkpointer":
        from holdfast.checkpoint import Checkpointer

        return Checkpointer
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
