"""Read the log files of one job as blocks of lines, and parse one line: prefix, step, traceback, filter."""
