"""Small trained models that come with the package, for measuring quality without a download."""

from __future__ import annotations

import logging
from pathlib import Path

NAMES = ("emoji-unet", "emoji-mmdit")


def path(name: str = "emoji-unet") -> Path:
    """Return the folder of a bundled model, for `from_pretrained` of diffusers.

    From then on, diffusers does not warn about the class of a VAE, since these models have a small one.

    Args:
        name: One of `NAMES`. `emoji-unet` loads as `StableDiffusionPipeline`, `emoji-mmdit` as
            `StableDiffusion3Pipeline`.

    Raises:
        ValueError: If no bundled model has that name.

    >>> path("emoji-unet").name
    'emoji-unet'
    """
    if name not in NAMES:
        raise ValueError(f"no bundled model is named {name!r}; use one of {', '.join(map(repr, NAMES))}")
    logging.getLogger("diffusers.pipelines.pipeline_utils").addFilter(lambda r: "for vae" not in str(r.msg))
    return Path(__file__).parent / name
