"""Query the pages of the console: one module per page, each a bounded set of queries.

The queries return plain JSON values. Each query names its index in
`tests/ui/console/test_console_queries.py`, which checks the database's plan.
"""
