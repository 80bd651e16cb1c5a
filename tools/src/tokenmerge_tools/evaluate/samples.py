"""Sample pictures: records for the sliders of the report, and the sheet of samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tokenmerge.pictures import sample_sheet
from tokenmerge_tools.evaluate.draw import CONTINUES
from tokenmerge_tools.evaluate.drawn import Drawn
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.files import write_atomically
from tokenmerge_tools.records.kinds import SampleRecord
from tokenmerge_tools.variants.variant import DENSE


def pack(items: Sequence[Item], variants: Sequence[Drawn], store: PictureStore) -> dict[Path, bytes]:
    """Read the sample pictures on this machine, to send their bytes to the first process."""
    paths = [store.picture(variant, item) for item in items for variant in variants]
    return {path: path.read_bytes() for path in paths if path.exists()}


def unpack(packed: Iterable[Mapping[Path, bytes]]) -> None:
    """Write the pictures that this machine does not have.

    Raises:
        ConfigError: a picture cannot be written.
    """
    for files in packed:
        for path, content in files.items():
            if not path.exists():
                write_atomically(path, partial(Path.write_bytes, data=content), advice=CONTINUES)


def sample_records(
    items: Sequence[Item], variants: Sequence[Drawn], store: PictureStore
) -> list[SampleRecord]:
    """Make a record for each item and each variant except dense, which must come first."""
    dense, *others = variants
    return [
        SampleRecord(
            prompt=item.prompt.text,
            seed=item.seed,
            variant=variant.spec.name,
            settings=dict(variant.spec.settings),
            dense=store.relative(store.picture(dense, item)),
            image=store.relative(store.picture(variant, item)),
        )
        for item in items
        for variant in others
    ]


def write_sheet(path: Path, items: Sequence[Item], variants: Sequence[Drawn], store: PictureStore) -> None:
    """Write the sheet of samples, with one row for each prompt and one column for each variant.

    Raises:
        ConfigError: the sheet cannot be written.
    """
    columns = [(variant.spec.name, _small_print(variant, store)) for variant in variants]
    rows = [
        (
            [store.open(variant, item) for variant in variants],
            f"{item.prompt.text} · seed {item.seed}",
        )
        for item in items
    ]
    sheet = sample_sheet(columns, rows)
    write_atomically(path, sheet.save, "save-grid", "choose another file")


def _small_print(variant: Drawn, store: PictureStore) -> str:
    if variant.spec.name == DENSE:
        return f"{store.conditions['width']} x {store.conditions['height']}, {variant.steps} steps"
    words = variant.label.removeprefix(variant.spec.name).strip()
    return words if variant.steps == store.conditions["steps"] else f"{variant.steps} steps {words}"
