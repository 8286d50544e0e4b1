"""Define the files of one checkpoint: names, manifest, checksums, DCP's metadata, and the layout of a rank's shards.

Imports nothing of the other packages. Only `plain_values` needs torch.
"""
