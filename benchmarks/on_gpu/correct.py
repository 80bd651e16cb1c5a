"""Compare the device with the CPU: plans, results, seeds, removal; and count where it is waited for."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from on_gpu.models import Loop, build
from on_gpu.record import Facts, Run
from on_gpu.variants import SHARED, Context, default, stack
from tokenmerge import ToMeConfig, token_merging
from tokenmerge.planners import PLANNERS


def correct(run: Run) -> None:
    """Compare the device with the CPU: plans, results, seeds, removal. Count where it is waited for."""
    side = 16 if run.tiny else 64
    smooth = torch.randn(2, 320, side // 4, side // 4, generator=torch.Generator().manual_seed(1))
    x = F.interpolate(smooth, (side, side), mode="bicubic").flatten(2).transpose(1, 2).contiguous()
    for planner in PLANNERS.keys() - {"importance"}:  # which needs guidance

        def plans(planner: str = planner) -> Facts:
            make = PLANNERS[planner]
            step = torch.tensor(7)
            config = ToMeConfig(ratio=0.5, planner=planner)
            expected = make(x, (1, side, side), side * side // 2, config, step).labels()
            facts: Facts = {}
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                there = (
                    x.to(run.device, dtype),
                    (1, side, side),
                    side * side // 2,
                    config,
                    step.to(run.device),
                )
                found = make(*there).labels()
                again = make(*there).labels()
                other = (found.cpu() != expected).float().mean()
                facts[f"other_labels_{dtype}"] = round(float(other), 5)
                facts[f"same_twice_{dtype}"] = torch.equal(found, again)
            return facts

        run.measure(f"plan: {planner}", plans)
    for name in ("sd15", "flux"):
        if run.measure(f"{name}: seeds and removal", partial(_seeds_and_removal, run, name), 5):
            run.measure(f"{name}: dtypes", partial(_dtypes, run, name), 5)
            run.measure(f"{name}: waits", partial(_waits, run, name), 5)
        run.free()


def _small(run: Run, name: str, dtype: torch.dtype) -> Loop:
    """Return a loop with a small model of real width."""
    few = {"num_layers": 1, "num_single_layers": 2} if name == "flux" else {"layers_per_block": 1}
    side = 128 if run.tiny else 512
    return Loop(run, name, build(run, name, dtype, **few), side, side, quiet=True)


def _settings(loop: Loop) -> dict[str, Context]:
    stacks = {} if loop.is_unet else {"stack 0.5": partial(stack, loop, 0.5)}
    return {
        **stacks,
        "speed-up 2": partial(default, loop, fewest=0),
        "ratio 0.5": partial(token_merging, loop, ratio=0.5),
        "shared plan": partial(token_merging, loop, SHARED),
        "toma": partial(token_merging, loop, "toma"),
    }


@torch.no_grad()
def _seeds_and_removal(run: Run, name: str) -> Facts:
    """Return the largest differences of two runs with one seed, at no speed-up, and after removal."""
    loop = _small(run, name, torch.float32)
    dense = loop()
    facts = {}
    facts["dense twice"] = float((loop() - dense).abs().max())
    with default(loop, 1.0):
        facts["speed-up 1"] = float((loop() - dense).abs().max())
    for variant, context in _settings(loop).items():
        with context():
            first, second = loop(), loop()
        facts[f"{variant}, twice"] = float((first - second).abs().max())
        facts[f"{variant}, removed"] = float((loop() - dense).abs().max())
        facts[f"{variant}, error"] = round(_error(first, dense), 6)
    return facts


@torch.no_grad()
def _dtypes(run: Run, name: str) -> Facts:
    """Return the errors to float32 on the device, dense and merged: half precision may change which merge."""
    facts: Facts = {}
    expected: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        loop = _small(run, name, dtype)
        for variant, context in (("dense", contextlib.nullcontext), *_settings(loop).items()):
            with context():
                found = loop(2)
            error = _error(found, expected.setdefault(variant, found))
            facts[f"{variant}, {dtype}"] = round(error, 6)
    return facts


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@torch.no_grad()
def _waits(run: Run, name: str) -> Facts:
    """Return how many times each step waits for the device, and the lines that ask. Only CUDA counts them."""
    loop = _small(run, name, torch.float32)
    facts: Facts = {"counted": run.on_gpu}
    for variant, context in (("dense", contextlib.nullcontext), *_settings(loop).items()):
        with context():
            loop()  # kernels are loaded
            steps = Counter[int]()
            lines = Counter[str]()
            now = [-1]

            def show(
                message: Any,
                *_: Any,
                steps: Counter[int] = steps,
                lines: Counter[str] = lines,
                now: list[int] = now,
            ) -> None:
                if "synchronizing" in str(message):
                    frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
                    steps[now[0]] += 1
                    lines[f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1

            with warnings.catch_warnings(), mock.patch("warnings.showwarning", show):
                warnings.simplefilter("always")
                if run.on_gpu:
                    torch.cuda.set_sync_debug_mode("warn")
                try:
                    loop(noted=partial(now.__setitem__, 0))
                finally:
                    if run.on_gpu:
                        torch.cuda.set_sync_debug_mode("default")
        facts[variant] = {"steps": dict(steps), "lines": dict(lines.most_common(8))}
    return facts
