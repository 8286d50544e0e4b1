"""Simulated training jobs: others' published cases, the study's story, and the package's table of times."""
