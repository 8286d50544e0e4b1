"""Make ranks act together: raise the same error on all, agree on a step, detect different calls."""
