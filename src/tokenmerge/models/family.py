"""The tools that files of families are written with: an example of a call, and facts of most transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenmerge.errors import ConfigError, TokenMergingError, reason_of, short_repr
from tokenmerge.models.base import KEY_MASK, Block, Host, Layer, Layout, ReadGrids, is_a, is_called
from tokenmerge.models.grids import patch_of, picture_grids, video_grids
from tokenmerge.models.placement import dtype_of

Example = Callable[..., dict[str, Any]]
Sizes = Sequence[tuple[int, int]]  # heights and widths of the latents of reference images


class Blank:
    """Makes inputs of zeros for a batch, on the device and in the dtype of a model."""

    def __init__(self, root: Any, batch: int, frames: int = 1) -> None:
        self._root = root
        self._dtype = dtype_of(root)
        self.batch = batch
        self.frames = frames  # of the latents of a video
        devices = [weight.device for weight in root.parameters()]
        # In a copy without weights, a few may be on the CPU.
        self._device = next((device for device in devices if device.type == "meta"), devices[0])

    def __call__(self, *shape: int) -> Tensor:
        """Return zeros ``[batch, *shape]``."""
        return torch.zeros(self.batch, *shape, device=self._device, dtype=self._dtype)

    def integers(self, *shape: int) -> Tensor:
        """Return integers ``[batch, *shape]``, all zero."""
        return torch.zeros(self.batch, *shape, device=self._device, dtype=torch.int64)

    def full_mask(self, tokens: int) -> Tensor:
        """Return a mask ``[batch, tokens]`` of ones with values: models read the length of a text from it."""
        return torch.ones(self.batch, tokens, device=device_of_values(self._root), dtype=torch.bool)


def device_of_values(root: Any) -> torch.device:
    """Return the device for inputs whose values a model reads, or the CPU for weights without values."""
    device = next(root.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def example_of(
    root: Any,
    example: Example,
    timestep: str | Callable[..., Tensor] = "timestep",
    latent_frames: int = 1,
    patch_frames: int = 0,
) -> Example:
    """Return the example of a :class:`Host` from that of a family, which gets :class:`Blank` for the batch.

    ``latent_frames`` are those that the model was made for, and ``patch_frames`` as in :class:`Host`. It adds
    the timestep, if the model has one, and the guidance scale of a model that takes it.
    """

    def arguments(
        height: int, width: int, batch: int, *references: Any, frames: int | None = None
    ) -> dict[str, Any]:
        given = None if frames is None or not patch_frames else frames * patch_frames
        zeros = Blank(root, batch, latent_frames if given is None else given)
        usual = {timestep: zeros().fill_(500)} if isinstance(timestep, str) else {}
        if getattr(getattr(root, "config", None), "guidance_embeds", False):
            usual["guidance"] = zeros().fill_(3.5)
        try:
            return {**usual, **example(root, zeros, height, width, *references)}
        except TokenMergingError:  # it says what is wrong itself
            raise
        except (RuntimeError, OverflowError, TypeError) as error:  # of tensors that are too large
            raise ConfigError(
                f"height, width: {type(root).__name__} cannot be called with a sample of "
                f"{short_repr(height)} × {short_repr(width)} ({reason_of(error)}); give "
                "another size. By default it is that of the model's config, such as sample_size"
            ) from error

    return arguments


def position_ids(root: Any, sizes: Sizes, axes: int = 3) -> Tensor:
    """Make position ids ``[n, axes]`` of images in a row: number, row, column, zeros for each token.

    A token is made of 2 × 2 latent positions.
    """
    images = []
    for number, (height, width) in enumerate(sizes):
        ids = torch.zeros(height // 2, width // 2, axes, device=device_of_values(root))
        ids[..., 0] = number
        ids[..., 1] += torch.arange(height // 2, device=ids.device)[:, None]
        ids[..., 2] += torch.arange(width // 2, device=ids.device)
        images.append(ids.view(-1, axes))
    return torch.cat(images)


def listed(
    root: nn.Module, name: str, layers: tuple[Layer, ...], inside: str = "", **facts: Any
) -> tuple[Block, ...]:
    """Describe the blocks of one module list, each with the layers that it has and further facts.

    If ``inside`` is given, the blocks are in an attribute of the modules of the list.
    """
    entries: Any = root.get_submodule(name)
    paths = [f"{name}.{i}.{inside}".removesuffix(".") for i in range(len(entries))]
    return tuple(described(path, root.get_submodule(path), layers, **facts) for path in paths)


def described(path: str, module: Any, layers: Iterable[Layer], **facts: Any) -> Block:
    """Describe one block, with those of the layers that it has and further facts."""
    present = tuple(layer for layer in layers if getattr(module, layer.name, None) is not None)
    return Block(path, module, present, **facts)


FUSED_MLP = "single-stream blocks project attention and MLP together; merge_mlp leaves their MLP dense"

# ``BasicTransformerBlock`` is the block of UNets and of the first diffusion transformers.
_SELF_ATTENTION = Layout(token_arguments=(KEY_MASK,))
# The attention mask of cross-attention covers the text, so it has no entries for image tokens.
_CROSS_ATTENTION = Layout(dense_if=("ip_adapter_masks",))
# A block gets the masks of an IP-Adapter inside ``cross_attention_kwargs``.
_BLOCK = dataclasses.replace(_SELF_ATTENTION, dense_if=("ip_adapter_masks",))
_CHUNKED = "feed-forward layers that run in chunks stay dense; switch chunking off to merge them"


def basic_blocks(
    root: nn.Module, name: str, *, context: str = "encoder_hidden_states", **facts: Any
) -> tuple[Block, ...]:
    """Describe the blocks of one module list, whose sub-layers are called ``attn1``, ``attn2`` and ``ff``.

    ``context`` is the name of the argument that gives their self-attention other keys and values. ``facts``
    are fields of :class:`Block`.
    """
    blocks: Any = root.get_submodule(name)
    return tuple(_basic_block(f"{name}.{i}", block, context, facts) for i, block in enumerate(blocks))


def blocks_within(
    root: nn.Module, parts: Iterable[tuple[str, nn.Module, int]], *transformers: str, **facts: Any
) -> Iterator[Block]:
    """Yield the blocks of the transformers of these classes in parts of a UNet: path, module and level.

    The first argument of a transformer is ``[b, c, h, w]``; for a video the batch holds its frames.
    """
    for path, module, level in parts:
        if is_a(module, *transformers):
            yield from basic_blocks(root, f"{path}.transformer_blocks", grid=module, level=level, **facts)
        else:
            children = module._modules.items()
            inner = ((f"{path}.{name}", child, level) for name, child in children if child is not None)
            yield from blocks_within(root, inner, *transformers, **facts)


def _basic_block(path: str, module: Any, context: str, facts: dict[str, Any]) -> Block:
    # In blocks without text, such as every third one of AudioLDM 2, both attentions attend to the image. In
    # blocks with only_cross_attention, both attend to the text.
    twice_to_image = not getattr(getattr(module, "attn2", None), "is_cross_attention", True)
    twice_to_text = getattr(module, "only_cross_attention", False)
    layers = [
        Layer("attn1", "attn1", _CROSS_ATTENTION, own_keys=False)
        if twice_to_text
        else Layer("attn1", "attn1", _SELF_ATTENTION, keys=context),
        Layer("attn1", "attn2", _SELF_ATTENTION)
        if twice_to_image
        else Layer("attn2", "attn2", _CROSS_ATTENTION),
    ]
    chunked = bool(getattr(module, "_chunk_size", None))
    if not chunked:
        layers.append(Layer("ff", "ff"))
    return described(
        path,
        module,
        layers,
        block_layout=None if chunked else _BLOCK,
        # The checkpointing of CompVis's repositories recomputes `_forward`.
        method="_forward" if hasattr(module, "_forward") else "forward",
        dense={"ff": _CHUNKED} if chunked else {},
        **facts,
    )


def transformer_host(
    root: Any,
    blocks: tuple[Block, ...],
    # (root, Blank, height, width) → further arguments of a call with latents of that size. The sample and the
    # condition of a ControlNet are among them only if they are not [b, config.in_channels, (latent_frames,)
    # height, width].
    others: Example | None = None,
    *,
    # Tokens and channels of encoder_hidden_states, or None if it is among ``others``.
    text: tuple[int, int] | None = None,
    text_mask: str | None = None,  # the argument for a mask of the text's tokens, or None without one
    sample_size: tuple[int, int]
    | None = None,  # height and width of latents, or None for those of the config
    patch: int | None = None,  # None for that of the config
    latent_frames: int = 1,  # that the model was made for, which is 1 for images
    grids: ReadGrids | None = None,  # None for those of an image or a video
    **particulars: Any,
) -> Host:
    """Describe a diffusion transformer, or a ControlNet if the name of its class says so.

    The blocks, the patch and the grids are as in :class:`Host`, and ``particulars`` are further fields of it.
    """
    is_video = latent_frames > 1
    patch_frames = patch_of(root.config)[0] if is_video else 0
    sample = particulars.get("sample", "hidden_states")
    controlnet = is_called(root, "ControlNet")

    def example(root: Any, zeros: Blank, height: int, width: int, *references: Any) -> dict[str, Any]:
        further = others(root, zeros, height, width, *references) if others else {}
        usual: dict[str, Any] = {}
        for name in (sample, "controlnet_cond") if controlnet else (sample,):
            if name not in further:
                frames = (zeros.frames,) if is_video else ()
                usual[name] = zeros(root.config.in_channels, *frames, height, width)
        if text is not None:
            usual["encoder_hidden_states"] = zeros(*text)
            if text_mask is not None:
                usual[text_mask] = zeros.full_mask(text[0])
        return {**usual, **further}

    return Host(
        root=root,
        blocks=blocks,
        example=example_of(
            root, example, particulars.get("timestep", "timestep"), latent_frames, patch_frames
        ),
        sample_size=sample_size or _sample_size(root.config),
        patch=patch or patch_of(root.config)[2],
        frames=latent_frames // patch_frames if is_video else 1,
        patch_frames=patch_frames,
        controlnet=controlnet,
        grids=grids or (video_grids if is_video else picture_grids),
        **particulars,
    )


def _sample_size(config: Any) -> tuple[int, int]:
    if hasattr(config, "sample_height"):
        return config.sample_height, config.sample_width
    return config.sample_size, config.sample_size
