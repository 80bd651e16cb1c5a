"""JoyImage-Edit and JoyImage-Edit-Plus: joint attention with the text after the images.

Only the images have rotary positions. Edit-Plus has images of any size, and positions for each sample.
"""

from __future__ import annotations

from typing import Any

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import (
    KEY_MASK,
    OWN_POSITIONS,
    Arguments,
    Grid,
    Grids,
    Host,
    Layer,
    Layout,
    TokenArgument,
    is_a,
)
from tokenmerge.models.family import Blank, Sizes, listed, transformer_host
from tokenmerge.models.grids import in_tokens, patch_of

_PLUS = "JoyImageEditPlusTransformer3DModel"
CLASSES = ("JoyImageEditTransformer3DModel", _PLUS)

# Positions are (those of the images, those of the text), or in Edit-Plus (cosine, sine) of the images.
_EDIT = Layout(text="last", token_arguments=(TokenArgument("image_rotary_emb", axes=(0,), element=0),))
_EDIT_PLUS = Layout(text="last", token_arguments=(OWN_POSITIONS, KEY_MASK))


def describe(root: Any) -> Host:
    """Find the blocks."""
    plus = is_a(root, _PLUS)
    layout = _EDIT_PLUS if plus else _EDIT
    layers = (Layer("attn1", "attn", layout), Layer("ff", "img_mlp", Layout(text="last")))
    return transformer_host(
        root,
        listed(root, "double_blocks", layers, layout=Layout(text="last"), block_layout=layout),
        _of_plus if plus else _of_edit,
        text=(1024, root.config.text_dim),  # with the tokens that the text encoder makes of the references
        text_mask="encoder_hidden_states_mask" if plus else None,
        grids=_grids,
        takes_references=True,
        sample_size=(128, 128),
    )


def _grids(root: Any, arguments: Arguments, last: Grid) -> Grids:
    if not is_a(root, _PLUS):
        # Images [b, image, c, f, h, w] of one size, or one image [b, c, f, h, w].
        shape = arguments["hidden_states"].shape
        images = shape[1] if len(shape) == 6 else 1
        grid = in_tokens(shape[-3:], root.config)
        return tuple(grid for _ in range(images))
    shapes = arguments["shape_list"]
    first, *others = (tuple((frames, rows, columns) for frames, rows, columns in shape) for shape in shapes)
    if any(shape != first for shape in others):
        raise UnsupportedModelError(
            f"shape_list: expected images of the same sizes in each sample, got {shapes}; generate such "
            "samples one at a time"
        )
    return first


def _of_edit(root: Any, zeros: Blank, height: int, width: int, references: Sizes = ()) -> dict[str, Any]:
    if any(size != (height, width) for size in references):
        raise UnsupportedModelError(
            f"references: this model takes images of the size of the sample, {height} × {width}, got "
            f"{', '.join(f'{rows} × {columns}' for rows, columns in references)}; pass that size"
        )
    frames = patch_of(root.config)[0]
    return {"hidden_states": zeros(1 + len(references), root.config.in_channels, frames, height, width)}


def _of_plus(root: Any, zeros: Blank, height: int, width: int, references: Sizes = ()) -> dict[str, Any]:
    patch = patch_of(root.config)
    shapes = [(1, rows // patch[1], columns // patch[2]) for rows, columns in [(height, width), *references]]
    patches = sum(rows * columns for _, rows, columns in shapes)
    return {
        "hidden_states": zeros(patches, root.config.in_channels, *patch),
        "shape_list": [shapes for _ in range(zeros.batch)],
    }
