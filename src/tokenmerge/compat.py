"""The call shapes of tomesd 0.1.3 and of ppdiffusers."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, TypeVar

from tokenmerge import presets
from tokenmerge.api import hosts_of, merge_in_hosts, remove_token_merging
from tokenmerge.config import ToMeConfig, check_below_highest_ratio, highest_ratio
from tokenmerge.config.checks import as_number
from tokenmerge.errors import NothingToMergeError, short_repr

__all__ = ["apply_patch", "apply_tome", "remove_patch"]

Model = TypeVar("Model")


def apply_patch(
    model: Model,
    ratio: float = 0.5,
    max_downsample: int = 1,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
) -> Model:
    """Speed up a diffusion model in place, with the signature and the meaning of ``tomesd.apply_patch``.

    If nothing would merge, the model is restored as by :func:`remove_patch`, and a warning says why. If the
    sample of a call has too few tokens to merge, that call runs dense, with one warning for each size.

    Args:
        model: a diffusers pipeline or model, a CompVis-style model, or any object with
            ``model.diffusion_model``.
        ratio: fraction of tokens removed. More than 1 − 1/(sx·sy) is lowered to that, with a warning.
        max_downsample: deepest resolution level that merges: 1, 2, 4 or 8; 0 merges none.
        sx: width of a destination's cell, in tokens.
        sy: height of a destination's cell, in tokens.
        use_rand: draw the destination of each cell at random.
        merge_attn: merge around self-attention (recommended).
        merge_crossattn: merge around cross-attention (not recommended).
        merge_mlp: merge around the feed-forward layer (not recommended at all).

    Returns:
        The model itself.

    Raises:
        UnsupportedModelError, ConfigError: as :func:`tokenmerge.apply_token_merging`.
    """
    ratio, max_downsample, sx, sy = map(_number, (ratio, max_downsample, sx, sy))
    ToMeConfig(ratio=0, sx=sx, sy=sy)  # the highest ratio is defined for valid strides only
    highest = highest_ratio(sx, sy)
    wanted = as_number(ratio)
    if wanted is not None and wanted > highest > 0:
        warnings.warn(
            f"ratio={wanted:g} is more than sx={sx}, sy={sy} allow; merging with 1 − 1/(sx·sy) = {highest:g}",
            stacklevel=2,
        )
        ratio = highest
    deepest = as_number(max_downsample)
    # The deepest level that merges, or 0 if there is none, or None if ``max_downsample`` is no number.
    level = None if deepest is None else max((one for one in (1, 2, 4, 8) if one <= deepest), default=0)
    config = presets.tomesd(
        ratio,
        max_downsample=max_downsample if level is None else max(level, 1),
        sx=sx,
        sy=sy,
        seed=0 if use_rand else None,
        merge_attn=bool(merge_attn),
        merge_crossattn=bool(merge_crossattn),
        merge_mlp=bool(merge_mlp),
    )
    try:
        if level == 0:
            raise NothingToMergeError(
                f"nothing to merge: max_downsample={short_repr(max_downsample)} merges no level; set it to 1"
            )
        levels = sorted({block.level for host in hosts_of(model) for block in host.blocks})
        if levels and levels[0] > config.max_downsample:
            raise NothingToMergeError(
                f"nothing to merge: attention is at the levels {', '.join(map(str, levels))}, and "
                f"max_downsample={config.max_downsample} merges none; set it to {levels[0]} or more"
            )
        merge_in_hosts(model, config, dense_if_too_small=True)
    except NothingToMergeError as error:
        remove_token_merging(model)
        warnings.warn(f"{error}; until then the model runs unpatched", stacklevel=2)
    return model


def _number(value: Any) -> Any:
    """Return the Python number in a tensor or array without dimensions; other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def remove_patch(model: Model) -> Model:
    """Restore a model exactly as it was before :func:`apply_patch`, and return it."""
    remove_token_merging(model)
    return model


_SIGNATURE = inspect.signature(apply_patch)


def apply_tome(model: Model, *arguments: Any, **named: Any) -> Model:
    """Speed up a diffusion model in place, with the meaning of ppdiffusers' ``pipe.apply_tome``.

    The arguments, the result and the errors are those of :func:`apply_patch`, except for the highest ratio.

    Raises:
        ConfigError: the ratio is 1 − 1/(sx·sy) or more.
    """
    given = _SIGNATURE.bind(model, *arguments, **named)
    given.apply_defaults()
    ratio, sx, sy = (_number(given.arguments[name]) for name in ("ratio", "sx", "sy"))
    check_below_highest_ratio(ratio, sx, sy)
    return apply_patch(*given.args)


apply_tome.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
