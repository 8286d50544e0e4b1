"""Read CSV files of any columns, by a map of columns."""
