"""UniDiffuser: one sequence of timesteps, text, an image embedding and the image, with skip connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout
from tokenmerge.models.family import Blank, described, listed, transformer_host
from tokenmerge.models.grids import picture_grids

CLASSES = ("UniDiffuserModel",)

_SEQUENCE = Layout(text="first")
_LAYERS = (
    Layer("attn1", "attn1", _SEQUENCE),
    Layer("attn2", "attn2", _SEQUENCE),
    Layer("ff", "ff", _SEQUENCE),
)
_ONE_SIZE = "its learned positions are for images of one size"


def describe(root: Any) -> Host:
    """Find the blocks on both sides of the middle one."""
    first, last = (f"transformer.transformer_{side}_blocks" for side in ("in", "out"))
    facts: dict[str, Any] = {"layout": _SEQUENCE, "block_layout": _SEQUENCE}
    middle = "transformer.transformer_mid_block"
    blocks = (
        *listed(root, first, _LAYERS, is_read_between=True, **facts),
        described(middle, root.get_submodule(middle), _LAYERS, **facts),
        *listed(root, last, _LAYERS, inside="block", **facts),
    )
    return transformer_host(
        root,
        blocks,
        _others,
        words=root.config.num_text_tokens + 3,
        sample="latent_image_embeds",
        timestep=_time,
        grids=_grids,
        limits=(_ONE_SIZE,),
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    return picture_grids(root, {"hidden_states": arguments["latent_image_embeds"]}, last)


def _time(root: Any, arguments: Arguments) -> Tensor:
    """Return the timestep of the step: what is not denoised has a timestep of 0, or the largest one."""
    image, text = (torch.as_tensor(arguments[f"timestep_{part}"]).max() for part in ("img", "text"))
    text = text.to(image.device)
    return torch.where(
        torch.minimum(image, text) == 0, torch.maximum(image, text), torch.minimum(image, text)
    )


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    return {
        "latent_image_embeds": zeros(config.in_channels, height, width),
        "image_embeds": zeros(1, config.clip_img_dim),
        "prompt_embeds": zeros(config.num_text_tokens, config.text_dim),
        "timestep_img": zeros().fill_(500),
        "timestep_text": zeros(),
    }
