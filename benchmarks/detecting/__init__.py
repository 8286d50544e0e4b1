"""Trainings that are emulated for `detection.py`."""
