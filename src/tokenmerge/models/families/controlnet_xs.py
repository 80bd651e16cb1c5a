"""ControlNet-XS: a UNet of SD or SDXL with a small control network inside its stages; both merge."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host
from tokenmerge.models.families.unet import added_conditions, condition_picture, text_width
from tokenmerge.models.placement import blank
from tokenmerge.models.unet_stages import describe_stages

CLASSES = ("UNetControlNetXSModel",)


def describe(root: Any) -> Host:
    """Find the blocks of the UNet and of the control network in its stages."""
    return describe_stages(root, _example)


def _example(root: Any, height: int, width: int, batch: int) -> dict[str, Any]:
    config, zeros = root.config, blank(root, batch)
    sample = zeros(root.in_channels, height, width)
    widths = config.ctrl_conditioning_embedding_out_channels
    return {
        "sample": sample,
        "encoder_hidden_states": zeros(77, text_width(root)),
        "controlnet_cond": condition_picture(zeros, config.ctrl_conditioning_channels, widths, height, width),
        **added_conditions(root, zeros),
    }
