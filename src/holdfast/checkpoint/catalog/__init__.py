"""List, annotate, retain and delete the checkpoints of a folder, and lease the folder to one writer. Needs no torch."""
