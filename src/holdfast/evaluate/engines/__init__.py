"""What answers requests: an `Engine` in a process of its own (`worker`), one a set of GPUs.

`engine` is the seam; `transformers`, `openai`, `vllm` and `simulated` are its kinds, chosen by name in `choose`.
"""
