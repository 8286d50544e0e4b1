"""Shared code of the benchmarks: rows and tables, started jobs, and the machine."""
