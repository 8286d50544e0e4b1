"""The read models of the console: one module a page, each a bounded set of queries that returns plain JSON values.

A query names its index in `tests/ui/console/test_console_queries.py`, which asks the database for its plan.
"""
