"""A tiny random model of every family, of the real classes, with a call of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TEXT = 16  # width of text embeddings
WORDS = 7  # their number


@dataclasses.dataclass(frozen=True)
class Family:
    """How to build and to call a family's model.

    Attributes:
        build: → the model, with seeded random weights, in evaluation mode.
        inputs: (batch, height, width of the token grid) → arguments by name; image i is the same in a batch
            of any size.
        frames: of its token grid.
        merge: settings beside the ratio with which it merges, such as ``max_downsample``.
        pool: whether all images of a batch share a plan.
        attention: names of the sub-layers whose calls must get fewer tokens.
    """

    build: Callable[[], Any]
    inputs: Callable[[int, int, int], dict[str, Any]]
    frames: int = 1
    merge: dict[str, Any] = dataclasses.field(default_factory=dict)
    pool: bool = False
    attention: tuple[str, ...] = ("attn1",)


def seeded(model: nn.Module) -> nn.Module:
    """Fill all weights with noise that lets every part of the model matter: some are zero at the start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 / max(1, parameter[0].numel()) ** 0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * scale + (parameter.ndim < 2) * 0.5
            )
    return model.eval()


def noise(batch: int, *shape: int) -> Tensor:
    """Noise ``[batch, *shape]``; the first images are the same for every batch."""
    return torch.stack(
        [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i in range(batch)]
    )


def _sd3() -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT,
        caption_projection_dim=32,
        pooled_projection_dim=TEXT,
        out_channels=4,
        pos_embed_max_size=24,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )


def _sd3_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 2 * rows, 2 * columns),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "pooled_projections": noise(batch, TEXT),
        "timestep": torch.full((batch,), 500.0),
    }


def _flux() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        axes_dims_rope=(2, 2, 4),
    )


def _flux_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    return {
        "hidden_states": noise(batch, rows * columns, 4),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
        "pooled_projections": noise(batch, TEXT),
        "timestep": torch.full((batch,), 0.5),
        "img_ids": ids,
        "txt_ids": torch.zeros(WORDS, 3),
    }


def _wan() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=32,
    )


def _wan_inputs(batch: int, rows: int, columns: int) -> dict[str, Any]:
    return {
        "hidden_states": noise(batch, 4, 3, 2 * rows, 2 * columns),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": noise(batch, WORDS, TEXT),
    }


FAMILIES: dict[str, Family] = {
    "SD3Transformer2DModel": Family(_sd3, _sd3_inputs, attention=("attn", "attn2")),
    "FluxTransformer2DModel": Family(_flux, _flux_inputs, pool=True, attention=("attn",)),
    "WanTransformer3DModel": Family(_wan, _wan_inputs, frames=3),
}
