"""`holdfast eval`."""
