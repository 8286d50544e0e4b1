"""The command line: one file per command parses, calls its room and prints."""
