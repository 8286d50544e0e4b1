"""Define what a trainer and its writing process share: requests, messages, and snapshot memory."""
