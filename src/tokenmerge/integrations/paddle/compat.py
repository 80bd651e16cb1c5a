"""The call shapes of tomesd 0.1.3 and of ppdiffusers, for ppdiffusers' pipelines and models."""

from __future__ import annotations

from typing import Any, TypeVar

from paddle import nn

from tokenmerge import presets
from tokenmerge.config import check_below_highest_ratio
from tokenmerge.integrations.paddle.api import apply_token_merging, remove_token_merging
from tokenmerge.integrations.paddle.models import find_hosts

Model = TypeVar("Model")


def apply_patch(
    pipe_or_layer: Model,
    ratio: float = 0.5,
    max_downsample: int = 1,
    sx: int = 2,
    sy: int = 2,
    use_rand: bool = True,
    merge_attn: bool = True,
    merge_crossattn: bool = False,
    merge_mlp: bool = False,
) -> Model:
    """Speed up a diffusion model of ppdiffusers in place, with tomesd's arguments and ppdiffusers' meaning.

    The arguments are those of :func:`tokenmerge.apply_patch`. Random destinations depend on the timestep and
    the cell, so the same seed gives the same picture and the global generator is not used.

    Raises:
        ConfigError: the ratio is 1 − 1/(sx·sy) or more, or another value is not valid.
        UnsupportedModelError, NothingToMergeError: as :func:`tokenmerge.paddle.apply_token_merging`.
    """
    check_below_highest_ratio(ratio, sx, sy)
    config = presets.tomesd(
        ratio,
        max_downsample=max_downsample,
        sx=sx,
        sy=sy,
        seed=0 if use_rand else None,
        merge_attn=bool(merge_attn),
        merge_crossattn=bool(merge_crossattn),
        merge_mlp=bool(merge_mlp),
    )
    apply_token_merging(pipe_or_layer, config)
    return pipe_or_layer


apply_tome = apply_patch


def remove_patch(pipe_or_layer: Model) -> Model:
    """Restore a model exactly as it was before :func:`apply_patch`, and return it."""
    remove_token_merging(pipe_or_layer)
    return pipe_or_layer


def remove_tome(pipe_or_layer: Model, only_return_self: bool = True) -> Model | tuple[Model, list[nn.Layer]]:
    """Restore a model as :func:`remove_patch` does, with ppdiffusers' signature.

    Args:
        pipe_or_layer: a pipeline or model of ppdiffusers.
        only_return_self: whether to return only the pipeline or model. False: also return the models in it
            that can be patched.
    """
    remove_patch(pipe_or_layer)
    if only_return_self:
        return pipe_or_layer
    hosts: list[Any] = [host.root for host in find_hosts(pipe_or_layer)]
    return pipe_or_layer, hosts
