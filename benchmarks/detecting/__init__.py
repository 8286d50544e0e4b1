"""Emulated trainings for `detection.py`."""
