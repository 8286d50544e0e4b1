"""Compute a training step's work, memory and idle time from the model and its layout.

Every function is pure, and its docstring cites the source of the formula. The modules:

| module | one idea |
|---|---|
| `shape` | the model and its parallel layout |
| `flops` | FLOPs per token, MFU and HFU, and the peaks that vendors state |
| `pipeline` | microbatches in flight and the bubble of 1F1B and its interleaved form |
| `memory` | bytes of weights, gradients, optimizer and activations, by pipeline stage |
"""
