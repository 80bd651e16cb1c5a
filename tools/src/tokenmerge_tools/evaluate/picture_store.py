"""The folder with the images of an evaluation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge_tools.evaluate.prompts import Item
from tokenmerge_tools.files import FREE_SPACE, open_picture, opened_picture, slug, write_atomically
from tokenmerge_tools.records.kinds import key_of
from tokenmerge_tools.variants.variant import DENSE, Variant

if TYPE_CHECKING:
    from PIL.Image import Image

CONTINUES = "the finished images are safe; run the same command again to continue"
_DRAWN_AGAIN = "delete it, and the same command draws it again"
# Keys of the text chunks in a PNG.
_SECONDS = "tokenmerge seconds"
_CONFIG = "tokenmerge config"
_COST = "tokenmerge cost"
# Each frame is shown for this long. Pillow stores equal frames in a row as one that is shown for longer.
_MILLISECONDS = 100


@dataclasses.dataclass(frozen=True)
class PictureStore:
    """Paths of images. Two images have the same path only if they are drawn in the same way.

    An image whose path exists is not drawn again. Another model, size, number of steps or version gives
    another path. The images are in a folder beside the results file, with the same name. ``conditions`` has
    everything that all images depend on, in JSON-compatible values.
    """

    results: Path
    conditions: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of the images under these conditions."""
        c = self.conditions
        name = f"{slug(Path(c['model']).name)}-{c['width']}x{c['height']}-{c['steps']}-steps-{key_of(c)}"
        return self.results.with_suffix("") / name

    def picture(self, variant: Variant, item: Item) -> Path:
        """Return the path of an image, ``FOLDER/VARIANT/PROMPT-SEED.png``."""
        name = DENSE
        if variant.name != DENSE:
            key = key_of({"variant": variant.name, "settings": dict(variant.settings)})
            name = f"{slug(variant.label, longest=80)}-{key}"
        # The key distinguishes prompts with the same beginning.
        key = key_of({"prompt": item.prompt})
        return self.folder / name / f"{slug(item.prompt)}-{key}-seed{item.seed}.png"

    def save(
        self,
        variant: Variant,
        item: Item,
        image: Image | Sequence[Image],
        seconds: float | None,
        config: ToMeConfig | None = None,
        advice: str = FREE_SPACE,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        """Write an image, or the frames of a video. It appears on the disk only when it is complete.

        The file keeps the seconds that it took, all settings that it was drawn with, and other known costs.
        """
        from PIL.PngImagePlugin import PngInfo

        about = PngInfo()
        if seconds is not None:
            about.add_text(_SECONDS, f"{seconds:.6g}")
        if cost:
            about.add_text(_COST, json.dumps(cost))
        if config is not None:
            about.add_text(_CONFIG, json.dumps(config.to_dict(), sort_keys=True))
        if isinstance(image, Sequence):
            if len(image) != self.length:
                raise ConfigError(
                    f"frames: this pipeline made a video of {len(image)} frames instead of {self.length}; "
                    f"give --frames {len(image)}"
                )
            write = partial(write_video, frames=image, about=about)
        else:
            write = partial(image.save, pnginfo=about)
        write_atomically(self.picture(variant, item), write, advice=advice)

    def seconds(self, variant: Variant, item: Item) -> float:
        """Return the seconds that an image took to draw, or NaN if the file does not have them."""
        return float(self._text(variant, item, _SECONDS) or math.nan)

    def cost(self, variant: Variant, item: Item) -> dict[str, float]:
        """Return the other costs of an image: the peak memory in bytes, and the speed-up by operations."""
        return dict(json.loads(self._text(variant, item, _COST) or "{}"))

    def config(self, variant: Variant, item: Item) -> str | None:
        """Return all settings that an image was drawn with, as JSON, or None if the file has none."""
        return self._text(variant, item, _CONFIG)

    def _text(self, variant: Variant, item: Item, key: str) -> str | None:
        import PIL.Image

        with PIL.Image.open(self.picture(variant, item)) as image:
            text = image.info.get(key)
        return text if isinstance(text, str) else None

    def frames(self, variant: Variant, item: Item) -> list[Image]:
        """Read the frames of a video. An image counts as a single frame."""
        path = self.picture(variant, item)
        image = open_picture(path, "out", _DRAWN_AGAIN)
        size = self.conditions["width"], self.conditions["height"]
        if image.size != size:
            raise ConfigError(
                f"out: the image {path} should have {size[0]}x{size[1]} pixels, but has "
                f"{image.size[0]}x{image.size[1]}; {_DRAWN_AGAIN}"
            )
        return [image] if self.length is None else read_video(path, self.length, "out", _DRAWN_AGAIN)

    @property
    def length(self) -> int | None:
        """Number of frames of each video, or None if images are drawn."""
        return self.conditions.get("frames")

    def relative(self, path: Path) -> str:
        """Return the path in a record, which is relative to the folder of the results file."""
        return path.relative_to(self.results.parent).as_posix()


def write_video(path: Path, frames: Sequence[Image], about: Any) -> None:
    """Write frames of one size to a ``.png`` file; ``about`` holds its texts."""
    first, *others = frames
    first.save(
        path, save_all=True, append_images=others, duration=_MILLISECONDS, pnginfo=about, default_image=False
    )


def read_video(path: Path, frames: int, option: str, advice: str) -> list[Image]:
    """Read the frames that :func:`write_video` wrote, as RGB. The file must have ``frames`` of them."""
    from PIL import ImageSequence

    found: list[Image] = []
    with opened_picture(path, option, advice) as video:
        for frame in ImageSequence.Iterator(video):
            # A video whose frames are all equal is a plain image.
            shown = frame.info.get("duration", frames * _MILLISECONDS)
            found += [frame.convert("RGB")] * max(1, round(shown / _MILLISECONDS))
    if len(found) != frames:
        raise ConfigError(
            f"{option}: the video {path} should have {frames} frames, but has {len(found)}; {advice}"
        )
    return found
