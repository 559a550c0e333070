"""Markdown of reports."""

from __future__ import annotations


def markdown(text: str) -> str:
    """`text`, such as a name from outside, on one line that Markdown shows as it is: no HTML, links, cells or code."""
    for special, shown in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("](", "]\\("), ("][", "]\\[")):
        text = text.replace(special, shown)
    return " ".join(text.split())


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown, also readable on a console; the texts of its cells are shown as they are."""
    lines = [[markdown(cell) for cell in row] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
