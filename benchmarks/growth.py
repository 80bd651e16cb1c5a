"""How the time of planning, merging and unmerging grows with the number of tokens, against a dense step.

The model is Stable Diffusion 1.5's UNet with random weights, called as for one guided image. For each block
of the top level, merging around self-attention plans once, merges once and unmerges once. These operations
are timed without the model, on tokens of the same size, five times for the five blocks. The two times of a
line come from interleaved rounds.

    python benchmarks/growth.py --size 256 512 768 1024
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import turns

from tokenmerge import ToMeConfig
from tokenmerge.config import GUIDED_PLANNERS
from tokenmerge.ops.matching import shared_features
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.sequences import num_removed
from tokenmerge_tools.bench.loaded_model import build_denoiser, example_inputs, find_geometry

# The blocks of the top level, and their channels.
BLOCKS = 5
CHANNELS = 320
FACTOR = 8  # pixels per latent


@torch.no_grad()
def measure(size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    model = build_denoiser(find_geometry("sd15"), dtype, device, seed=0)
    side = size // FACTOR
    args, kwargs = example_inputs(model, (side, side), 2, guided=True)
    tokens = torch.randn(2, side * side, CHANNELS, dtype=dtype, device=device)
    step = torch.zeros((), dtype=torch.int64, device=device)

    def merging(planner: str) -> Callable[[], None]:
        config = ToMeConfig(ratio=0.5, planner=planner)
        grid = (1, side, side)
        r = num_removed(grid, config)

        def around_all_blocks() -> None:
            for _ in range(BLOCKS):
                # Both halves of guidance share a plan, which is made from the tokens of both.
                features = shared_features(tokens, 2)
                plan = PLANNERS[planner](features, grid, r, config, step).repeated(2)
                plan.unmerge(plan.merge(tokens))

        return around_all_blocks

    calls: dict[str, Callable[[], object]] = {planner: merging(planner) for planner in options.planner}
    calls["dense"] = lambda: model(*args, **kwargs)
    return turns.in_turns(
        {name: functools.partial(turns.seconds, call, device) for name, call in calls.items()},
        options.rounds,
        str(size),
    )


def main() -> None:
    parser = turns.parser(__doc__, rounds=3)
    parser.add_argument("--size", type=int, nargs="+", default=[256, 512, 768, 1024], help="pixels")
    planners = sorted(set(PLANNERS).difference(GUIDED_PLANNERS))
    parser.add_argument("--planner", nargs="+", default=["tiled", "tome"], choices=planners)
    options = parser.parse_args()

    print(f"{'tokens':>7}{'planner':>9}{'merging, ms':>13}{'dense step, s':>15}{'share':>9}")
    for size in options.size:
        times = measure(size, options)
        dense = statistics.median(times["dense"])
        for planner in options.planner:
            took = statistics.median(times[planner])
            line = f"{(size // FACTOR) ** 2:>7}{planner:>9}{1000 * took:>13.1f}{dense:>15.3f}"
            print(f"{line}{took / dense:>9.2%}")
        turns.record(options, times, size=size)


if __name__ == "__main__":
    main()
