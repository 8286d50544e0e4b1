"""Answer requests by transformers in this process, on a CPU or one GPU."""
