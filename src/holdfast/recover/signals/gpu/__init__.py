"""Read the health of this node's GPUs.

| module | one idea |
|---|---|
| `state` | what a reader has found of each GPU |
| `nvml`, `smi`, `dcgm` | the readers: NVIDIA's library, `nvidia-smi`, and DCGM |
| `reader` | the process that calls the readers, since a call of a driver may never return |
| `gpus` | the source: sends requests to that process, and turns its answers into signals |
"""
