"""Define the files of one checkpoint: names, manifest, checksums, DCP's metadata, shards.

This package imports no other package of `holdfast.checkpoint`.
"""
