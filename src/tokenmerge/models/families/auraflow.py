"""AuraFlow: blocks with two streams, then blocks with one. Positions are added before the first block."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, listed
from tokenmerge.models.family import Blank, transformer_host
from tokenmerge.models.layout import Layout

CLASSES = ("AuraFlowTransformer2DModel",)

_LAYERS = (Layer("attn1", "attn"), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    return transformer_host(
        root,
        _example,
        (
            *listed(root, "joint_transformer_blocks", _LAYERS, layout=Layout(outputs=(1,))),
            *listed(root, "single_transformer_blocks", _LAYERS),
        ),
    )


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    return {
        "hidden_states": zeros(config.in_channels, height, width),
        "encoder_hidden_states": zeros(256, config.joint_attention_dim),
    }
