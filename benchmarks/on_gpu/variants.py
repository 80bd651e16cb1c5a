"""What is compared: contexts in which a model runs in one way, and the times of steps and generations."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import tokenmerge
from on_gpu import biases, clock
from on_gpu.models import STEPS_OF_SINGLE, Loop
from on_gpu.record import Facts, Run
from tokenmerge import Correction, MergeSharing, ToMeConfig, token_merging
from tokenmerge.plans import pays_from

Context: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SHARED = ToMeConfig(
    ratio=0.5, planner="tiled", merge_sharing=MergeSharing(blocks=True), proportional=True, max_downsample=2
)
# Tokens merge before the first block of a transformer and are unmerged after the last. The first step is
# dense, and later ones are corrected.
STACK = ToMeConfig(
    ratio=0.5,
    scope="block",
    planner="tiled",
    features="model_residual",
    proportional=True,
    merge_sharing=MergeSharing(blocks=True),
    correction=Correction(every=1000),
)
STACK_RATIOS = (0.5, 0.3)
# A generation is warmed up with its first steps alone.
WARM_UP_STEPS = 6
# A short step is timed several times.
MOST_CALLS = 5
SECONDS_OF_CALLS = 0.1


@contextlib.contextmanager
def default(loop: Any, speedup: float = 2.0, fewest: int | None = None) -> Iterator[Any]:
    """Apply the default method. ``fewest`` replaces the number of tokens from which merging pays here."""
    with contextlib.ExitStack() as stack:
        if fewest is not None:
            timed = mock.patch("tokenmerge.default_method.fewest_tokens", return_value=pays_from(fewest))
            stack.enter_context(timed)
        yield stack.enter_context(token_merging(loop, speedup=speedup))


@contextlib.contextmanager
def preferring(kernel: str, inner: Context = contextlib.nullcontext) -> Iterator[Any]:
    """Prefer an attention kernel, with the others where it takes no such attention."""
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([KERNELS[kernel], *others], set_priority=True), inner() as patch:
        yield patch


@contextlib.contextmanager
def tomesd(loop: Loop, ratio: float = 0.5) -> Iterator[None]:
    """Merge with the package tomesd."""
    from tokenmerge_tools.variants.contexts import tomesd

    with tomesd(loop.model, ToMeConfig(ratio=ratio)):
        yield


@contextlib.contextmanager
def apply_patch(loop: Loop, ratio: float = 0.5) -> Iterator[None]:
    """Merge by tomesd's call, in this package."""
    tokenmerge.apply_patch(loop.model, ratio=ratio)
    try:
        yield
    finally:
        tokenmerge.remove_patch(loop.model)


@contextlib.contextmanager
def deepcache(loop: Loop, interval: int) -> Iterator[None]:
    """Run the deep stages with the package DeepCache."""
    from tokenmerge_tools.variants.caches import deepcache

    with deepcache(loop, None, interval):
        yield


@contextlib.contextmanager
def stack(loop: Loop, ratio: float, bias: str | None = None) -> Iterator[Any]:
    """Merge once for all blocks.

    ``bias`` is a way of proportional attention, or None if the package chooses it.
    """
    way = contextlib.nullcontext() if bias is None else biases.using(bias)
    with way, token_merging(loop, dataclasses.replace(STACK, ratio=ratio)) as patch:
        yield patch


def methods(loop: Loop) -> dict[str, Context]:
    """Return the unchanged model, and merging in calls that the papers know."""
    found: dict[str, Context] = {"dense": contextlib.nullcontext}
    if loop.is_unet:
        found["tomesd"] = partial(tomesd, loop)
    found["apply_patch"] = partial(apply_patch, loop)
    found["ratio 0.5"] = partial(token_merging, loop, ratio=0.5)
    if loop.is_unet:
        found["ToDo"] = partial(token_merging, loop, "todo")
    return found


def stacks(loop: Loop) -> dict[str, Context]:
    """Return the unchanged transformer, and stacks at each ratio and with each bias."""
    found: dict[str, Context] = {
        "dense": contextlib.nullcontext,
        "dense, cuDNN": partial(preferring, "cuDNN"),
    }
    for ratio in STACK_RATIOS:
        found[f"stack {ratio}"] = partial(stack, loop, ratio)
    found["ratio 0.5"] = partial(token_merging, loop, ratio=0.5)
    for ratio in STACK_RATIOS:
        for bias in biases.BIASES:
            found[f"stack {ratio}, {bias}"] = partial(stack, loop, ratio, bias)
    return found


def speedups(loop: Loop) -> dict[str, tuple[Context, int]]:
    """Return generations of the unchanged model and of the default method, each with its number of steps.

    Fewer steps of the unchanged model stand beside.
    """
    dense = contextlib.nullcontext
    return {
        "dense": (dense, loop.steps),
        "speed-up 2": (partial(default, loop, 2.0), loop.steps),
        "speed-up 3": (partial(default, loop, 3.0), loop.steps),
        "half the steps": (dense, round(loop.steps / 2)),
        "a third of the steps": (dense, round(loop.steps / 3)),
        "speed-up 2, merging on all grids": (partial(default, loop, 2.0, 0), loop.steps),
        "speed-up 3, merging on all grids": (partial(default, loop, 3.0, 0), loop.steps),
    }


def call_step(loop: Loop, patch: Any, index: int) -> None:
    """Call the model as in one step of a generation. Where another package merges, there is no patch."""
    if hasattr(patch, "at_step"):
        patch.at_step(index, STEPS_OF_SINGLE)
    loop.step(index)


def time_step(run: Run, loop: Loop, context: Context, turn: int) -> Facts:
    """Return the times of a full step: one of the first of a generation, and some more if it is short.

    The steps before it are not timed. They load the kernels and make what lasts a generation.
    """
    with context() as patch, torch.no_grad():
        for index in range(loop.steps_before):
            call_step(loop, patch, index)
        clock.reset_peak(run)
        ends = time.monotonic() + SECONDS_OF_CALLS
        rows: list[Facts] = []
        most = clock.TINY_ROUNDS if run.tiny else MOST_CALLS
        while not rows or (len(rows) < most and time.monotonic() < ends):
            rows.append(clock.times_of(run, partial(call_step, loop, patch, loop.steps_before + len(rows))))
        peak = clock.peak_mib(run)
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {**found, "all_ms": [row["ms"] for row in rows], **peak}


def time_generation(
    run: Run, loop: Loop, context: Context, steps: int, warm_up_steps: int, turn: int
) -> Facts:
    """Return the time of all denoising steps. Round 0 runs the first of them alone."""
    clock.reset_peak(run)
    with context(), torch.no_grad():
        until = None if turn else warm_up_steps
        found = clock.times_of(run, partial(loop, until, steps=steps))
    return {**found, **clock.peak_mib(run), "steps": steps}


def steps_in_turns(
    run: Run, name: str, loop: Loop, variants: Mapping[str, Context], rounds: int, **about: Any
) -> None:
    """Time one full step of each variant in turns."""
    timed = {variant: partial(time_step, run, loop, context) for variant, context in variants.items()}
    clock.in_turns(run, f"{name}, one step", timed, rounds, **about)


def generations_in_turns(
    run: Run,
    name: str,
    loop: Loop,
    variants: Mapping[str, tuple[Context, int]],
    rounds: int,
    warm_up_steps: int = WARM_UP_STEPS,
    **about: Any,
) -> None:
    """Time whole generations of each variant in turns, after a warm-up."""
    timed = {}
    for variant, (context, steps) in variants.items():
        timed[variant] = partial(time_generation, run, loop, context, steps, warm_up_steps)
    clock.in_turns(run, f"{name}, generation", timed, rounds, warm_up=True, **about)
