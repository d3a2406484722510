"""The parts of a report in any format: sections of text, tables and pictures. Also numbers as text."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import SupportsFloat


@dataclass(frozen=True)
class Table:
    """Columns' heads, and rows of text. The first `labels` columns are words, the rest numbers."""

    heads: list[str]
    rows: list[list[str]]
    labels: int = 1


@dataclass(frozen=True)
class Picture:
    """An SVG with a file name and a caption."""

    name: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Log:
    """Text, as a program printed it."""

    text: str


@dataclass
class Section:
    """A title, and blocks: paragraphs, lists of sentences, tables, pictures and logs."""

    title: str
    blocks: list["str | list[str] | Table | Picture | Log"] = field(default_factory=list)


def counted(count: int, noun: str) -> str:
    """For example "1 pair" and "2 pairs"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def number(value: float, form: str = ".4f") -> str:
    """A number for a table; a dash for NaN."""
    return "-" if math.isnan(value) else f"{value:{form}}"


def percent(value: float, digits: int = 0, sign: str = "") -> str:
    """A share as a percentage; sign "+" always prints the sign; a dash for NaN."""
    return "-" if math.isnan(value) else f"{100 * value:{sign}.{digits}f} %"


def percents(ends: Iterable[float]) -> str:
    """An interval of shares, as percentages."""
    return between([100 * end for end in ends], ".0f") + " %"


def between(ends: Iterable[SupportsFloat], form: str = ".4f") -> str:
    """An interval for a table."""
    low, high = map(float, ends)
    return "-" if math.isnan(low) or math.isnan(high) else f"{low:{form}} .. {high:{form}}"


def p_value(value: float) -> str:
    """A p for a table; below 0.0001 only that is shown."""
    return "-" if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"
