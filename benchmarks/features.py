"""Which features tell best what to merge: a block's input, its low frequencies, or the keys of its attention.

Tokens merge around self-attention of the top level of `emoji-unet`, by global matching, with proportional
attention and nothing that makes up for what merging loses. A line shows the closeness to the dense pictures
of the same seeds, the mean over the prompts, and by how much it differs from that with the block's input: the
mean and the standard error of the differences, prompt by prompt.

    python benchmarks/features.py --size 128 256 --ratio 0.5
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn
from torch.nn import functional as F

import tokenmerge
from tokenmerge import ToMeConfig, token_merging
from tokenmerge.demo import path
from tokenmerge.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge.methods import PLANNERS

Features = Callable[[Tensor, tuple[int, int, int], nn.Module], Tensor]


def block_input(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    return x


def low_frequencies(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    """The mean of each token and its neighbours, 3 × 3."""
    picture = x.transpose(1, 2).unflatten(2, grid[1:])
    means = F.avg_pool2d(picture, 3, stride=1, padding=1, count_include_pad=False)
    return means.flatten(2).transpose(1, 2)


def keys(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    """As ToMe for vision transformers has them (arXiv 2210.09461); here the heads side by side."""
    return block.attn1.to_k(block.norm1(x))


FEATURES: dict[str, Features] = {"block input": block_input, "low frequencies": low_frequencies, "keys": keys}


@contextmanager
def compared_by(features: Features, unet: nn.Module) -> Iterator[None]:
    """Let the planner `tome` compare tokens by these features."""
    running: list[nn.Module] = []
    hooks = [
        block.register_forward_pre_hook(lambda block, args: running.append(block))
        for block in unet.modules()
        if isinstance(block, BasicTransformerBlock)
    ]
    plan = PLANNERS["tome"]

    def planner(x: Tensor, grid: tuple[int, int, int], config: ToMeConfig, step: Tensor) -> object:
        return plan(features(x, grid, running[-1]), grid, config, step)

    try:
        with mock.patch.dict(PLANNERS, {"tome": planner}):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def measure(pipe: StableDiffusionPipeline, size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """PSNR to dense in dB, by features: one number a prompt."""
    glyphs = read_glyphs()
    prompts = [caption(glyphs[i].name, background) for i, background in choose_prompts(options.prompts)]

    def draw() -> np.ndarray:
        return pipe(
            prompts,
            height=size,
            width=size,
            num_inference_steps=options.steps,
            guidance_scale=options.guidance,
            generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
            output_type="np",
        ).images

    # Keys and smoothed tokens are of one prompt; so each half of guidance has a plan of its own.
    config = ToMeConfig(ratio=options.ratio, proportional=True, share_guidance=False)
    dense, found = draw(), {}
    for name, features in FEATURES.items():
        with token_merging(pipe, config), compared_by(features, pipe.unet):
            error = ((draw() - dense) ** 2).mean(axis=(1, 2, 3))
        found[name] = [float(value) for value in -10 * np.log10(error)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, nargs="+", default=[128, 256], help="pixels (default: 128 256)")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="append the figures to this file, a JSON line a size")
    options = parser.parse_args()

    diffusers.utils.logging.set_verbosity_error()
    pipe = StableDiffusionPipeline.from_pretrained(path("emoji-unet"))
    pipe.set_progress_bar_config(disable=True)
    for size in options.size:
        found = measure(pipe, size, options)
        print(f"\n{size} × {size}, ratio {options.ratio:g}, {options.prompts} prompts, {options.steps} steps")
        print(f"{'features':<17}{'dB':>6}{'against the input':>20}")
        for name, values in found.items():
            more = [a - b for a, b in zip(values, found["block input"], strict=True)]
            error = statistics.stdev(more) / len(more) ** 0.5
            against = f"{statistics.mean(more):+.1f} ± {error:.1f}"
            print(f"{name:<17}{statistics.mean(values):>6.1f}{against:>20}")
        if options.out:
            conditions = {key: getattr(options, key) for key in ("ratio", "steps", "guidance")}
            about = {"size": size, **conditions, "torch": torch.__version__}
            line = {**about, "tokenmerge": tokenmerge.__version__, "psnr": found}
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
