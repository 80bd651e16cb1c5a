"""AuraFlow: blocks with two streams, then blocks with one. Positions are added before the first block."""

from __future__ import annotations

from typing import Any

from tokenmerge.models.base import Host, Layer, Layout
from tokenmerge.models.family import listed, transformer_host

CLASSES = ("AuraFlowTransformer2DModel",)

_LAYERS = (Layer("attn1", "attn"), Layer("ff", "ff"))


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    double = listed(root, "joint_transformer_blocks", _LAYERS, layout=Layout(outputs=(1,)))
    single = listed(root, "single_transformer_blocks", _LAYERS)
    return transformer_host(root, (*double, *single), text=(256, root.config.joint_attention_dim))
