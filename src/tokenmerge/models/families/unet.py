"""UNets and ControlNets of diffusers: SD 1.x, 2.x, SDXL, models derived from them, AudioLDM 2 and video.

Of ControlNet-XS, the UNet and the small control network inside its stages merge. The UNets for video are
AnimateDiff and its SparseCtrl, ModelScope, I2VGen-XL and Stable Video Diffusion. Each frame of a video merges
on its own, in the blocks that attend within it. Blocks that attend over time stay dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, is_a
from tokenmerge.models.family import Blank, blocks_within, example_of

_CONTROLNETS = ("ControlNetModel", "ControlNetUnionModel")
_SPARSECTRL = "SparseControlNetModel"
_VIDEO = ("UNetMotionModel", _SPARSECTRL, "UNet3DConditionModel", "I2VGenXLUNet")
_XS = "UNetControlNetXSModel"
_AUDIO = "AudioLDM2UNet2DConditionModel"  # on spectrograms (rows: time, columns: frequency)
_STABLE_VIDEO = "UNetSpatioTemporalConditionModel"
CLASSES = ("UNet2DConditionModel", *_CONTROLNETS, *_VIDEO, _XS, _AUDIO, _STABLE_VIDEO)

_FRAMES = 16
# Attention over time is in other classes (AnimateDiffTransformer3D, TransformerTemporalModel) or lists.
_TRANSFORMERS = ("Transformer2DModel", "TransformerSpatioTemporalModel", "DreamLiteTransformer2DModel")


def describe(root: Any) -> Host:
    """Find the blocks of a UNet or a ControlNet, or the spatial blocks of one for video."""
    special = {_XS: _example_of_xs, _AUDIO: _example_with_sound, _STABLE_VIDEO: _example_of_stable_video}
    examples = special | dict.fromkeys(_VIDEO, _example_of_video)
    example = next((make for name, make in examples.items() if is_a(root, name)), _example)
    stages = list(_stages_of(root))
    blocks = tuple(blocks_within(root, stages, *_TRANSFORMERS))
    if not blocks:
        _refuse_other_attention(root)
    # A model that returns the result of every level, such as a ControlNet, has no stages that can be skipped.
    can_skip = len(getattr(root, "up_blocks", ())) > 1 and root.mid_block is not None
    size = getattr(root.config, "sample_size", None)
    return Host(
        root=root,
        blocks=blocks,
        sample="sample",
        grids=_grids,
        latents=_latents,
        sample_size=(size, size) if isinstance(size, int) else size and tuple(size),
        controlnet=is_a(root, *_CONTROLNETS, _SPARSECTRL),
        example=example_of(root, example),
        stages={path: level for path, _, level in stages} if can_skip else {},
    )


def _stages_of(root: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield path, module and resolution level of each stage, in the order in which they run."""
    level = 1
    for i, stage in enumerate(root.down_blocks):
        yield f"down_blocks.{i}", stage, level
        if getattr(stage, "downsamplers", None) or getattr(stage, "base_downsamplers", None):
            level *= 2
    if root.mid_block is not None:
        yield "mid_block", root.mid_block, level
    for i, stage in enumerate(getattr(root, "up_blocks", ())):
        yield f"up_blocks.{i}", stage, level
        if getattr(stage, "upsamplers", None):
            level //= 2


def _refuse_other_attention(root: Any) -> None:
    found = {
        type(stage).__name__: None
        for _, stage, _ in _stages_of(root)
        if any(is_a(module, "Attention") for module in stage.modules())
    }
    if found:
        raise UnsupportedModelError(
            f"tokens cannot be merged in {type(root).__name__} yet: its attention is in {', '.join(found)}, "
            "and takes images [b, c, h, w] instead of tokens, as in DeepFloyd IF and Kandinsky 2; run it "
            "without token merging, or take a model that docs/supported-models.md lists"
        )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    # The batch holds the frames of a video, so each merges on its own.
    rows, columns = arguments["sample"].shape[-2:]
    return ((1, rows, columns),)


def _latents(root: Any, sample: Tensor) -> Tensor:
    # The first channels are denoised. Channels of a given image may follow; guidance sets them to zero in a
    # part of the batch: InstructPix2Pix [b, c, h, w], Stable Video Diffusion [b, f, c, h, w].
    axis = 2 if is_a(root, "UNetSpatioTemporalConditionModel") else 1
    channels = getattr(root.config, "out_channels", None) or sample.shape[axis]
    return sample.narrow(axis, 0, min(channels, sample.shape[axis]))


def _usual(root: Any, zeros: Blank, sample: Tensor, words: int = 77) -> dict[str, Any]:
    """Return the sample, a text of so many tokens, and the added conditions of SDXL and IP-Adapters."""
    config = root.config
    width = getattr(config, "encoder_hid_dim", None) or config.cross_attention_dim
    text = zeros(words, width[0] if isinstance(width, list | tuple) else width)
    arguments: dict[str, Any] = {"sample": sample, "encoder_hidden_states": text}
    conditions: dict[str, Any] = {}
    if getattr(config, "addition_embed_type", None) == "text_time":
        times = 6 * config.addition_time_embed_dim
        conditions["text_embeds"] = zeros(config.projection_class_embeddings_input_dim - times)
        conditions["time_ids"] = zeros(6)
    if getattr(config, "encoder_hid_dim_type", None) == "ip_image_proj":
        projections = root.encoder_hid_proj.image_projection_layers
        conditions["image_embeds"] = [zeros(1, *_input_shape(projection)) for projection in projections]
    return {**arguments, "added_cond_kwargs": conditions} if conditions else arguments


def _image_size(widths: list[int], height: int, width: int) -> tuple[int, int]:
    """Return the size of a ControlNet's image, whose embedding halves it for each width but the first."""
    factor = 2 ** (len(widths) - 1)
    return height * factor, width * factor


def _input_shape(projection: nn.Module) -> tuple[int, ...]:
    """Return the shape of the embedding of one image that a projection of an IP-Adapter takes."""
    first = next(layer for layer in projection.modules() if isinstance(layer, nn.Linear))
    # `ImageProjection` takes one vector for each image, other projections one for each patch.
    return (first.in_features,) if is_a(projection, "ImageProjection") else (257, first.in_features)


def _example(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    arguments = _usual(root, zeros, zeros(config.in_channels, height, width))
    if config.class_embed_type in ("projection", "simple_projection"):
        arguments["class_labels"] = zeros(config.projection_class_embeddings_input_dim)
    elif config.num_class_embeds is not None or config.class_embed_type is not None:
        arguments["class_labels"] = zeros.integers()

    if is_a(root, *_CONTROLNETS):
        size = _image_size(config.conditioning_embedding_out_channels, height, width)
        image = zeros(config.conditioning_channels, *size)
        arguments["controlnet_cond"] = image
        if is_a(root, "ControlNetUnionModel"):
            arguments["controlnet_cond"] = [image]
            arguments["control_type"] = zeros(config.num_control_type)
            arguments["control_type_idx"] = [0]
            arguments["conditioning_scale"] = [1.0]
    return arguments


def _example_of_xs(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    size = _image_size(config.ctrl_conditioning_embedding_out_channels, height, width)
    image = zeros(config.ctrl_conditioning_channels, *size)
    return {**_usual(root, zeros, zeros(root.in_channels, height, width)), "controlnet_cond": image}


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
        channels = next((text for text in of_transformers if text is not None), None)
        if channels is not None:
            arguments[name] = zeros(words, channels)
    return arguments


def _example_of_video(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    motion = is_a(root, "UNetMotionModel", _SPARSECTRL)
    frames = min(_FRAMES, config.motion_max_seq_length) if motion else _FRAMES
    sample = zeros(config.in_channels, frames, height, width)
    arguments = _usual(root, zeros, sample)
    if motion:  # AnimateDiff takes the text once for each frame
        arguments["encoder_hidden_states"] = arguments["encoder_hidden_states"].repeat_interleave(frames, 0)
    if is_a(root, _SPARSECTRL):
        size = height, width
        if not config.use_simplified_condition_embedding:
            size = _image_size(config.conditioning_embedding_out_channels, height, width)
        arguments["controlnet_cond"] = zeros(config.conditioning_channels, frames, *size)
        arguments["conditioning_mask"] = zeros(1, frames, *size)
    if is_a(root, "I2VGenXLUNet"):
        arguments["fps"] = zeros.integers().fill_(16)
        arguments["image_latents"] = zeros(*sample.shape[1:])
        arguments["image_embeddings"] = zeros(config.cross_attention_dim)
    return arguments


def _example_of_stable_video(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    times = config.projection_class_embeddings_input_dim // config.addition_time_embed_dim
    sample = zeros(config.num_frames, config.in_channels, height, width)
    return {**_usual(root, zeros, sample, words=1), "added_time_ids": zeros(times)}
