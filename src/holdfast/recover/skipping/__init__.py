"""Find the batches that broke a loss, and decide which batches the next attempt leaves out.

| module | one idea |
|---|---|
| `trail` | finds the batches that led to a broken loss, from the reports of the ranks |
| `plan` | decides which batches are left out next, as a pure function |
"""
