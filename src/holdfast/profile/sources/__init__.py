"""Measure a node's counters: GPUs by the best available source, the host by /proc and /sys."""
