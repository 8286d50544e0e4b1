"""Select the newest checkpoint that verifies on all ranks, and read it into a live state.

In the order of a restore: `select`, `open`, `dcp_reader` (which reads through `tensor_reads`), `load`. `state_part`
serves a caller who has no live state.
"""
