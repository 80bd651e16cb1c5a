"""The folder with the pictures of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.records import key_of
from tokenmerge.measure.bench.variants import DENSE
from tokenmerge.measure.evaluate.prompts import Item
from tokenmerge.measure.evaluate.variants import Drawn
from tokenmerge.measure.files import open_picture, slug

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["PictureStore"]

_DRAWN_AGAIN = "delete it, and the same command draws it again"


@dataclasses.dataclass(frozen=True)
class PictureStore:
    """Paths of pictures: equal for pictures that are drawn alike, different for all others.

    A picture that exists under its path need not be drawn again. One that was drawn with another model, size,
    number of steps or version has another path.

    Args:
        results: the file of records. The pictures are in the folder beside it that has its name.
        conditions: everything that all the pictures depend on, as values that JSON can hold.
    """

    results: Path
    conditions: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Of the pictures drawn under these conditions."""
        c = self.conditions
        name = f"{slug(Path(c['model']).name)}-{c['width']}x{c['height']}-{c['steps']}-steps-{key_of(c)}"
        return self.results.with_suffix("") / name

    def picture(self, variant: Drawn, item: Item) -> Path:
        """Path of a picture, ``FOLDER/VARIANT/PROMPT-SEED.png``."""
        spec = variant.spec
        name = DENSE
        if spec.name != DENSE:
            key = key_of({"variant": spec.name, "settings": dict(spec.settings), "steps": variant.steps})
            name = f"{slug(spec.label, longest=80)}-{key}"
        # The beginning of the prompt is for people; the hash tells apart prompts that begin alike.
        key = key_of({"prompt": item.prompt.text})
        return self.folder / name / f"{slug(item.prompt.text)}-{key}-seed{item.seed}.png"

    def open(self, variant: Drawn, item: Item) -> Image:
        """Read a picture that was drawn.

        Raises:
            ConfigError: it cannot be read, or has another size than was drawn.
        """
        path = self.picture(variant, item)
        picture = open_picture(path, "out", _DRAWN_AGAIN)
        size = self.conditions["width"], self.conditions["height"]
        if picture.size != size:
            raise ConfigError(
                f"out: the picture {path} should have {size[0]}x{size[1]} pixels, and has "
                f"{picture.size[0]}x{picture.size[1]}; {_DRAWN_AGAIN}"
            )
        return picture

    def relative(self, path: Path) -> str:
        """A path as records name it: relative to the folder of the results file."""
        return path.relative_to(self.results.parent).as_posix()
