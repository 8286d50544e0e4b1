"""Keep the position in the data as state: count a loader's batches as the training receives them.

| module | one idea |
|---|---|
| `batches` | the wrapper of a loader: its position, and the batches that it leaves out |
| `loaders` | the kinds of loaders, and how each kind moves to a place within an epoch |
| `order` | the state on which the order of an epoch depends: record and restore |
"""
