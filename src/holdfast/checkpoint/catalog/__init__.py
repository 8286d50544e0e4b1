"""List, annotate, retain and delete the checkpoints of a folder; lease it to one writer.

This package needs no torch.
"""
