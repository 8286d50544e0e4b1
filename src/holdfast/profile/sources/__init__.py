"""Measure the counters of a node: its GPUs by the best source that answers, and its host by /proc."""
