"""Pure functions from a trace to a table, a chart and named numbers; one module per question."""

SECTIONS = (
    "The cluster and its jobs",
    "Waiting and capacity",
    "How jobs end",
    "Failures and what they cost",
    "Utilisation",
    "Power, heat and carbon",
    "People",
)
"""Sections of the report, in order."""
