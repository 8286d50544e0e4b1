"""Keep the newest durable snapshot in this node's and a peer's memory, for ranks that restart."""
