"""Facts about vision transformers: where their layers are, and the names of their parts."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import is_a
from tokenmerge.models.find import parts


@dataclasses.dataclass(frozen=True)
class Family:
    """Models with the same structure."""

    model: str  # class of the encoder
    layer: str  # class of a layer
    layers: str  # path of the list of layers
    keys: str  # path, in a layer, of the module that returns the keys
    norm: str  # path, in a layer, of the norm before or after the MLP
    # Classes of models that contain the encoder and use only its class token or pooled output.
    around: tuple[str, ...] = ()
    averaging: tuple[str, ...] = ()  # classes of models that contain the encoder and average over its patches
    post_norm: str = ""  # class of a layer whose norms come after attention and MLP, or empty without one
    # Method of the model that returns the tokens of several layers, or empty if its call does.
    collector: str = ""
    mask: str = "attention_mask"  # name of the layer's argument that is added to the attention logits
    class_tokens: int = 1  # number of class tokens before the patches


_VIT = ("layers", "attention.k_proj", "layernorm_after")
_DINOV2 = ("encoder.layer", "attention.k_proj", "norm2")
_CLIP = ("encoder.layers", "self_attn.k_proj", "layer_norm2")
_DEIT_HEADS = ("DeiTForImageClassification", "DeiTForImageClassificationWithTeacher")
_REGISTERS = "Dinov2WithRegisters"
_REGISTERS_LAYER = "Dinov2WithRegistersLayer"

FAMILIES = (
    Family("ViTModel", "ViTLayer", *_VIT, around=("ViTForImageClassification",)),
    Family("DeiTModel", "DeiTLayer", *_VIT, around=_DEIT_HEADS),
    Family("Dinov2Model", "Dinov2Layer", *_DINOV2, averaging=("Dinov2ForImageClassification",)),
    Family("Dinov2Backbone", "Dinov2Layer", *_DINOV2),
    Family(
        f"{_REGISTERS}Model", _REGISTERS_LAYER, *_DINOV2, averaging=(f"{_REGISTERS}ForImageClassification",)
    ),
    Family(f"{_REGISTERS}Backbone", _REGISTERS_LAYER, *_DINOV2),
    Family(
        "CLIPVisionModel",
        "CLIPEncoderLayer",
        *_CLIP,
        around=("CLIPModel", "CLIPVisionModelWithProjection"),
        averaging=("CLIPForImageClassification",),
    ),
    # Its own head pools the patches by attention, where each patch has to count once.
    Family(
        "SiglipVisionModel",
        "SiglipEncoderLayer",
        *_CLIP,
        around=("SiglipModel",),
        averaging=("SiglipForImageClassification",),
        class_tokens=0,
    ),
    # The class of timm. The one of the same name in torchvision has no blocks.
    Family(
        "VisionTransformer",
        "Block",
        *("blocks", "attn.k_norm", "norm2"),
        around=("FeatureGetterNet",),
        post_norm="ResPostBlock",
        collector="forward_intermediates",
        mask="attn_mask",
    ),
)


@dataclasses.dataclass(frozen=True)
class EncoderLayer:
    """One layer of an encoder. It takes the tokens ``[b, n, c]`` as its first argument and returns tokens."""

    path: str  # its qualified name in the encoder
    # Paths of the modules whose methods change. The first one returns the keys, ``[b, n, heads * d]`` or
    # ``[b, heads, n, d]``. The branch of the MLP begins with the second, the norm before it or itself, and
    # ends with the third, the MLP or the norm after it. All up to the sum treats each token alike.
    parts: tuple[str, str, str]
    head_dim: int | None  # d for keys ``[b, n, heads * d]``; None for ``[b, heads, n, d]``


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Facts about a vision transformer."""

    layers: tuple[EncoderLayer, ...]  # its layers in the order in which they run
    protected: int  # number of tokens before the patches: class, distillation and register tokens
    family: Family
    by_keyword: bool  # whether the model passes unknown keyword arguments to every layer
    averages: bool  # whether its head, or that of the model around it, averages over the patches
    image_size: tuple[int, int]  # height and width of the images that it was made for, in pixels

    def example(self, model: nn.Module, height: int, width: int, batch: int) -> dict[str, Any]:
        """Return the arguments by name of a call with ``batch`` images of ``height`` × ``width`` pixels."""
        channels = next(m for m in model.modules() if isinstance(m, nn.Conv2d)).in_channels
        image = next(model.parameters()).new_zeros(batch, channels, height, width)
        if not self.by_keyword:
            return {"x": image}
        arguments = {"pixel_values": image, "output_hidden_states": False, "output_attentions": False}
        if (height, width) != self.image_size and not type(model).__name__.startswith("Dinov2"):
            arguments["interpolate_pos_encoding"] = True
        return arguments


def find_encoders(model: object) -> dict[nn.Module, Encoder]:
    """Find every known vision transformer in a pipeline or a model; there may be none."""
    found: dict[nn.Module, Encoder] = {}
    for part in parts(model):
        for family in FAMILIES:
            averages = is_a(part, *family.averaging)
            if is_a(part, family.model, *family.around) or averages:
                for module in part.modules():
                    if is_a(module, family.model) and hasattr(module, family.layers.partition(".")[0]):
                        found[module] = _describe(module, family, averages)
    return found


def _describe(model: Any, family: Family, averages: bool) -> Encoder:
    blocks: Any = model.get_submodule(family.layers)
    layers = tuple(_layer(f"{family.layers}.{i}", block, family) for i, block in enumerate(blocks))
    if hasattr(model, "num_prefix_tokens"):  # timm
        by_keyword = False
        protected = model.num_prefix_tokens
        image_size = model.patch_embed.img_size
        averages = model.global_pool not in ("", "token")
    else:
        by_keyword = True
        config = model.config
        distilled = hasattr(model.embeddings, "distillation_token")
        protected = family.class_tokens + distilled + getattr(config, "num_register_tokens", 0)
        size = config.image_size
        image_size = (size, size) if isinstance(size, int) else tuple(size)
        averages = averages or getattr(model, "use_head", False)
    return Encoder(layers, protected, family, by_keyword, averages, image_size)


def _layer(path: str, module: Any, family: Family) -> EncoderLayer:
    if is_a(module, family.layer):
        ends = (family.norm, "mlp")
    elif is_a(module, family.post_norm):
        ends = ("mlp", family.norm)
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
            f"timm 1.0, got: {error}; install one of these versions, or pass a model with unchanged layers"
        ) from error
    return EncoderLayer(path, (family.keys, *ends), head_dim)
