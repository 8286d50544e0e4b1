"""Let metrics call a judge model through a proxy, which enforces a quota and keeps a journal."""
