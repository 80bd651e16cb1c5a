"""The default method: all settings from one number, the pipeline and the device."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Sequence

import torch
from torch import nn

from tokenmerge.config import Correction, StepReuse, ToMeConfig
from tokenmerge.models.base import Block, Host
from tokenmerge.models.find import find_hosts
from tokenmerge.planners._calibration import fewest_tokens

__all__ = ["choose"]

# What attention calls, itself or through diffusers, that computes it with PyTorch's fused kernels; and the
# back-ends of diffusers that do, and take a mask.
_FUSED = {"scaled_dot_product_attention", "dispatch_attention_fn"}
_BACKENDS = {"native", "_native_cudnn", "_native_efficient", "_native_math"}

# Above this ratio whole blocks merge, which lose more; in UNets, whose finest level draws details, too much.
# From it on more is left out of steps, and UNets are not corrected: a dense step costs more there than merged
# ones gain by it.
_MODERATE = 0.5
# From this ratio on the finest level of a UNet does not run on every step either, if it has more than this
# share of the work.
_WITHOUT_FINEST_LEVEL, _WORTHWHILE_FINEST_LEVEL = 0.3, 0.2
# Below _MODERATE it runs in all of this first share of the steps, which lose most by leaving it out.
_STEPS_OF_FINEST_LEVEL = 0.3
# With few steps extrapolation is worse, most of all for block residuals. In a UNet the finest level still
# runs and draws the details.
_STEPS_OF_BLOCKS, _SPAN_OF_STAGES = 16, 1 / 5
# On smaller grids, where blocks are left out of steps, merging attention saves little more and costs more of
# the picture than leaving out more steps.
_FEWEST_TOKENS_BESIDE_REUSE = 2048


def choose(pipe_or_model: object, ratio: float = 0.5, follows_steps: bool | None = None) -> ToMeConfig:
    """Choose the settings that were found closest to the dense picture at their speed.

    - Self-attention merges, above a ratio of 0.5 whole blocks, but for UNets, at every level, by tiled
      matching, with proportional attention: what costs least of the picture for what it saves. Token grids
      so small that it would cost more time than it saves stay dense; how small was measured once on this
      device. Where blocks are left out as below, grids of fewer than 2048 tokens stay dense too.
    - In a pipeline, whose steps can be followed, every second of the steps that run all blocks is dense and
      corrects the others (``correction.every``); not of a UNet from a ratio of 0.5 on.
    - Of a UNet, what is below the finest level runs in every second step, from a ratio of 0.5 on in every
      fourth, and the finest level, where it is a large part of the work, from 0.3 on in every second, below
      0.5 only after the first 30 % of the steps. Of other models the blocks, if they can be left out, run in
      every second step, from a ratio of 0.5 on in every third. In short generations less is left out, or
      nothing: of a UNet below 20 and 10 steps, of others below 16 and 11, or 16 alone below a ratio of 0.5
      (``reuse.every``, ``reuse.shallow_every``, ``reuse.shallow_from``, ``reuse.span``).

    Fewer steps are the rival: docs/methods.md says where they are as close at the same speed.

    Args:
        pipe_or_model: as for :func:`tokenmerge.apply_token_merging`; on the device that it will run on, or
            offloaded from it, since grids are timed there.
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 0.75. Raising it makes attention, or the whole
            block, faster and the picture less like the dense one; at 0 every step is dense. Where all
            grids are so small that they stay dense, it only chooses how many steps are left out.
        follows_steps: whether settings may follow the denoising steps; None: in a pipeline they may.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
        ConfigError: the ratio is out of its range.
    """
    ToMeConfig(ratio=ratio)  # checks it
    hosts = find_hosts(pipe_or_model)
    blocks = [block for host in hosts for block in host.blocks]
    denoiser = next((host for host in hosts if not host.controlnet), hosts[0])
    if follows_steps is None:
        follows_steps = getattr(pipe_or_model, "scheduler", None) is not None
    deepest = min(8, max((block.level for block in blocks), default=1))
    if ratio == 0:
        return ToMeConfig(ratio=ratio, max_downsample=deepest)
    whole = all(block.block_layout is not None for block in blocks)
    wide = whole and ratio > _MODERATE and not denoiser.deep_stages
    settings = ToMeConfig(
        ratio=ratio,
        max_downsample=deepest,
        min_tokens=fewest_tokens(
            _device(pipe_or_model, denoiser.root), _dtype(denoiser.root), *_narrowest(blocks)
        ),
        scope="block" if wide else "layers",
        planner="tiled",
        proportional=_calls_fused_attention(pipe_or_model, hosts),
        correction=Correction(every=2 if follows_steps else 0),
    )
    if not follows_steps:
        return settings
    far = ratio >= _MODERATE
    many = max(settings.min_tokens, _FEWEST_TOKENS_BESIDE_REUSE)
    if denoiser.deep_stages:
        finest = ratio >= _WITHOUT_FINEST_LEVEL and denoiser.shallow_share > _WORTHWHILE_FINEST_LEVEL
        return dataclasses.replace(
            settings,
            min_tokens=many,
            correction=Correction(every=0 if far else 2),
            reuse=StepReuse(
                every=4 if far else 2,
                shallow_every=2 if finest else 1,
                shallow_from=_STEPS_OF_FINEST_LEVEL if finest and not far else 0.0,
                span=_SPAN_OF_STAGES,
            ),
        )
    if denoiser.can_skip:
        every = 3 if far else 2
        return dataclasses.replace(
            settings,
            min_tokens=many,
            reuse=StepReuse(every=every, span=every / _STEPS_OF_BLOCKS),
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


def _device(pipe_or_model: object, model: nn.Module) -> torch.device:
    """Where a model runs: what is offloaded, or has no weights yet, lies elsewhere."""
    device = getattr(pipe_or_model, "_execution_device", None) or next(model.parameters()).device
    if torch.device(device).type != "meta":
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator


def _dtype(model: nn.Module) -> torch.dtype:
    """What a model computes in: weights that are stored in fewer bits are turned into it."""
    dtypes = (weight.dtype for weight in model.parameters())
    return next((dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize > 1), torch.bfloat16)


def _calls_fused_attention(pipe_or_model: object, hosts: Sequence[Host]) -> bool:
    """Whether proportional attention is possible in every block."""
    # Perturbed-attention guidance swaps processors in mid-call, and attends to a part of the batch at a time.
    if hasattr(pipe_or_model, "pag_applied_layers"):
        return False
    blocks = (block for host in hosts for block in host.blocks)
    layers = ((getattr(block.module, layer.name), layer) for block in blocks for layer in block.layers)
    return all(_is_fused(module) for module, layer in layers if layer.kind != "ff")


def _is_fused(attention: nn.Module) -> bool:
    processor = getattr(attention, "processor", None)
    backend = getattr(processor, "_attention_backend", None) or os.environ.get("DIFFUSERS_ATTN_BACKEND")
    call = type(attention).forward if processor is None else type(processor).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    named = set() if code is None else set(code.co_names)
    return bool(_FUSED & named) and getattr(backend, "value", backend or "native") in _BACKENDS
