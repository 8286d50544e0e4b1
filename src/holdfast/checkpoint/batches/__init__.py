"""The position in the data as state: a loader's batches, counted as the training gets them.

| module | one idea |
|---|---|
| `batches` | the wrapper of a loader: its position, and the batches that it leaves out |
| `loaders` | how each kind of loader is put at a place within an epoch |
| `order` | what the order of an epoch depends on, kept and put back |
"""
