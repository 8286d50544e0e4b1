"""Provide the command line; each command's file parses arguments, calls a room and prints."""
