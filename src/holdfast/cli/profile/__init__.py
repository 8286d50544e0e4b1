"""`holdfast profile`."""
