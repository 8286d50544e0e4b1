"""Let metrics call a judging model through a proxy that holds them to a quota and journals each call."""
