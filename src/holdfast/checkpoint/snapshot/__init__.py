"""Copy the live tensors of one rank into a shared buffer while training continues.

`plan` assigns each tensor to a rank and an offset. `ownership` and `early_copy` choose the tensors
that the call of `save` copies itself. `copy` copies the other tensors in a background thread, and
`gpu` copies those that are on GPUs.
"""
