"""Videos as animated PNG files, which are lossless and play in browsers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmerge.errors import ConfigError
from tokenmerge_tools.files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

# Each frame is shown for this long. Pillow stores equal frames in a row as one that is shown for longer.
_MILLISECONDS = 100


def write_video(path: Path, frames: Sequence[Image], about: Any) -> None:
    """Write frames of one size to a ``.png`` file; ``about`` holds its texts."""
    first, *others = frames
    first.save(
        path, save_all=True, append_images=others, duration=_MILLISECONDS, pnginfo=about, default_image=False
    )


def read_video(path: Path, frames: int, option: str, advice: str) -> list[Image]:
    """Read the frames of a file that :func:`write_video` wrote, as RGB.

    Args:
        path: path of the file.
        frames: number of frames that it should have.
        option: name of the option that error messages begin with.
        advice: what the user can do about an error.

    Raises:
        ConfigError: the file cannot be read, or has another number of frames.
    """
    import PIL.Image
    from PIL import ImageSequence

    content = io.BytesIO(read_bytes(path, option, advice))
    found: list[Image] = []
    try:
        with PIL.Image.open(content) as video:
            for frame in ImageSequence.Iterator(video):
                # A video whose frames are all equal is a plain picture.
                shown = frame.info.get("duration", frames * _MILLISECONDS)
                found += [frame.convert("RGB")] * max(1, round(shown / _MILLISECONDS))
    except (OSError, SyntaxError, ValueError, PIL.Image.DecompressionBombError) as error:
        raise ConfigError(f"{option}: cannot read the video {path} (it is not a video); {advice}") from error
    if len(found) != frames:
        raise ConfigError(
            f"{option}: the video {path} should have {frames} frames, but has {len(found)}; {advice}"
        )
    return found
