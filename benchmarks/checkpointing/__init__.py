"""Parts of `benchmarks/checkpoint.py`.

`child` calls a function in a process of its own, `sizes` says how much is measured; `workloads` are what is trained,
`savers` the ways to save it, ours and the peers', and `training` puts them together. `limits` is what the machine
permits, by `raw`. `lost`, `durable`, `restoring`, `resharding`, `growth` and `gpu` make the rows; `heard`
is what ours tells its supervisor, and what was read meanwhile.
"""
