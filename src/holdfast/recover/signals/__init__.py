"""Read the health of the nodes, and decide on it in a run.

Each node's agent reads facts; the supervisor keeps the facts of all nodes.

| module | one idea |
|---|---|
| `facts` | a signal, a notice, and the sources of both |
| `kernel` | the lines of the kernel's log |
| `gpu` | the state of the GPUs, from NVML, `nvidia-smi` or DCGM |
| `links` | network links and their counters |
| `host` | file systems, memory, the clock, a planned shutdown |
| `disks` | what the disks say of their own health |
| `cloud` | a cloud's notices about this machine |
| `slurm` | the states that Slurm gives the nodes |
| `kubernetes` | the conditions of a pod and its node |
| `watch` | reads the sources of one node, each in a thread of its own |
| `in_run` | keeps the facts of all nodes of a run, and has the policy decide on them |
"""
