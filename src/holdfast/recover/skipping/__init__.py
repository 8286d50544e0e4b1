"""Which batches broke a loss, and which ones the next attempt leaves out.

| module | one idea |
|---|---|
| `trail` | the batches that led to a broken loss, from what the ranks report |
| `plan` | what is left out next: a pure function |
"""
