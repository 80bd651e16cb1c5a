"""Tiny hosts with random weights: classes of diffusers, and a UNet laid out as in the CompVis repository."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import ControlNetModel, ControlNetUnionModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

TEXT = 16


def unet(**changes: object) -> UNet2DConditionModel:
    """Attention at levels 1 and 2: seven blocks, three of them at level 1."""
    torch.manual_seed(0)
    settings = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
        "cross_attention_dim": TEXT,
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    }
    return UNet2DConditionModel(**{**settings, **changes}).eval()


def sdxl(layers: int = 2, **changes: object) -> UNet2DConditionModel:
    """As in SDXL: no attention at level 1, several blocks a transformer, size and pooled text."""
    return unet(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=layers,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=8 * 6 + TEXT,
        **changes,
    )


CONTROLNET = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "cross_attention_dim": TEXT,
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "conditioning_embedding_out_channels": (8, 16),
}


def controlnet(**changes: object) -> ControlNetModel:
    torch.manual_seed(1)
    return ControlNetModel(**{**CONTROLNET, **changes}).eval()


def controlnet_union() -> ControlNetUnionModel:
    torch.manual_seed(1)
    return ControlNetUnionModel(
        **CONTROLNET,
        num_control_type=2,
        num_trans_channel=32,
        num_trans_head=4,
        num_proj_channel=32,
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=16,
    ).eval()


def inputs(batch: int = 2, height: int = 16, width: int = 16, seed: int = 0) -> dict[str, object]:
    """Arguments of one call of :func:`unet`; image i is the same in a batch of any size."""
    make = [torch.Generator().manual_seed(1000 * seed + i) for i in range(batch)]
    return {
        "sample": torch.stack([torch.randn(4, height, width, generator=g) for g in make]),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.stack([torch.randn(7, TEXT, generator=g) for g in make]),
    }


def inputs_at(index: int, batch: int = 1) -> dict[str, object]:
    """Arguments of a call of :func:`unet` in a step: its sample drifts away, as a scheduler moves it."""
    first, other = inputs(batch), inputs(batch, seed=1)
    return {**first, "sample": first["sample"] + 0.2 * index * other["sample"]}


def sdxl_inputs(batch: int = 2, height: int = 16, width: int = 16) -> dict[str, object]:
    conditions = {"text_embeds": torch.zeros(batch, TEXT), "time_ids": torch.zeros(batch, 6)}
    return {**inputs(batch, height, width), "added_cond_kwargs": conditions}


@torch.no_grad()
def call(model: nn.Module, **arguments: object) -> Tensor:
    return model(**arguments).sample


def counting(compiled: list[nn.Module]) -> Callable:
    """A backend of torch.compile that runs graphs as they are, and appends each to a list."""

    def backend(graph: nn.Module, example: list) -> Callable:
        compiled.append(graph)
        return graph.forward

    return backend


# CompVis models.
# The names of classes, attributes and methods matter: the repository's models are recognised by them.


class CrossAttention(nn.Module):
    def __init__(self, width: int, context_width: int | None = None, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context_width or width, width, bias=False)
        self.to_v = nn.Linear(context_width or width, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class BasicTransformerBlock(nn.Module):
    def __init__(self, width: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.disable_self_attn = False
        self.use_checkpoint = use_checkpoint
        self.attn1, self.attn2 = CrossAttention(width), CrossAttention(width, TEXT)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.use_checkpoint:
            return checkpoint(self._forward, x, context, use_reentrant=False)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.attn1(self.norm1(x), context=context if self.disable_self_attn else None) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.ff(self.norm3(x)) + x


class SpatialTransformer(nn.Module):
    def __init__(self, width: int, use_checkpoint: bool) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(width, use_checkpoint)])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        height, width = x.shape[-2:]
        tokens = x.flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        return x + tokens.transpose(1, 2).unflatten(2, (height, width))


class Downsample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x, 2, ceil_mode=True)


class Upsample(nn.Module):
    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        return nn.functional.interpolate(x, size)


class UNetModel(nn.Module):
    """Attention at levels 1 and 2, one block in each of four places."""

    def __init__(self, width: int = 32, use_checkpoint: bool = False) -> None:
        super().__init__()
        self.image_size, self.in_channels = 16, 4
        self.time = nn.Linear(1, width)
        self.input_blocks = nn.ModuleList(
            [
                nn.ModuleList([nn.Conv2d(4, width, 1), SpatialTransformer(width, use_checkpoint)]),
                nn.ModuleList([Downsample()]),
                nn.ModuleList([SpatialTransformer(width, use_checkpoint)]),
            ]
        )
        self.middle_block = nn.ModuleList([SpatialTransformer(width, use_checkpoint)])
        self.output_blocks = nn.ModuleList(
            [nn.ModuleList([Upsample()]), nn.ModuleList([SpatialTransformer(width, use_checkpoint)])]
        )
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor, timesteps: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        h = self.input_blocks[0][0](x) + self.time(timesteps[:, None] / 1000)[..., None, None]
        skip = self.input_blocks[0][1](h, context)
        h = self.input_blocks[1][0](skip)
        h = self.input_blocks[2][0](h, context)
        h = self.middle_block[0](h, context)
        h = self.output_blocks[0][0](h, skip.shape[-2:]) + skip
        return self.out(self.output_blocks[1][0](h, context))


class LatentDiffusion(nn.Module):
    """``model.model.diffusion_model`` is the UNet."""

    def __init__(self, **settings: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.diffusion_model = UNetModel(**settings)


def compvis_inputs(batch: int = 2, height: int = 16, width: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    arguments = inputs(batch, height, width)
    return arguments["sample"], torch.full((batch,), 500.0), arguments["encoder_hidden_states"]
