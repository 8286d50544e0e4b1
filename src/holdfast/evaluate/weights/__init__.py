"""Read a model once per cluster, share it among the nodes, and keep it in each node's memory.

The input is a folder or URL. The result on every node is a Hugging Face folder in shared memory,
and the digest of the model's content, which is equal on all nodes. The stages, in order:

| module | one idea |
|---|---|
| `describe` | the command describes the model by a manifest |
| `assign` | which node reads which chunk from the source |
| `fetch` | a node's models: fetch, convert, hold, release |
| `share` | one model on one node: reads its own chunks, requests the others from peers |
| `source` | reads ranges of files from any storage, with retries |
| `exchange` | sends chunks between nodes, at a limited rate |
| `store` | a node's shared memory: budget, owner, cleaning up |
| `stamp` | recognizes the files of a model without reading them |
"""
