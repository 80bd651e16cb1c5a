"""Z-Image: one sequence of image, padding and text; the images of a batch are entries of a list."""

from __future__ import annotations

from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import Arguments, Grid, Grids, Host, Layer, Layout, TokenArgument
from tokenmerge.models.family import Blank, listed, transformer_host

CLASSES = ("ZImageTransformer2DModel",)

# Blocks call their mask by another name than attention.
_NAMES = ("freqs_cis", "attn_mask", "attention_mask")
_PER_TOKEN = tuple(TokenArgument(name, axes=(1,), batched=True) for name in _NAMES)
_BLOCK = Layout(text="last", token_arguments=_PER_TOKEN)
_LAYERS = (Layer("attn1", "attention", _BLOCK), Layer("ff", "feed_forward", Layout(text="last")))


def describe(root: Any) -> Host:
    """Find the blocks that see the image."""
    refining, joint = (
        listed(root, name, _LAYERS, layout=_BLOCK, block_layout=_BLOCK)
        for name in ("noise_refiner", "layers")
    )
    return transformer_host(
        root,
        (*refining, *joint),
        _others,
        sample="x",
        timestep="t",
        grids=_grids,
        sample_size=(128, 128),
        patch=root.config.all_patch_size[0],
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    images = arguments["x"]
    if isinstance(images[0], list):
        raise UnsupportedModelError(
            f"x: expected one image for each sample, got {len(images[0])} for the first; samples with "
            "further images cannot be merged yet: call remove_token_merging(pipe) first"
        )
    sizes = {tuple(image.shape[1:]) for image in images}
    if len(sizes) > 1:
        raise UnsupportedModelError(
            f"x: expected images of one size, got {sorted(sizes)}; generate one size at a time"
        )
    patch = arguments.get("patch_size", 2)
    patch_t = arguments.get("f_patch_size", 1)
    frames, height, width = sizes.pop()
    return ((frames // patch_t, height // patch, width // patch),)


def _others(root: Any, zeros: Blank, height: int, width: int) -> dict[str, Any]:
    config = root.config
    return {
        "x": list(zeros(config.in_channels, config.all_f_patch_size[0], height, width)),
        "cap_feats": list(zeros(256, config.cap_feat_dim)),
        "patch_size": config.all_patch_size[0],
        "f_patch_size": config.all_f_patch_size[0],
    }
