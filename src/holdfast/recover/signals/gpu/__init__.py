"""Read the health of this node's GPUs.

| module | one idea |
|---|---|
| `state` | defines what a reader finds out about each GPU |
| `nvml`, `smi`, `dcgm` | the readers: NVIDIA's library, `nvidia-smi`, and DCGM |
| `reader` | the process that calls the readers, since a call into a driver may never return |
| `gpus` | the source, which sends requests to this process and converts its answers to signals |
"""
