"""Tiny vision transformers with random weights, and the paper's forward pass written out with loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from stand_in import imported_without
from torch import Tensor, nn

DEPTH, WIDTH, HEADS, GRID = 4, 32, 4, 6
SHAPE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 2 * WIDTH,
    "image_size": 4 * GRID,
    "patch_size": 4,
}


def vit(**changes: Any) -> transformers.ViTModel:
    torch.manual_seed(0)
    return transformers.ViTModel(transformers.ViTConfig(**{**SHAPE, **changes})).eval()


def deit() -> transformers.DeiTModel:
    torch.manual_seed(0)
    return transformers.DeiTModel(transformers.DeiTConfig(**SHAPE)).eval()


def clip() -> transformers.CLIPVisionModel:
    torch.manual_seed(0)
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SHAPE)).eval()


def clip_both() -> transformers.CLIPModel:
    torch.manual_seed(0)
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.CLIPModel(
        transformers.CLIPConfig(vision_config=SHAPE, text_config={**text, "vocab_size": 50})
    ).eval()


def siglip(pooling: bool = False) -> transformers.SiglipVisionModel:
    torch.manual_seed(0)
    config = transformers.SiglipVisionConfig(**SHAPE, vision_use_head=pooling)
    return transformers.SiglipVisionModel(config).eval()


def _dinov2_settings() -> dict[str, Any]:
    return {**{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, "mlp_ratio": 2}


def dinov2() -> transformers.Dinov2Model:
    torch.manual_seed(0)
    model = transformers.Dinov2Model(transformers.Dinov2Config(**_dinov2_settings())).eval()
    return _with_different_scales(model)


def dinov2_with_registers() -> transformers.Dinov2WithRegistersModel:
    torch.manual_seed(0)
    config = transformers.Dinov2WithRegistersConfig(num_register_tokens=4, **_dinov2_settings())
    return _with_different_scales(transformers.Dinov2WithRegistersModel(config).eval())


def _with_different_scales(model: nn.Module) -> nn.Module:
    """Vary the layer scales, since equal ones would hide where they are applied."""
    for name, parameter in model.named_parameters():
        if "lambda1" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def timm_vits() -> Any:
    return imported_without("timm.models.vision_transformer", "torchvision")


def timm_features() -> Any:
    return imported_without("timm.models._features", "torchvision")


def timm(**changes: Any) -> nn.Module:
    """timm's class without class token; its result are the tokens."""
    torch.manual_seed(0)
    size = {"img_size": 4 * GRID, "patch_size": 4, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    settings = {"mlp_ratio": 2, "num_classes": 0, "class_token": False, "global_pool": "", "qk_norm": True}
    return timm_vits().VisionTransformer(**{**size, **settings, **changes}).eval()


def timm_post_norm() -> nn.Module:
    """timm's class with norms after attention and MLP, of random weights, and a class token."""
    model = timm(block_fn=timm_vits().ResPostBlock, class_token=True)
    for name, weight in model.named_parameters():
        if ".norm" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


def timm_scaled() -> nn.Module:
    """timm's class with register tokens and scales after attention and MLP."""
    model = timm(class_token=True, reg_tokens=4, init_values=0.5, qk_norm=False)
    for name, weight in model.named_parameters():
        if "gamma" in name:
            nn.init.uniform_(weight, 0.5, 1.5)
    return model


PROTECTED = {vit: 1, deit: 2, clip: 1, siglip: 0, dinov2: 1, dinov2_with_registers: 5}
PROTECTED |= {timm: 0, timm_post_norm: 1, timm_scaled: 5}
MODELS = list(PROTECTED)


def pictures(batch: int = 2, size: int = 4 * GRID) -> Tensor:
    """Image i is the same in a batch of any size."""
    make = [torch.Generator().manual_seed(i) for i in range(batch)]
    return torch.stack([torch.randn(3, size, size, generator=g) for g in make])


def tokens(model: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
    """The tokens that a model returns."""
    result = model(x, **arguments)
    return result if isinstance(result, Tensor) else result.last_hidden_state


def layers(model: Any) -> Sequence[Any]:
    """The layers of any of these models."""
    holder = getattr(model, "encoder", model)
    return next(
        getattr(holder, name)
        for name in ("layers", "layer", "blocks")
        if isinstance(getattr(holder, name, 0), nn.Module)
    )


def slow_layer(layer: Any, protected: int) -> Callable[[Tensor, list[int], int], tuple[Tensor, list[int]]]:
    """A layer for the tokens ``[n, c]`` of one image with their sizes: section 3 of arXiv 2210.09461."""
    attention = next(getattr(layer, a) for a in ("attention", "self_attn", "attn") if hasattr(layer, a))
    names = [("layernorm_before", "layernorm_after"), ("layer_norm1", "layer_norm2"), ("norm1", "norm2")]
    norm1, norm2 = next(tuple(getattr(layer, n) for n in pair) for pair in names if hasattr(layer, pair[0]))
    scale1, scale2 = (
        getattr(layer, f"layer_scale{i}", getattr(layer, f"ls{i}", nn.Identity())) for i in (1, 2)
    )
    if type(layer).__name__ == "ResPostBlock":
        norm1, norm2, scale1, scale2 = nn.Identity(), nn.Identity(), norm1, norm2

    def project(x: Tensor) -> tuple[Tensor, ...]:
        if hasattr(attention, "qkv"):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in attention.qkv(x).chunk(3, -1))
            return attention.q_norm(q), attention.k_norm(k), v
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        return tuple(linear(x).unflatten(-1, (HEADS, -1)).transpose(0, 1) for linear in linears)

    out = next(getattr(attention, n) for n in ("o_proj", "out_proj", "proj") if hasattr(attention, n))

    def forward(x: Tensor, sizes: list[int], r: int) -> tuple[Tensor, list[int]]:
        q, k, v = project(norm1(x))
        logits = q @ k.transpose(1, 2) / math.sqrt(WIDTH / HEADS) + torch.tensor(sizes, dtype=x.dtype).log()
        x = x + scale1(out((logits.softmax(-1) @ v).transpose(0, 1).flatten(1)))
        groups = slow_groups(k.mean(0), r, protected)
        merged = [sum(sizes[i] * x[i] for i in group) / sum(sizes[i] for i in group) for group in groups]
        x, sizes = torch.stack(merged), [sum(sizes[i] for i in group) for group in groups]
        return x + scale2(layer.mlp(norm2(x))), sizes

    return forward


def slow_groups(metric: Tensor, r: int, protected: int) -> list[list[int]]:
    """The tokens that each remaining token stands for, in the order of the remaining tokens."""
    if r == 0:
        return [[i] for i in range(len(metric))]
    free = range(protected, len(metric))
    a, b = [i for i in free if i % 2 == 0], [i for i in free if i % 2 == 1]
    rows = metric.tolist()

    def cosine(i: int, j: int) -> float:
        dot = sum(x * y for x, y in zip(rows[i], rows[j], strict=True))
        return dot / math.hypot(*rows[i]) / math.hypot(*rows[j])

    edges = [max((cosine(i, j), i, j) for j in b) for i in a]
    merged = sorted(edges, reverse=True)[: min(r, len(free) // 2)]
    gone = {i for _, i, _ in merged}
    stay = [*range(protected), *(i for i in a if i not in gone), *b]
    return [[i, *(source for _, source, j in merged if j == i)] for i in stay]


def slow_tokens(model: Any, x: Tensor, r: Sequence[int], protected: int) -> list[tuple[Tensor, list[int]]]:
    """The result of the last layer of a model for each image, and the sizes of its tokens.

    The input of the first layer is taken from the model itself.
    """
    seen = []
    handle = layers(model)[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    handle.remove()
    results = []
    for start in seen[0]:
        y, sizes = start, [1] * len(start)
        for layer, number in zip(layers(model), r, strict=True):
            y, sizes = slow_layer(layer, protected)(y, sizes, number)
        results.append((y, sizes))
    return results
