"""List, annotate, retain and delete the checkpoints of a folder, and allow one writer at a time.

This package needs no torch.
"""
