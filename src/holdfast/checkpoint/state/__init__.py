"""Flatten nested state into tensors and values, and match saved state with live state.

`tree` and `skeletons` flatten a state and describe its nesting. `capture` collects one rank's
state. `compatibility`, `optimizer_order`, `parameter_names`, `renaming` and `name_map` decide which
saved tensor is read into which live one.
"""
