"""Save and restore the position in the training data, by counting the batches of a loader.

| module | one idea |
|---|---|
| `batches` | wrap a loader: count its batches, and leave some of them out |
| `loaders` | start each kind of loader at a position within an epoch |
| `order` | record and restore the state on which the order of an epoch depends |
"""
