"""A model's bytes: read once per cluster, shared among nodes, kept in each node's shared memory.

What enters is a folder or URL; what leaves, on every node, is a Hugging Face folder in memory and the digest of the
model's content, the same everywhere. The stages, in order:

| module | one idea |
|---|---|
| `describe` | what a model is made of, found out by the command |
| `assign` | which node reads which chunk of the source |
| `fetch` | a node's models: begun, shared out, converted, held, released |
| `share` | one model on one node: its own chunks read, the others' asked for |
| `source` | ranges of files, wherever they lie, from storage that fails |
| `exchange` | chunks between nodes, at a rate |
| `store` | a node's shared memory: budget, owner, clearing |
"""
