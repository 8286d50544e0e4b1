"""Check a host for what stops or slows a training."""
