"""Read the log files of one job as blocks of lines, and parse single lines."""
