"""The parts that reports share: their default size, the row of a block, and a table as text and as HTML."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import Any

from tokenmerge.errors import ConfigError

_ATTENTIONS = {"attn1": "self-attention", "attn2": "cross-attention"}


def given_or_default(hosts: Sequence[Any], height: int | None, width: int | None) -> tuple[int, int]:
    """Return the given size of the sample, or the default of the first model that has one."""
    if height is not None and width is not None:
        return height, width
    if (height is None) != (width is None):
        name = "width" if height is None else "height"
        other = "height" if height is None else "width"
        raise ConfigError(f"{name}: give {other} too, or neither, for the default size")
    size: tuple[int, int] | None = next((host.sample_size for host in hosts if host.sample_size), None)
    if size is None:
        names = ", ".join(type(host.root).__name__ for host in hosts)
        raise ConfigError(f"height, width: {names} has no default size; pass both")
    return size


@dataclasses.dataclass(frozen=True)
class Row:
    """One transformer block, or several equal consecutive blocks, whose FLOPs are then summed."""

    model: str  # class of the block's model, with a number if there are several models of this class
    path: str  # qualified name of the block; of several blocks, with the range of their numbers: ``0-9``
    level: int  # resolution level: 1, 2, 4 …
    grid: tuple[int, ...]  # height and width in tokens; for a video, the number of frames before them
    tokens: int  # number before merging, including reference images in the same sequence
    merged_tokens: int  # number after merging
    merged: str  # the sub-layers that run on merged tokens, such as ``"attn1+ff"``
    flops_dense: int
    flops_merged: int  # including the matching
    blocks: int = 1  # number of blocks in this row
    references: tuple[tuple[int, ...], ...] = ()  # ``grid`` of each reference image in the sequence

    @property
    def layers(self) -> str:
        """The parts that run on merged tokens, with the two attentions of a UNet named by what they do."""
        return re.sub("attn1|attn2", lambda found: _ATTENTIONS[found.group()], self.merged)


class Tabled:
    """Base class of results that are shown as a table, in a terminal or a notebook."""

    def _table(self) -> TextTable:
        raise NotImplementedError

    def __repr__(self) -> str:
        """Return a table in plain text, followed by the notes, for ``print`` and a prompt of Python."""
        return str(self._table())

    def _repr_html_(self) -> str:
        """Return the table for a notebook, followed by the notes."""
        return self._table().as_html()


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table with a title above it and notes below it. The first of its lines of cells is the header."""

    title: str
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]

    def __str__(self) -> str:
        notes = (f"note: {note}" for note in self.notes)
        widths = [max(map(len, column)) for column in zip(*self.lines, strict=True)]
        lines = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in self.lines)
        return "\n".join([self.title, *lines, *notes])

    def as_html(self) -> str:
        """Return the table for a notebook."""
        header, *rows = self.lines
        title = "<br>".join(html.escape(line) for line in self.title.split("\n"))
        head = _row(header, "th")
        body = "".join(_row(row, "td") for row in rows)
        table = f"<table><caption>{title}</caption><thead>{head}</thead><tbody>{body}</tbody></table>"
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        return f"{table}<ul>{notes}</ul>" if notes else table


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
