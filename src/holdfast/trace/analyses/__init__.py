"""Compute a table, a chart and named numbers from a trace: pure functions, by question."""

SECTIONS = (
    "The cluster and its jobs",
    "Waiting and capacity",
    "How jobs end",
    "Failures and what they cost",
    "Utilisation",
    "Power, heat and carbon",
    "People",
)
"""The sections of the report, in order."""
