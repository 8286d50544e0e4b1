"""Parts of `benchmarks/checkpoint_faults.py`.

`state` is what is saved, `ground` the checkpoints that faults are put into and the orders that are carried out under
them, `oracle` the judge. Where the fault strikes: `files` at rest, `forgeries` by somebody who knows the format,
`commits` at the system calls of one commit (`calls` stops a process there), `processes` in real trainers and writing
processes, `memory` in what is copied and staged, `storage` in mounted file systems and object storage, `ranks` in
two ranks that disagree. `stock` puts the same faults into what PyTorch alone wrote.
"""
