"""The default method: all settings from one number, the pipeline and the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from tokenmerge.calibration import fewest_tokens
from tokenmerge.config import ToMeConfig
from tokenmerge.models import Block, Host, find_hosts

__all__ = ["choose"]

# Attention processors that do not call PyTorch's scaled_dot_product_attention, by what is in their names.
_OTHER_KERNELS = ("XFormers", "Sliced")
_EAGER = ("AttnProcessor", "AttnAddedKVProcessor", "IPAdapterAttnProcessor", "CustomDiffusionAttnProcessor")

# Up to this ratio attention merges; above it whole blocks, which lose more.
_MODERATE = 0.5
# Of a UNet with more than this share of its work at the finest level, that does not run on every step either.
_WORTHWHILE_FINEST_LEVEL = 0.2
# With fewer steps, each changes more than those before it tell: what blocks change more than what comes up to
# the finest level of a UNet, which draws the details anew.
_STEPS_OF_BLOCKS, _SPAN_OF_STAGES = 16, 1 / 4
# On smaller grids, where blocks are left out of steps, merging attention saves little more and costs more of
# the picture than leaving out more steps.
_FEWEST_TOKENS_BESIDE_REUSE = 2048


def choose(pipe_or_model: object, ratio: float = 0.5, follows_steps: bool | None = None) -> ToMeConfig:
    """Choose the settings that were found closest to the dense picture at their speed.

    - Up to a ratio of 0.5 self-attention merges, above it whole blocks, at every level, by tiled matching,
      with proportional attention: what costs least of the picture for what it saves. Token grids so small
      that it would cost more time than it saves stay dense; how small was measured once on this device.
      Where blocks are left out as below, grids of fewer than 2048 tokens stay dense too, but for whole
      blocks of a UNet.
    - In a pipeline, whose steps can be followed, every second of the steps that run all blocks is dense and
      corrects the others (``correct_every``).
    - Of a UNet, what is below the finest level runs in every second step, from a ratio of 0.5 on in every
      fourth, and the finest level, where it is a large part of the work, in every second. Of other models
      the blocks, if they can be left out, run in every second step, from a ratio of 0.5 on in every third.
      In generations of fewer than 16 steps less is left out (``reuse_every``, ``reuse_finest_every``,
      ``reuse_span``).

    Fewer steps are the rival: docs/methods.md says where they are as close at the same speed.

    Args:
        pipe_or_model: as for :func:`tokenmerge.apply_token_merging`.
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 0.75. Raising it makes attention, and above 0.5 the
            whole block, faster and the picture less like the dense one; at 0 every step is dense. Where all
            grids are so small that they stay dense, it only chooses how many steps are left out.
        follows_steps: whether settings may follow the denoising steps; None: in a pipeline they may.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
        ConfigError: the ratio is out of its range.
    """
    hosts = find_hosts(pipe_or_model)
    blocks = [block for host in hosts for block in host.blocks]
    denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
    weight = next(denoiser.root.parameters())
    device = weight.device if not weight.is_meta else _default_device()
    if follows_steps is None:
        follows_steps = getattr(pipe_or_model, "scheduler", None) is not None
    deepest = max((block.level for block in blocks), default=1)
    if ratio == 0:
        return ToMeConfig(ratio=ratio, max_downsample=deepest)
    whole = all(block.wide is not None for block in blocks)
    scope = "block" if whole and ratio > _MODERATE else "layers"
    settings = ToMeConfig(
        ratio=ratio,
        max_downsample=deepest,
        min_tokens=fewest_tokens(device, weight.dtype, *_narrowest(blocks)),
        scope=scope,
        planner="tiled",
        proportional=_calls_fused_attention(hosts),
        correct_every=2 if follows_steps else 0,
    )
    if not follows_steps:
        return settings
    far = ratio >= _MODERATE
    many = max(settings.min_tokens, _FEWEST_TOKENS_BESIDE_REUSE)
    if denoiser.below:
        return dataclasses.replace(
            settings,
            min_tokens=many if scope == "layers" else settings.min_tokens,
            reuse_every=4 if far else 2,
            reuse_finest_every=2 if far and denoiser.finest_share > _WORTHWHILE_FINEST_LEVEL else 1,
            reuse_span=_SPAN_OF_STAGES,
        )
    if denoiser.can_pause:
        every = 3 if far else 2
        return dataclasses.replace(
            settings,
            min_tokens=many,
            reuse_every=every,
            reuse_span=every / _STEPS_OF_BLOCKS,
        )
    return settings


def _narrowest(blocks: Sequence[Block]) -> tuple[int, ...]:
    """Channels and heads of the narrowest attention, where merging saves least; nothing if unknown."""
    found = []
    for layer in (getattr(block.module, layer.name) for block in blocks for layer in block.layers):
        projection, heads = getattr(layer, "to_q", None), getattr(layer, "heads", None)
        if isinstance(projection, nn.Linear) and isinstance(heads, int):
            found.append((projection.out_features, heads))
    return min(found, default=())


def _default_device() -> torch.device:
    """Where a model that has no weights yet will be."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _calls_fused_attention(hosts: Sequence[Host]) -> bool:
    """Whether proportional attention is possible in every block."""
    for host in hosts:
        for block in host.blocks:
            for layer in block.layers:
                processor = getattr(getattr(block.module, layer.name), "processor", None)
                name = type(processor).__name__
                if name in _EAGER or any(kernel in name for kernel in _OTHER_KERNELS):
                    return False
    return True
