"""Text of strangers as a terminal and a spreadsheet may show it: without what they would obey."""

from __future__ import annotations

import re

# Control characters but for the line feed, marks that change the direction of text, line separators, surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_FORMULA = re.compile(r"[=@]|[+-](?:\d[\d.]*+e[+-]?\d++|[^A-Za-z|!])*+[A-Za-z|!]")  # not -1.2e-5


def printable(text: str, line_feeds: bool = True) -> str:
    r"""The text with control characters and marks of text direction written as escapes.

    Names of files, classes and clients can hold any character. A terminal would obey them.

    >>> printable("a\x1b[31mb\u202ec"), printable("two\nlines", line_feeds=False)
    ('a\\x1b[31mb\\u202ec', 'two\\nlines')
    """
    text = UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)
    return text if line_feeds else text.replace("\n", "\\n")


def csv_cell(value: object) -> object:
    r"""A value for a CSV file, which people open in terminals and spreadsheets; what is no text stays as it is.

    A text is made `printable`, and gets an apostrophe in front if a spreadsheet would compute it as a formula: if it
    begins with `=` or `@`, or with `+` or `-` and has a letter, `|` or `!` (OWASP, "CSV Injection").

    >>> csv_cell("a\x1b[31m.png"), csv_cell("=1+2"), csv_cell("-2+cmd|x"), csv_cell("-1.5e-5 [1]"), csv_cell(-0.5)
    ('a\\x1b[31m.png', "'=1+2", "'-2+cmd|x", '-1.5e-5 [1]', -0.5)
    """
    if not isinstance(value, str):
        return value
    text = printable(value, line_feeds=False)
    return f"'{text}" if _FORMULA.match(text) else text
