"""UNets and ControlNets of diffusers: SD 1.x, 2.x, SDXL, models derived from them, and AudioLDM 2.

Of ControlNet-XS, the UNet and the small control network inside its stages merge.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tokenmerge.models.base import Host, is_a
from tokenmerge.models.family import Blank
from tokenmerge.models.unet_stages import describe_stages

_AUDIO = "AudioLDM2UNet2DConditionModel"  # on spectrograms (rows: time, columns: frequency)
_XS = "UNetControlNetXSModel"
_CONTROLNETS = ("ControlNetModel", "ControlNetUnionModel")
CLASSES = ("UNet2DConditionModel", _AUDIO, _XS, *_CONTROLNETS)


def describe(root: Any) -> Host:
    """Find the blocks of a UNet or a ControlNet."""
    example = _example_with_sound if is_a(root, _AUDIO) else _example_of_xs if is_a(root, _XS) else _example
    return describe_stages(root, example, controlnet=is_a(root, *_CONTROLNETS))


def _text_width(root: Any) -> int:
    """Return the width of the text embeddings that a UNet is called with."""
    width = getattr(root.config, "encoder_hid_dim", None) or root.config.cross_attention_dim
    return width[0] if isinstance(width, list | tuple) else width


def added_conditions(root: Any, zeros: Blank) -> dict[str, Any]:
    """Return the argument ``added_cond_kwargs`` of SDXL and IP-Adapters, by name; empty for other models."""
    config = root.config
    conditions: dict[str, Any] = {}
    if getattr(config, "addition_embed_type", None) == "text_time":
        times = 6 * config.addition_time_embed_dim
        conditions["text_embeds"] = zeros(config.projection_class_embeddings_input_dim - times)
        conditions["time_ids"] = zeros(6)
    if getattr(config, "encoder_hid_dim_type", None) == "ip_image_proj":
        projections = root.encoder_hid_proj.image_projection_layers
        conditions["image_embeds"] = [zeros(1, *_input_shape(projection)) for projection in projections]
    return {"added_cond_kwargs": conditions} if conditions else {}


def condition_picture(zeros: Blank, channels: int, widths: list[int], *size: int) -> Tensor:
    """Return the conditioning picture of a ControlNet, for latents of height and width ``size``.

    Its embedding halves the resolution once for each of ``widths`` but the first.
    """
    return zeros(channels, *(side * 2 ** (len(widths) - 1) for side in size))


def _input_shape(projection: nn.Module) -> tuple[int, ...]:
    """Return the shape of the embedding of one picture that a projection of an IP-Adapter takes."""
    first = next(layer for layer in projection.modules() if isinstance(layer, nn.Linear))
    # `ImageProjection` takes one vector for each picture, other projections one for each patch.
    return (first.in_features,) if is_a(projection, "ImageProjection") else (257, first.in_features)


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    sample = zeros(config.in_channels, height, width)
    arguments: dict[str, Any] = {
        "sample": sample,
        "encoder_hidden_states": zeros(77, _text_width(root)),
        **added_conditions(root, zeros),
    }
    if config.class_embed_type in ("projection", "simple_projection"):
        arguments["class_labels"] = zeros(config.projection_class_embeddings_input_dim)
    elif config.num_class_embeds is not None or config.class_embed_type is not None:
        arguments["class_labels"] = zeros.integers()

    if is_a(root, *_CONTROLNETS):
        widths = config.conditioning_embedding_out_channels
        picture = condition_picture(zeros, config.conditioning_channels, widths, height, width)
        arguments["controlnet_cond"] = picture
        if is_a(root, "ControlNetUnionModel"):
            arguments["controlnet_cond"] = [picture]
            arguments["control_type"] = zeros(config.num_control_type)
            arguments["control_type_idx"] = [0]
            arguments["conditioning_scale"] = [1.0]
    return arguments


def _example_of_xs(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    channels, widths = config.ctrl_conditioning_channels, config.ctrl_conditioning_embedding_out_channels
    return {
        "sample": zeros(root.in_channels, height, width),
        "encoder_hidden_states": zeros(77, _text_width(root)),
        "controlnet_cond": condition_picture(zeros, channels, widths, height, width),
        **added_conditions(root, zeros),
    }


def _example_with_sound(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    arguments = {"sample": zeros(config.in_channels, height, width), "encoder_hidden_states": None}
    # Each layer has several transformers. The first two may attend to the first text, the others to the
    # second; a width of None means that a transformer attends to the spectrogram only.
    widths = config.cross_attention_dim
    of_level = widths[0] if isinstance(widths, list | tuple) else widths
    in_turn = of_level if isinstance(of_level, list | tuple) else (of_level,)
    texts = {"encoder_hidden_states": (8, in_turn[:2]), "encoder_hidden_states_1": (77, in_turn[2:])}
    for name, (words, of_transformers) in texts.items():
        if found := [text for text in of_transformers if text is not None]:
            arguments[name] = zeros(words, found[0])
    return arguments
