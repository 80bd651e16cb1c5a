"""Shared by the scripts on closeness: images of `emoji-unet`, their PSNR to dense, a table, a record."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from turns import at_least_2

import tokenmerge
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, nargs="+", default=[128, 256], help="pixels (default: 128 256)")
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--prompts", type=at_least_2, default=12)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--out", type=Path, help="append the figures to this file, one JSON line per size")
    return parser


def load() -> StableDiffusionPipeline:
    diffusers.utils.logging.set_verbosity_error()
    pipe = StableDiffusionPipeline.from_pretrained(path("emoji-unet"))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: StableDiffusionPipeline, size: int, options: argparse.Namespace) -> np.ndarray:
    """Draw one image per prompt, each with its own seed: [prompts, size, size, 3], from 0 to 1."""
    glyphs = read_glyphs()
    prompts = [caption(glyphs[i].name, background) for i, background in choose_prompts(options.prompts)]
    return pipe(
        prompts,
        height=size,
        width=size,
        num_inference_steps=options.steps,
        guidance_scale=options.guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in range(len(prompts))],
        output_type="np",
    ).images


def psnr(pictures: np.ndarray, dense: np.ndarray) -> list[float]:
    """Return the PSNR in dB, one number per image."""
    error = ((pictures - dense) ** 2).mean(axis=(1, 2, 3))
    return [float(value) for value in -10 * np.log10(error)]


def difference(values: Sequence[float], base: Sequence[float]) -> str:
    """Return the gain in closeness: mean and standard error of the differences per prompt."""
    more = [a - b for a, b in zip(values, base, strict=True)]
    return f"{statistics.mean(more):+.1f} ± {statistics.stdev(more) / len(more) ** 0.5:.1f}"


def show(size: int, options: argparse.Namespace, found: Mapping[str, Sequence[float]], base: str) -> None:
    """Print a line for each setting, with its difference to the setting `base`."""
    print(f"\n{size} × {size}, ratio {options.ratio:g}, {options.prompts} prompts, {options.steps} steps")
    width = max(map(len, found)) + 2
    print(f"{'':<{width}}{'dB':>6}{f'against {base}':>24}")
    for name, values in found.items():
        print(f"{name:<{width}}{statistics.mean(values):>6.1f}{difference(values, found[base]):>24}")


def record(size: int, options: argparse.Namespace, found: Mapping[str, Sequence[float]]) -> None:
    """Append the figures with their conditions to the file in the options, if one is given."""
    if options.out is None:
        return
    conditions = {key: getattr(options, key) for key in ("ratio", "steps", "guidance")}
    about = {"size": size, **conditions, "torch": torch.__version__, "tokenmerge": tokenmerge.__version__}
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**about, "psnr": found}) + "\n")
