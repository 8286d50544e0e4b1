"""Simulated training jobs: published cases, the study's story, and the table of times."""
