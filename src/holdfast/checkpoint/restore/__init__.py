"""Select the newest checkpoint that verifies on all ranks, and read it into a live state.

A restore passes through the modules `select`, `open`, `load`, `state_part`, `dcp_reader` and
`tensor_reads`, in this order.
"""
