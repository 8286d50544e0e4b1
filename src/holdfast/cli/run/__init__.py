"""`holdfast run`."""
