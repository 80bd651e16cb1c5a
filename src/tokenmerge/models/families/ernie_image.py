"""ERNIE-Image: one sequence of image and text, which is the first axis of the tokens in its blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tokenmerge.models.base import KEY_MASK, OWN_POSITIONS, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = ("ErnieImageTransformer2DModel",)

_WORDS = 256
# The modulation of all tokens, which is the same for all: tensors [n, b, c].
_MODULATION = TokenArgument("temb", axes=(0,), alike=True)
_ATTENTION = Layout(text="last", token_arguments=(OWN_POSITIONS, KEY_MASK))
# Blocks call the positions by another name.
_BLOCK = Layout(
    text="last",
    token_arguments=(TokenArgument("rotary_pos_emb", axes=(1,), batched=True), KEY_MASK, _MODULATION),
    sequence_first=True,
)
_LAYERS = (
    Layer("attn1", "self_attention", _ATTENTION),
    Layer("ff", "mlp", Layout(text="last", sequence_first=True)),
)


def describe(root: Any) -> Host:
    """Find the blocks."""
    return transformer_host(
        root,
        listed(root, "layers", _LAYERS, layout=_BLOCK, block_layout=_BLOCK),
        _others,
        words=_WORDS,
        sample_size=(64, 64),
        without_values=_no_positions,
    )


def _no_positions(root: Any) -> None:
    """Leave out position tables: the model leaves autocast for their device, which knows no meta device."""
    root.pos_embed.forward = _Positions(root.head_dim)


class _Positions:
    """Stands in for the tables of positions, in their shape."""

    def __init__(self, channels: int) -> None:
        self._channels = channels

    def __call__(self, ids: Tensor) -> Tensor:
        return ids.new_empty(*ids.shape[:2], 1, self._channels)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    return {
        "text_bth": zeros(_WORDS, root.config.text_in_dim),
        "text_lens": zeros.integers().fill_(_WORDS),
    }
