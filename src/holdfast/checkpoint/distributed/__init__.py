"""Have ranks act as one: raise one error on all, agree on a step, and find ranks that wait for different calls."""
