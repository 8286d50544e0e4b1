"""Flatten nested state into tensors, values and a skeleton, and match saved state with live state.

`tree` and `skeletons` flatten; `capture` collects one rank's state; `compatibility`,
`optimizer_order`, `parameter_names`, `renaming` and `name_map` decide which saved tensor fills
which live one.
"""
