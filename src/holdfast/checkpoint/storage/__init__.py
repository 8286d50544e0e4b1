"""Upload checkpoints to object storage, list them there, and fetch them back.

Only `uploader` needs torch.
"""
