"""Formats a report as one HTML page, and as Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tokenmerge.errors import MissingExtraError
from tokenmerge_tools.records.file import Sample
from tokenmerge_tools.reporting.content import TITLE, Content, data_address, svg_address
from tokenmerge_tools.reporting.curves import AGAINST_CLOSENESS
from tokenmerge_tools.reporting.plots import draw
from tokenmerge_tools.reporting.tables import Table


def as_html(content: Content) -> str:
    """Format one page that contains all pictures, plots, styles and scripts."""
    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError(
            "tokenmerge-tools[plots]", needed_by="the page of tokenmerge report needs Jinja2"
        ) from error
    # autoescape, because prompts and names can contain any text.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = (resources.files("tokenmerge_tools.reporting") / "page.html.j2").read_text(encoding="utf-8")
    drawn = [(chart, svg_address(draw(chart))) for chart in content.charts]
    sections = (
        ("measured", "Measured", content.measured),
        ("quality", "Closeness to dense", content.quality),
    )
    prices = [
        (table, [(c.title, a) for c, a in drawn if c.title == AGAINST_CLOSENESS + table.title])
        for table in content.prices
    ]
    return environment.from_string(text).render(
        title=TITLE,
        summary=content.summary,
        fastest=content.fastest,
        prices=prices,
        sections=[(anchor, name, *_shared_notes(tables)) for anchor, name, tables in sections if tables],
        samples=_by_prompt(content.samples),
        conditions=content.conditions,
        notes=content.notes,
    )


def _shared_notes(tables: Sequence[Table]) -> tuple[list[str], list[Table]]:
    """Return notes that all tables of a section have, and the tables without them."""
    first, *others = tables
    shared = [note for note in first.notes if others and all(note in table.notes for table in others)]
    kept = [
        dataclasses.replace(table, notes=tuple(note for note in table.notes if note not in shared))
        for table in tables
    ]
    return shared, kept


def as_markdown(content: Content) -> str:
    """Format headings and tables. The best rows are in bold."""
    parts = [f"# {TITLE}", _escape(content.summary)]
    if content.fastest:
        parts.append(_markdown_table(content.fastest))
    parts += [
        "The speed-up is t_dense / t. Dense is timed in the same rounds, with fused attention (SDPA). In the "
        "column “same attention”, dense has the attention of the row. Times are medians per call. "
        "Marked rows are in bold.",
        *(f"Note: {_escape(note)}" for note in content.notes),
    ]
    for heading, tables in (
        ("Speed and closeness", content.prices),
        ("Measured", content.measured),
        ("Closeness to dense", content.quality),
    ):
        if tables:
            shared, kept = _shared_notes(tables)
            parts += [f"## {heading}", *_markdown_notes(shared), *map(_markdown_table, kept)]
    if content.conditions:
        parts.append("## Conditions")
        parts += [f"{_escape(name)}\n\n```json\n{text}\n```" for name, text in content.conditions]
    return "\n\n".join(parts) + "\n"


def _by_prompt(samples: Sequence[Sample]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        pair = {
            "label": sample.record.label,
            "seed": sample.record.seed,
            "dense": data_address(sample.dense),
            "image": data_address(sample.image),
        }
        rows.setdefault(sample.record.prompt, []).append(pair)
    return list(rows.items())


def _markdown_table(table: Table) -> str:
    lines = [
        f"### {_escape(table.title)}",
        "",
        "| " + " | ".join(map(_escape, table.header)) + " |",
        "|" + "---|" * table.words + "---:|" * (len(table.header) - table.words),
    ]
    for row in table.rows:
        mark = "**" if row.best else ""
        cells = (f"{mark}{_escape(cell)}{mark}" if cell else "" for cell in row.cells)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(["\n".join(lines), *_markdown_notes(table.notes)])


def _markdown_notes(notes: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {_escape(note)}" for note in notes)] if notes else []


def _escape(text: str) -> str:
    for mark in "\\`*_{}[]<>#|":
        text = text.replace(mark, "\\" + mark)
    return text.replace("\n", " ")
