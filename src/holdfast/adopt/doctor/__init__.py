"""Check a host for problems that stop or slow a training."""
