"""The default method: all settings from one number, the pipeline and the device."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from tokenmerge.config import Correction, PlanSharing, StepReuse, ToMeConfig
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge.models.placement import device_of, dtype_of, narrowest_attention
from tokenmerge.models.solver import adds_noise, amplifies
from tokenmerge.models.unet_stages import work_of
from tokenmerge.models.unet_work import UNetWork
from tokenmerge.planners.calibration import fewest_tokens

__all__ = ["choose"]

# Functions that run fused attention, of PyTorch or other kernels, called by the model or by its processor in
# diffusers.
_FUSED = {"scaled_dot_product_attention", "dispatch_attention_fn", "memory_efficient_attention"}

# Above this ratio, whole blocks merge, which loses more detail. UNets are excluded: their finest level would
# lose too much.
_MODERATE = 0.5
# Step reuse of UNets, as measured: the ratio, then StepReuse's every, shallow_every, shallow_from and
# shallow_until. Values between two ratios are interpolated.
_REUSE_OF_STAGES = (
    (0.0, 1.0, 1.0, 0.3, 0.9),
    (0.25, 2.0, 2.0, 0.3, 0.9),
    (0.4, 2.0, 2.0, 0.15, 0.9),
    (0.5, 3.0, 2.0, 0.0, 1.0),
    (0.75, 4.0, 3.0, 0.0, 1.0),
)
# The same under strong guidance: the ratio, the fraction of tokens that is removed, every, start,
# shallow_from and shallow_until. Between the last two, every second step runs the finest level; if they are
# equal, every step does. Skipping it loses most in the first half of the steps and in the last ones. Strong
# guidance multiplies the error of merging too. Where attention is a small part of the work, merging saves
# little, and skipping more steps instead is closer at the same speed.
_STRONG_WITH_MUCH_ATTENTION = (
    (0.0, 0.0, 1.0, 0.6, 0.7, 0.7),
    (0.25, 0.45, 2.0, 0.6, 0.7, 0.7),
    (0.4, 0.5, 2.5, 0.0, 0.55, 0.85),
    (0.5, 0.6, 3.0, 0.0, 0.55, 0.85),
    (0.6, 0.7, 3.2, 0.0, 0.5, 0.9),
    (0.75, 0.75, 4.0, 0.0, 0.0, 1.0),
)
_STRONG_WITH_LITTLE_ATTENTION = (
    (0.0, 0.0, 1.0, 0.0, 0.5, 0.5),
    (0.25, 0.25, 2.3, 0.0, 0.5, 0.5),
    (0.4, 0.35, 2.5, 0.0, 0.55, 0.85),
    (0.5, 0.45, 3.0, 0.0, 0.55, 0.85),
    (0.6, 0.45, 4.0, 0.0, 0.5, 0.9),
    (0.75, 0.6, 4.0, 0.0, 0.0, 1.0),
)
# It is much attention from this share of the work on. Stable Diffusion 1.5 has 0.15, SDXL 0.03.
_MUCH_ATTENTION = 0.3
# Skipping the finest level loses more with solvers that add noise in each step. With these, every step runs
# it up to this ratio, and more tokens merge instead.
_FINEST_LEVEL_WITH_NOISE, _FURTHER_TOKENS_WITH_NOISE = 0.6, 0.05
# Under strong guidance, fewer destinations leave more sources to choose the removed tokens from.
_STRIDE_UNDER_STRONG_GUIDANCE = 4
# The finest level of a UNet skips steps if it is a larger share of the work than this.
_WORTHWHILE_FINEST_LEVEL = 0.2
# Above _MODERATE, UNets merge this share of the further tokens. Skipping more steps is closer at the same
# speed.
_FURTHER_TOKENS_OF_UNETS = 0.4
# From this ratio on, UNets have no correction, since its dense steps would cost more than they gain.
_WITHOUT_CORRECTION = 0.4
# With few steps, extrapolation is worse, most of all for the residuals of blocks. Generations shorter than
# these numbers of steps skip less. A UNet suffers less, because its finest level computes the details anew.
# Below 20 steps, a mean distance of up to a fifth of them is still allowed.
_STEPS_OF_BLOCKS, _STEPS_OF_STAGES, _SPAN_OF_STAGES = 16, 20, 1 / 5
# Beside step reuse, merging on smaller grids saves little and loses more quality than skipping more steps.
_FEWEST_TOKENS_BESIDE_REUSE = 2048
# From this scale on, guidance amplifies the error of extrapolation in transformers. At the same speed,
# merging whole blocks in most steps is then closer than skipping most steps.
_STRONG_GUIDANCE = 5.0


def choose(pipe_or_model: object, ratio: float = 0.5, follows_steps: bool | None = None) -> ToMeConfig:
    """Choose the settings that measured closest to the dense picture at the same speed.

    - **Merging**: self-attention merges at every level, with tiled matching and proportional attention. Above
      a ratio of 0.5, whole blocks merge, except in UNets. Token grids stay dense if merging would cost more
      time than it saves; the limit is measured once on each device. With step reuse, grids of fewer than 2048
      tokens stay dense too.
    - **Plans**: beside step reuse, blocks share a plan. In models other than UNets whose blocks can merge as
      a whole, plans compare what all blocks added at the step before (``features="model_residual"``).
    - **Correction** (``correction.every``): every second full step is dense and corrects the others. UNets
      have no correction from a ratio of 0.4 on.
    - **High ratios** in UNets: above 0.5, only 0.4 of the further tokens are removed, 60 % of all at a ratio
      of 0.75. More steps are skipped instead, which loses less at the same speed.
    - **Step reuse** (``reuse``): the parts that can be skipped run in one of ``1 + 4 · ratio`` steps: every
      second one at a ratio of 0.25, every third at 0.5. UNets stay at every second one up to 0.4, and skip
      the levels below the finest. If the finest level is a large part of the work, it skips steps too: from a
      ratio of 0.25 to 0.5 it runs in every second step, and at 0.75 in every third. Up to a ratio of 0.25,
      the first 30 % of the steps run all of it; at 0.5, it can be skipped from the third step on. Up to a
      ratio of 0.4, the last 10 % of the steps run all of it too. UNets skip
      less below 20 steps, and nothing below 10, or below 7 where the ratio is above 0.5; other models skip
      less below 16 steps.
    - **Solvers that add noise in each step** (Euler ancestral, DPM++ SDE, DDPM), in UNets from a guidance
      scale of 5 on: up to a ratio of 0.6, every step runs the finest level, and 5 % more of the tokens merge.
    - **Solvers that combine four steps** (PNDM, LMS), in UNets from a guidance scale of 5 on: the finest
      level runs in all steps, and the deep stages in more of them. For both kinds of solver, the scheduler
      that the pipeline has at this call decides.
    - **Strong guidance in UNets** (``by_guidance``, from a scale of 5 on): no step corrects what merges. If
      attention is a large part of the work, more tokens merge, 45 % at a ratio of 0.25 and 60 % at 0.5, and
      up to 0.25 the first 60 % of the steps skip nothing. Otherwise fewer merge, 25 % and 45 %, as in Stable
      Diffusion 1.5. Up to a ratio of 0.25, every step runs the finest level; above, every second step in the
      later half skips it, but not the last ones.
    - **Strong guidance in other models** (``by_guidance``, from a scale of 5 on): whole blocks merge, with
      a correction in every fourth full step up to a ratio of 0.25 and in every sixth above, and fewer steps
      are skipped. Guidance multiplies the difference between two results, which is hard to extrapolate.

    Correction and step reuse need to follow the denoising steps, see ``follows_steps``. The baseline to beat
    is simply using fewer steps; docs/methods/auto.md says where that is as close at the same speed.

    Args:
        pipe_or_model: as for :func:`tokenmerge.apply_token_merging`. It must be on the device that it will
            run on, or be offloaded from it, because merging is timed there.
        ratio: fraction of tokens removed, 0 ≤ ratio ≤ 0.75; UNets remove fewer above 0.5. Raising it makes
            attention or whole blocks faster, skips more steps, and makes the picture less like the dense one.
            At 0, every step is dense. If all grids are so small that they stay dense, the ratio only decides
            how many steps are skipped.
        follows_steps: whether settings may change over the denoising steps. None: only in a pipeline.

    Raises:
        UnsupportedModelError: the object neither is nor contains a supported model.
        ConfigError: the ratio is out of range.
    """
    return choose_for(pipe_or_model, find_hosts(pipe_or_model), ratio, follows_steps)


def choose_for(
    pipe_or_model: object, hosts: Sequence[Host], ratio: float, follows_steps: bool | None = None
) -> ToMeConfig:
    """The same as :func:`choose`, for models that have been found in a pipeline or a model."""
    ratio = ToMeConfig(ratio=ratio).ratio
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
            device_of(pipe_or_model, denoiser.root), dtype_of(denoiser.root), *narrowest_attention(blocks)
        ),
        scope="block" if wide else "layers",
        planner="tiled",
        proportional=_calls_fused_attention(pipe_or_model, hosts),
        correction=Correction(every=2 if follows_steps else 0),
    )
    if not follows_steps:
        return settings
    if denoiser.deep_stages:
        scheduler = getattr(pipe_or_model, "scheduler", None)
        return with_skipped_stages(settings, work_of(denoiser), scheduler)
    if not denoiser.can_skip:
        return settings
    if whole:
        # Step reuse computes what the blocks add in any case.
        settings = dataclasses.replace(settings, features="model_residual", plans=PlanSharing(blocks=True))
    return with_skipped_blocks(settings, whole)


def with_skipped_stages(settings: ToMeConfig, work: UNetWork, scheduler: object = None) -> ToMeConfig:
    """The settings of a UNet that skips its deep stages on some steps.

    Args:
        settings: the settings without step reuse.
        work: how the work of a call is distributed.
        scheduler: of the pipeline; None: unknown.
    """
    every, shallow_every, shallow_from, shallow_until = _between(_REUSE_OF_STAGES, settings.ratio)
    if work.finest_share <= _WORTHWHILE_FINEST_LEVEL:
        shallow_every, shallow_from, shallow_until = 1.0, 0.0, 1.0
    if amplifies(scheduler):
        strong = _under_amplification(every)
    else:
        strong = _stages_under_strong_guidance(settings.ratio, work, adds_noise(scheduler))
    further = max(0.0, settings.ratio - _MODERATE) * (1 - _FURTHER_TOKENS_OF_UNETS)
    return dataclasses.replace(
        settings,
        ratio=round(settings.ratio - further, 3),
        min_tokens=max(settings.min_tokens, _FEWEST_TOKENS_BESIDE_REUSE),
        plans=PlanSharing(blocks=True),
        correction=Correction(every=0 if settings.ratio >= _WITHOUT_CORRECTION else 2),
        reuse=StepReuse(
            every=every,
            shallow_every=shallow_every,
            shallow_from=shallow_from,
            shallow_until=shallow_until,
            span=max(_SPAN_OF_STAGES, 2 * math.ceil(shallow_every) / _STEPS_OF_STAGES),
        ),
        by_guidance={_STRONG_GUIDANCE: strong},
    )


def with_skipped_blocks(settings: ToMeConfig, whole: bool) -> ToMeConfig:
    """The settings of another model that skips its blocks on some steps.

    Args:
        settings: the settings without step reuse.
        whole: whether all blocks can merge as a whole.
    """
    every = round(1 + 4 * settings.ratio, 2)
    return dataclasses.replace(
        settings,
        min_tokens=max(settings.min_tokens, _FEWEST_TOKENS_BESIDE_REUSE),
        reuse=StepReuse(every=every, span=_span_of_blocks(every)),
        by_guidance={_STRONG_GUIDANCE: _under_strong_guidance(settings.ratio)} if whole else {},
    )


def _between(rows: Sequence[tuple[float, ...]], ratio: float) -> tuple[float, ...]:
    """The values at a ratio, interpolated linearly between the rows, which begin with their ratio."""
    for (low, *start), (high, *end) in pairwise(rows):
        if ratio <= high:
            share = (ratio - low) / (high - low)
            return tuple(round(a + share * (b - a), 2) for a, b in zip(start, end, strict=True))
    raise AssertionError(f"ratio {ratio} is above the highest that settings allow")


def _under_strong_guidance(ratio: float) -> dict[str, Any]:
    """Changed settings of transformers: more merging, fewer corrections, and less step reuse."""
    every = round(1 + 1.5 * ratio + 1.5 * max(0.0, ratio - _MODERATE), 2)
    return {
        "scope": "block",
        "ratio": min(2 * ratio, _MODERATE) if ratio <= _MODERATE else ratio,
        "correction.every": 4 if ratio <= _MODERATE / 2 else 6,
        "reuse.every": every,
        "reuse.span": _span_of_blocks(every),
    }


def _stages_under_strong_guidance(ratio: float, work: UNetWork, noise: bool) -> dict[str, Any]:
    """Changed settings of UNets: no correction, and steps skip the finest level late, if at all.

    Args:
        ratio: that the user gave.
        work: how the work of a call is distributed.
        noise: whether the solver adds noise in each step.
    """
    much = work.attention_share >= _MUCH_ATTENTION
    rows = _STRONG_WITH_MUCH_ATTENTION if much else _STRONG_WITH_LITTLE_ATTENTION
    removed, every, start, shallow_from, shallow_until = _between(rows, ratio)
    if noise and shallow_from < shallow_until and ratio <= _FINEST_LEVEL_WITH_NOISE:
        removed, shallow_until = round(removed + _FURTHER_TOKENS_WITH_NOISE, 2), shallow_from
    merging = {"ratio": removed, "sx": _STRIDE_UNDER_STRONG_GUIDANCE, "correction.every": 0}
    if work.finest_share <= _WORTHWHILE_FINEST_LEVEL:
        return merging
    return {
        **merging,
        "reuse.every": every,
        "reuse.start": start,
        "reuse.shallow_every": 2 if shallow_from < shallow_until else 1,
        "reuse.shallow_from": shallow_from,
        "reuse.shallow_until": shallow_until,
    }


def _under_amplification(every: float) -> dict[str, Any]:
    """Changed settings of UNets: the finest level runs in all steps, and the deep stages in more of them."""
    return {"reuse.every": round((1 + every) / 2, 2), "reuse.shallow_every": 1, "reuse.shallow_from": 0.0}


def _span_of_blocks(every: float) -> float:
    """The span that limits the distance between full steps only in short generations."""
    return math.ceil(every) / _STEPS_OF_BLOCKS


def _calls_fused_attention(pipe_or_model: object, hosts: Sequence[Host]) -> bool:
    """Whether proportional attention is possible in every block."""
    # Perturbed-attention guidance replaces processors during a call, and splits the batch in attention.
    if hasattr(pipe_or_model, "pag_applied_layers"):
        return False
    blocks = (block for host in hosts for block in host.blocks)
    layers = ((getattr(block.module, layer.name), layer) for block in blocks for layer in block.layers)
    return all(_is_fused(module) for module, layer in layers if layer.kind != "ff")


def _is_fused(attention: nn.Module) -> bool:
    processor = getattr(attention, "processor", None)
    call = type(attention).forward if processor is None else type(processor).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    return code is not None and not _FUSED.isdisjoint(code.co_names)
