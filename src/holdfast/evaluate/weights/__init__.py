"""Read a model once per cluster, share it among nodes, and keep it in each node's memory.

The input is a folder or URL. The result, on every node, is a Hugging Face folder in shared memory
and the digest of the model's content, equal on all nodes. The stages, in order:

| module | one idea |
|---|---|
| `describe` | the manifest of a model, made by the command |
| `assign` | which node reads which chunk of the source |
| `fetch` | a node's models: begun, shared out, converted, held, released |
| `share` | one model on one node: own chunks read, others requested from peers |
| `source` | ranges of files from any storage, with retries |
| `exchange` | chunks between nodes, at a rate |
| `store` | a node's shared memory: budget, owner, clearing |
"""
