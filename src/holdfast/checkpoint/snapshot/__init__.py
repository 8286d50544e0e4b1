"""Copy the live tensors of one rank into a shared buffer while training goes on.

`plan` assigns each tensor to a rank and an offset; `ownership` and `early_copy` choose what the call of `save` copies
itself; `copy` copies the rest from a thread; `gpu` does so for tensors on GPUs.
"""
