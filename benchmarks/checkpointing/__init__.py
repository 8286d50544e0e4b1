"""Parts of `benchmarks/checkpoint.py`.

| module | one idea |
|---|---|
| `child` | calls a function in a separate process |
| `sizes` | the amount of work of each part |
| `workloads` | the trained models |
| `savers` | ways to save a model: Holdfast's and the peers' |
| `training` | a workload with a saver |
| `limits`, `raw` | the limits of the machine |
| `lost`, `durable`, `restoring`, `resharding`, `growth`, `gpu` | the rows |
| `heard` | the events that Holdfast sends its supervisor, and the bytes read meanwhile |
"""
