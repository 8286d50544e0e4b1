"""A checkpoint's bytes: read once per cluster, shared among nodes, kept in each node's shared memory.

`source` lists a checkpoint's files and reads ranges of them, `manifest` cuts them into chunks, `store` keeps them in
shared memory, `exchange` moves chunks between nodes, `fetch` does a node's share of it.
"""
