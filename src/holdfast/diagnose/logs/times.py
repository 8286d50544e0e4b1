"""The forms of a time stamp."""

from typing import Final

TIME_PATTERN: Final = (
    r"\d{4}[-/]\d{2}[-/]\d{2}[T _]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?(?: ?(?:Z\b|UTC|[+-]\d{2}:?\d{2}))?"
    r"|\d{2}/\d{2}/(?:\d{4}|\d{2})[ T]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2}(?:[.,]\d+)?(?: \d{4})?"
    r"|\d{2}:\d{2}:\d{2}(?:[.,]\d+)?"
    r"|1[5-9]\d{8}\.\d{1,9}"
)
"""The forms of a time before a line, for `re` and RE2."""
