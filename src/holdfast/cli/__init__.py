"""The command line: one file a command, each parses, calls its room and prints; `main` finds them."""
