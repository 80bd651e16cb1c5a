"""How planning, merging and unmerging grow with the number of tokens, beside a dense denoising step.

The model is Stable Diffusion 1.5's UNet with random weights, called as for one guided picture. For each block
of the top level, merging around self-attention plans once, merges once and unmerges once; what that takes is
timed on tokens of that size alone, five times for the five blocks. The two parts of a line take turns.

    python benchmarks/growth.py --size 256 512 768 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tokenmerge
from tokenmerge import ToMeConfig
from tokenmerge.bench.geometry import build_denoiser, find_geometry
from tokenmerge.bench.inputs import InputSize, example_inputs
from tokenmerge.methods import PLANNERS
from tokenmerge.ops import merge, shared_features, unmerge

BLOCKS, CHANNELS, FACTOR = 5, 320, 8  # of the top level; pixels per latent


def seconds(function: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


@torch.no_grad()
def measure(size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    model = build_denoiser(find_geometry("sd15"), dtype, device, seed=0)
    inputs = example_inputs(
        model, InputSize(height=size, width=size, scale=FACTOR, samples=2, frames=1), seed=0, guided=True
    )
    side = size // FACTOR
    tokens = torch.randn(2, side * side, CHANNELS, dtype=dtype, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)

    def merging(planner: str) -> Callable[[], None]:
        config = ToMeConfig(ratio=0.5, planner=planner)

        def around_all_blocks() -> None:
            for _ in range(BLOCKS):
                # Guidance's halves share a plan, which is made of the tokens of both.
                features = shared_features(tokens, 2)
                plan = PLANNERS[planner](features, (1, side, side), config, step).repeated(2)
                unmerge(plan, merge(plan, tokens))

        return around_all_blocks

    calls = {planner: merging(planner) for planner in options.planner}
    calls["dense"] = lambda: model(*inputs.args, **inputs.kwargs)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(options.rounds + 1):
        for name, call in calls.items():
            took = seconds(call, device)
            print(f"{size}: round {turn}: {name} {took:.3f} s", file=sys.stderr, flush=True)
            if turn:  # the first warms up
                times[name].append(took)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, nargs="+", default=[256, 512, 768, 1024], help="pixels")
    parser.add_argument("--planner", nargs="+", default=["tiled", "tome"], choices=sorted(PLANNERS))
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: 3)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="append a JSON line for each size to this file")
    options = parser.parse_args()

    print(f"{'tokens':>7}{'planner':>9}{'merging, ms':>13}{'dense step, s':>15}{'share':>9}")
    for size in options.size:
        times = measure(size, options)
        dense = statistics.median(times["dense"])
        for planner in options.planner:
            took = statistics.median(times[planner])
            line = f"{(size // FACTOR) ** 2:>7}{planner:>9}{1000 * took:>13.1f}{dense:>15.3f}"
            print(f"{line}{took / dense:>9.2%}")
        if options.out:
            conditions = {
                "size": size,
                "dtype": options.dtype,
                "device": options.device,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "tokenmerge": tokenmerge.__version__,
            }
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**conditions, "seconds": times}) + "\n")


if __name__ == "__main__":
    main()
