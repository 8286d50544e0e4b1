"""Define what a trainer and its writing process share: save requests, messages, and the shared memory of a snapshot."""
