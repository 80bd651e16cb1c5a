"""The pictures that are shown: records for the report's sliders, and the sheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tokenmerge.measure.bench.variants import DENSE
from tokenmerge.measure.evaluate.draw import CONTINUES
from tokenmerge.measure.evaluate.layout import Layout
from tokenmerge.measure.evaluate.prompts import Item
from tokenmerge.measure.evaluate.variants import Drawn
from tokenmerge.measure.files import write_atomically
from tokenmerge.measure.reporting.quality import SampleRecord
from tokenmerge.pictures import sample_sheet

__all__ = ["pack", "sample_records", "unpack", "write_sheet"]


def pack(items: Sequence[Item], variants: Sequence[Drawn], layout: Layout) -> dict[Path, bytes]:
    """The content of the pictures of these items that are here, for a machine that they are not on."""
    paths = [layout.picture(variant, item) for item in items for variant in variants]
    return {path: path.read_bytes() for path in paths if path.exists()}


def unpack(packed: Iterable[Mapping[Path, bytes]]) -> None:
    """Write those pictures that are not here.

    Raises:
        ConfigError: one cannot be written.
    """
    for files in packed:
        for path, content in files.items():
            if not path.exists():
                write_atomically(path, partial(Path.write_bytes, data=content), advice=CONTINUES)


def sample_records(items: Sequence[Item], variants: Sequence[Drawn], layout: Layout) -> list[SampleRecord]:
    """A pair of pictures for each item and each variant but dense, which comes first."""
    dense, *others = variants
    return [
        SampleRecord(
            prompt=item.prompt.text,
            seed=item.seed,
            variant=variant.spec.name,
            settings=dict(variant.spec.settings),
            dense=layout.relative(layout.picture(dense, item)),
            image=layout.relative(layout.picture(variant, item)),
        )
        for item in items
        for variant in others
    ]


def write_sheet(path: Path, items: Sequence[Item], variants: Sequence[Drawn], layout: Layout) -> None:
    """Write the sheet: rows prompts, columns dense and variants.

    Raises:
        ConfigError: it cannot be written.
    """
    columns = [(variant.spec.name, _small_print(variant, layout)) for variant in variants]
    rows = [
        (
            [layout.open(variant, item) for variant in variants],
            f"{item.prompt.text} · seed {item.seed}",
        )
        for item in items
    ]
    sheet = sample_sheet(columns, rows)
    write_atomically(path, sheet.save, "save-grid", "choose another file")


def _small_print(variant: Drawn, layout: Layout) -> str:
    if variant.spec.name == DENSE:
        return f"{layout.conditions['width']} x {layout.conditions['height']}, {variant.steps} steps"
    words = variant.label.removeprefix(variant.spec.name).strip()
    return words if variant.steps == layout.conditions["steps"] else f"{variant.steps} steps {words}"
