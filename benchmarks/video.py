r"""Merging in the frames of a video and over time: tokens, operations and time of a block.

The models are Wan 2.1 1.3B and HunyuanVideo with their real widths, random weights and one block (of
HunyuanVideo a double block), called for one video without guidance. Self-attention merges, as in ToMe for SD.
`dense` merges nothing. `tiled st=1` merges each frame by itself; `st=2` and `st=4` have cells of 2 and 4
frames of tokens.

Operations are counted without running, for 81 frames of 832 × 480 pixels, at each ratio that the cells allow.
Planning, merging and unmerging are timed without the model, on tokens of that size. The whole block is timed
at `--block-frames`, because a dense block with 81 frames takes over a minute on a CPU. Rounds are
interleaved.

    python benchmarks/video.py --out benchmarks/video_cpu.jsonl
    python benchmarks/video.py --model wan --block-frames 81 --out benchmarks/video_cpu.jsonl

A speed-up is the median over rounds of the dense time divided by the variant's time in the same round.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import statistics
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import turns
from torch import nn

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.config import highest_ratio
from tokenmerge.models.find import find_hosts
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.sequences import num_removed
from tokenmerge.report.flops import count_flops
from tokenmerge_tools.bench.loaded_model import GEOMETRIES
from tokenmerge_tools.pipelines.loading import shared_copy

# Pixels and frames per latent position of both autoencoders.
FACTOR = 8
FRAMES_PER_LATENT = 4
PATCH = 2  # latent positions of a token, along each side


@dataclasses.dataclass(frozen=True)
class Model:
    """A video transformer cut to one block.

    Attributes:
        build: a function that makes the model, with random weights.
        block: path of the block.
        channels: channels of its tokens.
    """

    build: Callable[[], nn.Module]
    block: str
    channels: int


MODELS = {
    "wan": Model(
        lambda: diffusers.WanTransformer3DModel(**{**GEOMETRIES["wan"].config, "num_layers": 1}),
        "blocks.0",
        1536,
    ),
    "hunyuan-video": Model(
        lambda: diffusers.HunyuanVideoTransformer3DModel(
            num_layers=1, num_single_layers=0, num_refiner_layers=1
        ),
        "transformer_blocks.0",
        3072,
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tiled st=1": {"planner": "tiled", "st": 1},
    "tiled st=2": {"planner": "tiled", "st": 2},
    "tiled st=4": {"planner": "tiled", "st": 4},
    "tome st=2": {"planner": "tome", "st": 2},
    "tome st=4": {"planner": "tome", "st": 4},
}


def config_of(variant: str, ratio: float) -> ToMeConfig:
    return ToMeConfig(ratio=ratio, **VARIANTS[variant])


def grid_of(frames: int, size: tuple[int, int]) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the tokens of a video, from its frames and (width, height)."""
    width, height = (side // FACTOR // PATCH for side in size)
    return (frames - 1) // FRAMES_PER_LATENT + 1, height, width


def arguments_of(model: nn.Module, grid: tuple[int, int, int]) -> dict[str, Any]:
    """Return the arguments of a call for one video, with Gaussian noise."""
    frames, rows, columns = grid
    arguments = find_hosts(model)[0].example(rows * PATCH, columns * PATCH, 1)
    arguments["hidden_states"] = arguments["hidden_states"][:, :, :1].repeat(1, 1, frames, 1, 1)
    draw = torch.Generator().manual_seed(0)
    for name in ("hidden_states", "encoder_hidden_states"):
        if not arguments[name].is_meta:
            arguments[name].copy_(torch.randn(arguments[name].shape, generator=draw))
    return arguments


def count(name: str, options: argparse.Namespace) -> None:
    """Count the operations of a block at the full length, for each variant and ratio."""
    grid = grid_of(options.frames, options.size)
    n = grid[0] * grid[1] * grid[2]
    with torch.device("meta"):
        dense = MODELS[name].build().eval()

    def operations(model: nn.Module) -> int:
        return count_flops(model, arguments_of(model, grid))[f"{type(model).__name__}.{MODELS[name].block}"]

    whole = operations(dense)
    print(f"\n{name}, {options.frames} frames of {' × '.join(map(str, options.size))} pixels, {n} tokens")
    print(f"{'variant':<22}{'tokens':>8}{'TFLOPs':>9}{'of dense':>10}")
    print(f"{'dense':<22}{n:>8}{whole / 1e12:>9.2f}{1:>10.1%}")
    counted = {"dense": whole}
    for ratio in options.count_ratio:
        for variant in VARIANTS:
            if ratio > highest_ratio(2, 2, VARIANTS[variant]["st"]):
                continue
            model = copy.deepcopy(dense)
            apply_token_merging(model, config_of(variant, ratio))
            label = f"{variant} ratio={ratio:g}"
            found = operations(model)
            counted[label] = found
            print(f"{label:<22}{n - int(ratio * n):>8}{found / 1e12:>9.2f}{found / whole:>10.1%}")
    turns.record(options, {}, model=name, what="operations", frames=options.frames, tokens=n, counted=counted)


@torch.no_grad()
def time_merging(name: str, options: argparse.Namespace) -> None:
    """Time planning, merging and unmerging once each, at the full length."""
    grid = grid_of(options.frames, options.size)
    n = grid[0] * grid[1] * grid[2]
    device = torch.device(options.device)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(1, n, MODELS[name].channels, generator=draw)
    tokens = tokens.to(device, getattr(torch, options.dtype))
    step = torch.zeros((), dtype=torch.int64, device=device)

    def around(variant: str) -> None:
        config = config_of(variant, options.ratio)
        plan = PLANNERS[config.planner](tokens, grid, num_removed(grid, config), config, step)
        plan.unmerge(plan.merge(tokens))

    calls = {v: functools.partial(turns.seconds, functools.partial(around, v), device) for v in VARIANTS}
    times = turns.in_turns(calls, options.rounds, f"{name}, merging {n} tokens", warm_up=False)
    print(f"\n{name}: planning, merging and unmerging {n} tokens, ratio {options.ratio:g}")
    for variant, values in times.items():
        print(f"{variant:<22}{statistics.median(values):>9.2f} s")
    conditions = {"model": name, "what": "merging", "frames": options.frames, "tokens": n}
    turns.record(options, times, **conditions, ratio=options.ratio)


class Stopwatch:
    """Times a block by its hooks, planning, merging and unmerging included."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0
        block.register_forward_pre_hook(lambda *_: self._start())
        block.register_forward_hook(lambda *_: self._stop())

    def _start(self) -> None:
        self.began = turns.now(self.device)

    def _stop(self) -> None:
        self.seconds = turns.now(self.device) - self.began


@torch.no_grad()
def time_block(name: str, options: argparse.Namespace) -> None:
    """Time a whole block, dense and with each variant."""
    frames = options.block_frames or {"wan": 29, "hunyuan-video": 13}[name]
    grid = grid_of(frames, options.size)
    device = torch.device(options.device)
    n = grid[0] * grid[1] * grid[2]
    torch.manual_seed(0)
    dense = MODELS[name].build().eval().to(device)
    if options.dtype != "float32":
        dense = dense.to(getattr(torch, options.dtype))
    dense(**arguments_of(dense, (2, 2, 2)))  # loads the weights, which all variants share, into memory
    arguments = arguments_of(dense, grid)

    def timed(variant: str | None) -> Callable[[], float]:
        model = shared_copy(dense)
        if variant is not None:
            apply_token_merging(model, config_of(variant, options.ratio))
        watch = Stopwatch(model.get_submodule(MODELS[name].block), device)

        def call() -> float:
            model(**arguments)
            return watch.seconds

        return call

    calls = {"dense": timed(None), **{variant: timed(variant) for variant in VARIANTS}}
    times = turns.in_turns(calls, options.rounds, f"{name}, a block of {n} tokens", warm_up=options.warm_up)
    print(f"\n{name}, {frames} frames, {n} tokens, ratio {options.ratio:g}, {options.dtype}")
    for variant, values in times.items():
        faster = [a / b for a, b in zip(times["dense"], values, strict=True)]
        print(f"{variant:<22}{statistics.median(values):>9.2f} s{statistics.median(faster):>9.2f}×")
    conditions = {"model": name, "what": "block", "frames": frames, "tokens": n, "ratio": options.ratio}
    turns.record(options, times, **conditions)


def main() -> None:
    parser = turns.parser(__doc__, rounds=2)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--size", type=int, nargs=2, default=[832, 480], help="width and height in pixels")
    parser.add_argument(
        "--frames", type=int, default=81, help="for counting and timing merging (default: 81)"
    )
    parser.add_argument(
        "--block-frames", type=int, help="for timing the block (default: 29 for wan, 13 for hunyuan-video)"
    )
    parser.add_argument("--ratio", type=float, default=0.5, help="ratio that is timed (default: 0.5)")
    parser.add_argument("--count-ratio", type=float, nargs="+", default=[0.5, 0.75, 0.875])
    parser.add_argument("--warm-up", action="store_true", help="run an untimed round first")
    parser.add_argument("--only-count", action="store_true", help="time nothing")
    options = parser.parse_args()
    for name in options.model:
        count(name, options)
        if not options.only_count:
            time_merging(name, options)
            time_block(name, options)


if __name__ == "__main__":
    main()
