"""Parts of `benchmarks/checkpoint_faults.py`.

| module | one idea |
|---|---|
| `state` | the saved state |
| `ground` | the checkpoints that faults go into, and the saves that run under faults |
| `oracle` | judges a restore |
| `files` | faults in files at rest |
| `forgeries` | files made up with knowledge of the format |
| `commits`, `calls` | faults at the system calls of one commit; `calls` stops a process there |
| `processes` | faults in real trainers and writing processes |
| `memory` | faults in copied and staged bytes |
| `storage` | faults of mounted file systems and object storage |
| `ranks` | two ranks that disagree |
| `stock` | the same faults in files that PyTorch alone wrote |
"""
