"""HiDream-I1: joint attention, then one sequence of image and text. Experts take each token by itself.

Text of another layer of the text encoder joins the sequence in each block. Sequences of images that are not
square are padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import OWN_POSITIONS, Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host
from tokenmerge.models.grids import picture_grids
from tokenmerge.ops.once import once

CLASSES = ("HiDreamImageTransformer2DModel",)

_WORDS = 128  # of each of two text encoders
_MASK = TokenArgument("hidden_states_masks", axes=(1,), batched=True)
# Padding and text follow the image.
_BLOCK = Layout(text="last", token_arguments=(OWN_POSITIONS, _MASK))
_LAYERS = (Layer("attn1", "attn1", _BLOCK), Layer("ff", "ff_i", Layout(text="last")))


def describe(root: Any) -> Host:
    """Find the blocks of both lists."""
    double, single = (
        listed(root, name, _LAYERS, inside="block", layout=_BLOCK, block_layout=_BLOCK)
        for name in ("double_stream_blocks", "single_stream_blocks")
    )
    return transformer_host(
        root,
        (*double, *single),
        _others,
        words=3 * _WORDS,
        shares=_shares(root),
        timestep="timesteps",
        grids=_grids,
        sample_size=tuple(root.config.max_resolution),
        without_values=_read_no_values,
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    if arguments["hidden_states"].ndim == 4:
        return picture_grids(root, arguments, last)
    sizes = arguments["img_sizes"]
    if torch.compiler.is_compiling():
        return last.shapes
    read = sizes.tolist if isinstance(sizes, Tensor) else lambda: sizes
    known = once(sizes, "sizes", read) if isinstance(sizes, Tensor) else read()
    found = {(int(rows), int(columns)) for rows, columns in known}
    if len(found) > 1:
        raise UnsupportedModelError(
            f"img_sizes: expected images of one size, got {sorted(found)}; generate one size at a time"
        )
    rows, columns = found.pop()
    return ((1, rows, columns),)


def _shares(root: Any) -> dict[str, float]:
    """Return the share of the tokens that each expert takes."""
    routed: int = root.config.num_routed_experts
    return {".experts.": root.config.num_activated_experts / routed} if routed else {}


def _read_no_values(root: Any) -> None:
    """Let experts take equal shares of the tokens, and leave the result in tokens."""
    root.unpatchify = _tokens
    for module in root.modules():
        if hasattr(module, "moe_infer"):
            module.training = False  # where tokens are sorted by expert in another way
            module.moe_infer = _Shares(module)


def _tokens(tokens: Tensor, sizes: Any, is_training: bool) -> Tensor:
    return tokens


class _Shares:
    """Stands in for the choice of experts: the first one takes what all of them would."""

    def __init__(self, module: Any) -> None:
        self._experts: nn.ModuleList = module.experts
        self._each: int = module.num_activated_experts

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        for _ in range(self._each):
            x = self._experts[0](x)
        return x


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    t5, llama = config.caption_channels
    return {
        "hidden_states": zeros(config.in_channels, height, width),
        "encoder_hidden_states_t5": zeros(_WORDS, t5),
        "encoder_hidden_states_llama3": [zeros(_WORDS, llama)] * (1 + max(config.llama_layers)),
        "pooled_embeds": zeros(config.text_emb_dim),
    }
