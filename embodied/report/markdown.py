"""Markdown for reports."""

from __future__ import annotations


def markdown(text: str) -> str:
    """Escape `text`, such as a name from outside, to one line without HTML, links, cells or code."""
    for special, escaped in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("](", "]\\("), ("][", "]\\[")):
        text = text.replace(special, escaped)
    return " ".join(text.split())


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a table in Markdown, also readable on a console; the texts of its cells are escaped."""
    lines = [[markdown(cell) for cell in row] for row in (header, ["---"] * len(header), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def without_empty_columns(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Drop the columns of a table in which every cell is empty."""
    kept = [column for column in range(len(header)) if any(row[column] for row in rows)]
    return [header[column] for column in kept], [[row[column] for column in kept] for row in rows]
