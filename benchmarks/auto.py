"""Time of a denoising step with `auto`, published methods and dense, on the geometry of well-known models.

Each model has random weights and runs without its pipeline, with the batch size of one guided image. Some
steps of `auto` are dense, some merge, and some run only a part of the model. Some published methods do not
plan at every step, or merge less at later steps. Each kind of step is timed, and a line shows the mean over
the generation. Rounds are interleaved: a line shows their median, their quartiles, and the median of the
speed-ups over dense in the same round. `tomesd` and `DeepCache` are the packages of their authors; the other
methods are presets. `auto` is timed at weak guidance, and with `--strong` also at a guidance scale of 7.5.

    python benchmarks/auto.py --model sd15 --size 512 768 --ratio 0.5 0.6 --strong
    python benchmarks/auto.py --model sd15 --size 512 --preset todo toma ca_tome ibtm sdtm sito
    python benchmarks/auto.py --model sd3@0.13 flux@0.03 --size 1024 --steps 28 --preset toma sito
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tomesd
import torch
import turns
from torch import nn

import tokenmerge
from tokenmerge import ToMeConfig, presets
from tokenmerge.default_method import settings_for
from tokenmerge.plans.generation import plan_generation
from tokenmerge_tools.bench.loaded_model import build_denoiser, example_inputs, find_geometry
from tokenmerge_tools.variants.caches import deepcache

Seconds = Callable[[], float]  # of one call
TIMESTEP = 500
STRONG_GUIDANCE = 7.5


class Pipe:
    """The part of a pipeline that merging reads."""

    scheduler = SimpleNamespace(timesteps=None)

    def __init__(self, model: nn.Module, guided: bool) -> None:
        self.model = model
        self.do_classifier_free_guidance = guided


def dense(pipe: Pipe, call: Seconds, steps: int) -> float:
    return call()


def with_tomesd(pipe: Pipe, call: Seconds, steps: int) -> float:
    tomesd.apply_patch(pipe.model, ratio=0.5)
    try:
        return call()
    finally:
        tomesd.remove_patch(pipe.model)


def with_deepcache(interval: int) -> Callable[[Pipe, Seconds, int], float]:
    def measure(pipe: Pipe, call: Seconds, steps: int) -> float:
        """Return the mean over a generation. DeepCache finds the step from the scheduler's timesteps."""
        scheduler = SimpleNamespace(timesteps=[TIMESTEP])  # the first step
        with deepcache(SimpleNamespace(unet=pipe.model, scheduler=scheduler), None, None, interval):
            everything = call()
            scheduler.timesteps = [TIMESTEP + 1, TIMESTEP]  # the second
            cached = call()
        full = len(range(0, steps, interval))
        return (full * everything + (steps - full) * cached) / steps

    return measure


def kinds_of_steps(config: ToMeConfig, steps: int) -> list[str]:
    """Return the kind of each step of a generation."""
    return [f"{step.kind.name} {step.merging.name}" for step in plan_generation(config, steps)]


def with_auto(speedup: float, guidance: float | None = None) -> Callable[[Pipe, Seconds, int], float]:
    def measure(pipe: Pipe, call: Seconds, steps: int) -> float:
        """Return the mean over a generation, from its first step of each kind."""
        config = settings_for(pipe, speedup, steps=steps, guidance=guidance)
        kinds = kinds_of_steps(config, steps)
        of_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
        with tokenmerge.token_merging(pipe, config) as patch:
            for index, kind in enumerate(kinds):
                if all(of_kind.values()):
                    break
                patch.at_step(index, steps)
                of_kind[kind].append(call())
        return statistics.mean(statistics.mean(of_kind[kind]) for kind in kinds)

    return measure


def with_preset(name: str) -> Callable[[Pipe, Seconds, int], float]:
    def measure(pipe: Pipe, call: Seconds, steps: int) -> float:
        """Return the mean over a generation."""
        config = getattr(presets, name)()
        shares = shares_of_steps(config, steps)
        total = 0.0
        with tokenmerge.token_merging(pipe, config) as patch:
            for index in range(max(shares) + 1):
                patch.at_step(index, steps)
                if index in (0, *shares):  # the first call begins the generation
                    total += shares.get(index, 0.0) * call()
        return total

    return measure


def shares_of_steps(config: ToMeConfig, steps: int) -> dict[int, float]:
    """Return the steps of a generation to time, and the share of all steps that each represents."""
    if any(rule.of_steps for rule in config.rules):
        return {steps * (2 * quarter + 1) // 8: 1 / 4 for quarter in range(4)}  # the middle of each quarter
    if config.merge_sharing.every > 1:
        planned = len(range(0, steps, config.merge_sharing.every)) / steps
        return {0: planned, 1: 1 - planned}
    if config.guided_planner:
        return {0: 1 / steps, 1: 1 - 1 / steps}  # the first step has no step before it
    return {0: 1.0}


def timed(model: nn.Module, inputs: tuple[Any, ...], others: dict[str, Any]) -> Seconds:
    device = next(model.parameters()).device

    @torch.no_grad()
    def call() -> float:
        args = tuple(value.clone() for value in inputs)  # as in a pipeline, each step has a new sample
        return turns.seconds(lambda: model(*args, **others), device)

    return call


def measure(name: str, size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    geometry = find_geometry(name)
    model = build_denoiser(geometry, getattr(torch, options.dtype), torch.device(options.device), seed=0)
    samples = 2 if geometry.guided else 1
    inputs, others = example_inputs(model, (size // 8, size // 8), samples, guided=geometry.guided)
    variants: dict[str, Callable[[Pipe, Seconds, int], float]] = {"dense": dense}
    if "unet" in geometry.denoiser.lower():
        # Pass the timestep by position and as one number, as pipelines do: DeepCache reads it there.
        del others["timestep"]
        inputs = (*inputs, torch.tensor(TIMESTEP))
        variants["tomesd 0.5"] = with_tomesd
        variants |= {f"DeepCache {interval}": with_deepcache(interval) for interval in (2, 3)}
    variants |= {name: with_preset(name) for name in options.preset}
    variants |= {f"auto {ratio:g}": with_auto(ratio) for ratio in options.ratio}
    if options.strong and geometry.guided:
        strong = f"at guidance {STRONG_GUIDANCE:g}"
        variants |= {f"auto {ratio:g} {strong}": with_auto(ratio, STRONG_GUIDANCE) for ratio in options.ratio}
    pipe = Pipe(model, geometry.guided)
    call = timed(model, inputs, others)
    call()  # warm-up
    return turns.in_turns(
        {name: functools.partial(of, pipe, call, options.steps) for name, of in variants.items()},
        options.rounds,
        f"{name} {size}",
        warm_up=False,
    )


def main() -> None:
    parser = turns.parser(__doc__, rounds=5)
    parser.add_argument("--model", nargs="+", default=["sd15"], help="geometries of `tokenmerge bench`")
    parser.add_argument("--size", type=int, nargs="+", default=[512, 768], help="pixels (default: 512 768)")
    parser.add_argument("--ratio", type=float, nargs="+", default=[0.5, 0.6], help="ratios of auto")
    published = [name for name in presets.__all__ if name != "tomesd"]
    parser.add_argument("--preset", nargs="+", default=[], choices=published, help="published methods")
    parser.add_argument("--steps", type=int, default=20, help="denoising steps (default: 20)")
    strong = f"time auto at a guidance scale of {STRONG_GUIDANCE:g} too, in models with guidance"
    parser.add_argument("--strong", action="store_true", help=strong)
    options = parser.parse_args()

    for name in options.model:
        for size in options.size:
            times = measure(name, size, options)
            turns.record(options, times, model=name, size=size, steps=options.steps)
            print(f"\n{name}, {size} × {size}, {options.steps} steps, {options.dtype}, ", end="")
            print(f"{options.device}, {torch.get_num_threads()} threads")
            print(f"{'variant':<28}{'s a step':>10}{'quartiles':>18}{'speed-up':>10}")
            for variant, values in times.items():
                low, _, high = statistics.quantiles(values, n=4)
                gain = statistics.median(a / b for a, b in zip(times["dense"], values, strict=True))
                median = statistics.median(values)
                print(f"{variant:<28}{median:>10.3f}{f'{low:.3f} to {high:.3f}':>18}{gain:>9.2f}x")


if __name__ == "__main__":
    main()
