"""Keep the newest durable snapshot in this node's memory and in a peer's, for ranks that restart."""
