"""Define the files of one checkpoint: their names, manifest, checksums and content.

This package imports no other package of `holdfast.checkpoint`.
"""
