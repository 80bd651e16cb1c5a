"""Facts that most diffusion transformers of diffusers share, so that a family states only its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmerge.models.base import Block, Host
from tokenmerge.models.grids import patch_of, picture_grid
from tokenmerge.models.placement import example_of


def transformer_host(
    root: Any,
    example: Callable[..., dict[str, Any]],
    blocks: tuple[Block, ...],
    *,
    sample_size: tuple[int, int] | None = None,
    patch: int | None = None,
    latent_frames: int = 1,
    **particulars: Any,
) -> Host:
    """Describe a diffusion transformer.

    Args:
        root: the model. Its sample is called ``hidden_states`` and its timestep ``timestep``, unless
            ``particulars`` name others.
        example: (root, height, width, batch) → arguments by name of a call with latents of that size, without
            the timestep.
        blocks: its transformer blocks in the order in which they run.
        sample_size: height and width of the latents that the model was made for; by default a square with
            the side ``config.sample_size``.
        patch: side of the square of latent positions that makes one token; by default from
            ``config.patch_size``.
        latent_frames: number of latent frames that the model was made for; 1 for pictures.
        particulars: other fields of :class:`Host`. ``grid`` is by default that of a picture.
    """
    size = sample_size or (root.config.sample_size,) * 2
    facts: dict[str, Any] = {
        "sample": "hidden_states",
        "timestep": "timestep",
        "grid": picture_grid,
        **particulars,
    }
    return Host(
        root=root,
        blocks=blocks,
        example=example_of(root, example, facts["timestep"]),
        sample_size=size,
        patch=patch or patch_of(root.config)[2],
        frames=latent_frames // patch_of(root.config)[0] if latent_frames > 1 else 1,
        **facts,
    )
