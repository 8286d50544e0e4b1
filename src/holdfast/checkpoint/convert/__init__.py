"""Inspect, compare, import, export and consolidate checkpoints."""
