"""Find the batches that broke a loss, and decide which batches the next attempt leaves out.

| module | one idea |
|---|---|
| `trail` | the batches that led to a broken loss, from what the ranks report |
| `plan` | the batches to leave out next: a pure function |
"""
