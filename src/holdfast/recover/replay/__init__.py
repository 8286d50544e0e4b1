"""Find the class of a broken loss by running the same steps again.

| module | one idea |
|---|---|
| `traces` | reads what each attempt has reported, from the ledger and the journal of steps |
| `classes` | finds the class of a broken loss, as a pure function of the traces |
| `replays` | watches the present replay, and records its result |
"""
