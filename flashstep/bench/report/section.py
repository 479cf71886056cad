"""A part of a page: a heading, a sentence, pictures and tables, and in words what is missing where there is nothing to draw."""

from collections.abc import Sequence
from typing import NamedTuple

from flashstep.bench.report.charts import Picture


class Grid(NamedTuple):
    """A table: ``head`` and ``rows`` of texts; numbers stand to the right in columns of ``right``."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()


class Section(NamedTuple):
    """``missing`` is shown where there are neither pictures nor tables, and beside them if it says what they leave out."""

    title: str
    lead: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Grid] = ()
    missing: str = ""
