"""Decide when the next save is due, by steps, time, cost or SIGTERM."""
