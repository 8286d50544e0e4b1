"""Let metrics call a judging model through a proxy with a quota and a journal."""
