"""Facts about vision transformers: where their layers are, and the names of their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import is_a
from tokenmerge.models.find import parts


@dataclasses.dataclass(frozen=True)
class Family:
    """Models with the same structure.

    Attributes:
        model: class of the encoder.
        around: classes of models that contain the encoder and use only its class token or pooled output.
        averaging: classes of models that contain the encoder and average over its patches.
        layer: class of a layer.
        post_norm: class of a layer whose norms come after attention and MLP; empty: there is none.
        layers: path of the list of layers.
        keys: path, in a layer, of the module that returns the keys.
        norm: path, in a layer, of the norm before or after the MLP.
        collector: method of the model that returns the tokens of several layers; empty: its call does.
        mask: name of the layer's argument that is added to the attention logits.
        class_tokens: number of class tokens before the patches.
    """

    model: str
    around: tuple[str, ...]
    averaging: tuple[str, ...]
    layer: str
    layers: str
    keys: str
    norm: str
    post_norm: str = ""
    collector: str = ""
    mask: str = "attention_mask"
    class_tokens: int = 1


_VIT: dict[str, Any] = {"layers": "layers", "keys": "attention.k_proj", "norm": "layernorm_after"}
_DINOV2: dict[str, Any] = {"layers": "encoder.layer", "keys": "attention.k_proj", "norm": "norm2"}
_CLIP: dict[str, Any] = {"layers": "encoder.layers", "keys": "self_attn.k_proj", "norm": "layer_norm2"}
_TIMM: dict[str, Any] = {
    "layers": "blocks",
    "keys": "attn.k_norm",
    "norm": "norm2",
    "post_norm": "ResPostBlock",
    "collector": "forward_intermediates",
    "mask": "attn_mask",
}

FAMILIES = (
    Family("ViTModel", ("ViTForImageClassification",), (), "ViTLayer", **_VIT),
    Family(
        "DeiTModel",
        ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher"),
        (),
        "DeiTLayer",
        **_VIT,
    ),
    Family("Dinov2Model", (), ("Dinov2ForImageClassification",), "Dinov2Layer", **_DINOV2),
    Family("Dinov2Backbone", (), (), "Dinov2Layer", **_DINOV2),
    Family(
        "Dinov2WithRegistersModel",
        (),
        ("Dinov2WithRegistersForImageClassification",),
        "Dinov2WithRegistersLayer",
        **_DINOV2,
    ),
    Family("Dinov2WithRegistersBackbone", (), (), "Dinov2WithRegistersLayer", **_DINOV2),
    Family(
        "CLIPVisionModel",
        ("CLIPModel", "CLIPVisionModelWithProjection"),
        ("CLIPForImageClassification",),
        "CLIPEncoderLayer",
        **_CLIP,
    ),
    # Its own head pools the patches by attention, where each patch has to count once.
    Family(
        "SiglipVisionModel",
        ("SiglipModel",),
        ("SiglipForImageClassification",),
        "SiglipEncoderLayer",
        **_CLIP,
        class_tokens=0,
    ),
    # The class of timm. The one of the same name in torchvision has no blocks.
    Family("VisionTransformer", ("FeatureGetterNet",), (), "Block", **_TIMM),
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of an encoder.

    Attributes:
        path: its qualified name in the encoder.
        module: the layer. It takes the tokens ``[b, n, c]`` as its first argument and returns tokens.
        keys: path of the module that returns the keys, ``[b, n, heads * d]`` or ``[b, heads, n, d]``.
        first: path of the module with which the branch of the MLP begins: the norm before it, or itself.
        last: path of the module with which it ends: the MLP, or the norm after it. What is between the result
            of this module and the sum treats each token alike.
        head_dim: d for keys ``[b, n, heads * d]``; None for ``[b, heads, n, d]``.
    """

    path: str
    module: nn.Module
    keys: str
    first: str
    last: str
    head_dim: int | None


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A vision transformer.

    Attributes:
        model: the module that turns pictures into tokens.
        layers: its layers in the order in which they run.
        protected: number of tokens before the patches: class, distillation and register tokens.
        mask: name of the layers' argument that is added to the attention logits.
        collector: method of the model that returns the tokens of several layers; empty: its call does.
        by_keyword: whether the model passes unknown keyword arguments to every layer.
        averages: whether its head, or that of the model around it, averages over the patches.
        image_size: height and width of the pictures that it was made for, in pixels.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    protected: int
    mask: str
    collector: str
    by_keyword: bool
    averages: bool
    image_size: tuple[int, int]

    def example(self, height: int, width: int, batch: int) -> dict[str, Any]:
        """Arguments by name of a call with ``batch`` pictures of ``height`` × ``width`` pixels."""
        like = next(self.model.parameters())
        channels = next(m for m in self.model.modules() if isinstance(m, nn.Conv2d)).in_channels
        picture = torch.zeros(batch, channels, height, width, device=like.device, dtype=like.dtype)
        if not self.by_keyword:
            return {"x": picture}
        arguments: dict[str, Any] = {
            "pixel_values": picture,
            "output_hidden_states": False,
            "output_attentions": False,
        }
        if (height, width) != self.image_size and not is_a(self.model, *_ALWAYS_INTERPOLATE):
            arguments["interpolate_pos_encoding"] = True
        return arguments


_ALWAYS_INTERPOLATE = (
    "Dinov2Model",
    "Dinov2Backbone",
    "Dinov2WithRegistersModel",
    "Dinov2WithRegistersBackbone",
)


def find_encoders(model: object) -> tuple[Encoder, ...]:
    """Every known vision transformer in a pipeline or a model; there may be none.

    Args:
        model: a model of transformers or timm, also compiled or wrapped, or a pipeline with such a model.

    Raises:
        UnsupportedModelError: a vision transformer has layers with an unknown structure.
    """
    return tuple(encoder for part in parts(model) for encoder in _encoders(part))


def _encoders(part: nn.Module) -> Iterator[Encoder]:
    for family in FAMILIES:
        averages = is_a(part, *family.averaging)
        if is_a(part, family.model, *family.around) or averages:
            for module in part.modules():
                if is_a(module, family.model) and hasattr(module, family.layers.partition(".")[0]):
                    yield _describe(module, family, averages)


def _describe(model: Any, family: Family, averages: bool) -> Encoder:
    blocks: Any = model.get_submodule(family.layers)
    layers = tuple(_layer(f"{family.layers}.{i}", block, family) for i, block in enumerate(blocks))
    if hasattr(model, "num_prefix_tokens"):  # timm
        return Encoder(
            model=model,
            layers=layers,
            protected=model.num_prefix_tokens,
            mask=family.mask,
            collector=family.collector,
            by_keyword=False,
            averages=model.global_pool not in ("", "token"),
            image_size=model.patch_embed.img_size,
        )
    config, size = model.config, model.config.image_size
    distilled = hasattr(model.embeddings, "distillation_token")
    return Encoder(
        model=model,
        layers=layers,
        protected=family.class_tokens + distilled + getattr(config, "num_register_tokens", 0),
        mask=family.mask,
        collector=family.collector,
        by_keyword=True,
        averages=averages or getattr(model, "use_head", False),
        image_size=(size, size) if isinstance(size, int) else tuple(size),
    )


def _layer(path: str, module: Any, family: Family) -> Layer:
    if is_a(module, family.layer):
        first, last = family.norm, "mlp"
    elif is_a(module, family.post_norm):
        first, last = "mlp", family.norm
    else:
        known = " or ".join(filter(None, (family.layer, family.post_norm)))
        raise UnsupportedModelError(
            f"{path} is a {type(module).__name__}. Tokens merge between the attention and the MLP of a "
            f"layer, which works in layers of class {known}; pass a model with such layers"
        )
    try:
        for name in (family.keys, family.norm, "mlp"):
            module.get_submodule(name)
        attention, _, keys = family.keys.partition(".")
        head_dim = None if keys == "k_norm" else getattr(module, attention).head_dim
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{path}: expected a {type(module).__name__} with the parts that it has in transformers 5.23 or "
            f"timm 1.0, got: {error}; install one of these versions, or pass a model whose layers were not "
            "changed"
        ) from error
    return Layer(path, module, family.keys, first, last, head_dim)
