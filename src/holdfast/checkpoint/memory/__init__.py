"""Keep the newest durable snapshot in memory, on this node and on a peer, for restarted ranks."""
