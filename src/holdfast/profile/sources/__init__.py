"""Measure a node's counters: GPUs by the best source that answers, the host by /proc."""
