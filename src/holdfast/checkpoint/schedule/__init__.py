"""Decide when the next save is due: by steps, by seconds, by cost, or because of SIGTERM."""
