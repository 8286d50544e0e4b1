"""Make ranks act together: raise one error on all, agree on a step, detect differing calls."""
