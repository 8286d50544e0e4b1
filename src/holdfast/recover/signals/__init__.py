"""Read the health of the nodes, and have a run react to it.

The agent of each node reads facts about the node; the supervisor collects the facts of all nodes.

| module | one idea |
|---|---|
| `facts` | defines signals (of health), notices (that a node will be taken away), and their sources |
| `kernel` | lines of the kernel's log |
| `gpu` | the state of the GPUs, from NVML, `nvidia-smi` or DCGM |
| `links` | network links and their counters |
| `host` | file systems, memory, the clock, a planned shutdown |
| `disks` | the health that disks report themselves |
| `cloud` | notices of a cloud about this machine |
| `slurm` | the states that Slurm gives the nodes |
| `kubernetes` | the conditions of a pod and its node |
| `watch` | reads the sources of one node, each in a separate thread |
| `in_run` | collects the facts of all nodes of a run, and has the policy decide on them |
"""
