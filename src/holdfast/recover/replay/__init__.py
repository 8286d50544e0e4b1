"""Find the class of a broken loss by running the same steps again.

| module | one idea |
|---|---|
| `traces` | what each attempt has reported, from the ledger and the journal of steps |
| `classes` | the class of a broken loss: a pure function of the traces |
| `replays` | the replay that is going on, and the record of its result |
"""
