"""Context managers that apply each variant to a model, and restore the model at their end."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from tokenmerge.api import Patch, apply_token_merging, merge_in_hosts
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.pipelines.loading import denoiser_of
from tokenmerge_tools.variants.generation import as_before

TOMESD_SETTINGS = (
    *("ratio", "max_downsample", "sx", "sy"),
    *("seed", "merge_attn", "merge_crossattn", "merge_mlp"),
)


def dense(model: object, config: None) -> contextlib.AbstractContextManager[None]:
    """Leave the model as it is."""
    return contextlib.nullcontext()


@contextlib.contextmanager
def tokenmerge(
    model: object,
    config: ToMeConfig | None,
    method: str = "",
    speedup: float | None = None,
    min_psnr: float | None = None,
    file: str | None = None,
) -> Iterator[Patch]:
    """Merge tokens with this package, at any size of the sample.

    With a speed-up, the default method plans each generation when it begins, in place of the configuration.
    Its estimates are corrected by a ``file`` of ``tokenmerge tune``.
    """
    if config is None or speedup is not None:
        patch = apply_token_merging(model, file, speedup=speedup, min_psnr=min_psnr)
    else:
        patch = merge_in_hosts(model, config, method=method, check_size=False)
    try:
        yield patch
    finally:
        patch.remove()


@contextlib.contextmanager
def tomesd(pipe_or_model: Any, config: ToMeConfig) -> Iterator[None]:
    """Merge tokens with the package tomesd."""
    model = pipe_or_model if isinstance(pipe_or_model, nn.Module) else denoiser_of(pipe_or_model)
    original: Any = importlib.import_module("tomesd")
    settings = {
        name: value for name, value in config.to_dict().items() if name in {*TOMESD_SETTINGS} - {"seed"}
    }
    finest = 1
    with contextlib.suppress(UnsupportedModelError):  # tomesd may know the model
        levels = (block.level for host in find_hosts(model) for block in host.blocks)
        finest = min(levels, default=1)  # 2 in SDXL
    settings |= {"use_rand": config.seed is not None, "max_downsample": max(finest, config.max_downsample)}
    with as_before(model):  # tomesd leaves attributes on the modules when it is removed
        try:
            original.apply_patch(model, **settings)
            if not any(type(module).__name__ == "ToMeBlock" for module in model.modules()):
                raise UnsupportedModelError(
                    f"tomesd finds no block that it can patch in {type(model).__name__}, so it would run "
                    "dense; leave it out"
                )
            yield
        finally:
            original.remove_patch(model)
