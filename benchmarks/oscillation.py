"""Whether latents and block outputs oscillate from step to step, for each solver and guidance scale.

For dense generations of the bundled UNet, this measures the cosine between the change of the latents in one
step and their change one step before, and two steps before. It measures the same for the part of the model
that step reuse skips. The record has the means over steps and prompts. A cosine of 1 means a straight line,
which extrapolation can follow. A negative cosine after one step and a cosine near 1 after two steps mean an
oscillation at every step, which no extrapolation from the last two complete steps can follow.

    python benchmarks/oscillation.py --out benchmarks/oscillation_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from solvers import SOLVERS, scheduler
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

MODEL, STEPS, SEED = "emoji-unet", 20, 700
GUIDANCE = (3.0, 7.5)
LAGS = (1, 2)


def watched(
    pipe: DiffusionPipeline, prompt: str, scale: float, seed: int, size: int
) -> dict[str, list[Tensor]]:
    """The input latents of the UNet in each step, and the output of the part that step reuse skips."""
    unet: Any = pipe.unet
    seen: dict[str, list[Tensor]] = {"latents": [], "skipped part": []}

    def before(module: Any, args: tuple[Tensor, ...]) -> None:
        seen["latents"].append(args[0].detach().clone())

    def after(module: Any, args: Any, result: Any) -> None:
        made = result[0] if isinstance(result, tuple) else result.sample
        seen["skipped part"].append(made.detach().clone())

    # The last layer of the finest level runs in all steps. The part before it can be skipped.
    hooks = [
        unet.register_forward_pre_hook(before),
        unet.up_blocks[-1].attentions[-2].register_forward_hook(after),
    ]
    try:
        pipe(
            prompt,
            height=size,
            width=size,
            num_inference_steps=STEPS,
            guidance_scale=scale,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        )
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def agreement(values: Sequence[Tensor], lag: int) -> float:
    """Mean cosine between the change in a step and the change ``lag`` steps before."""
    changes = [(after - before).flatten(1) for before, after in pairwise(values)]
    pairs = zip(changes, changes[lag:], strict=False)
    return statistics.mean(cosine_similarity(one, other).mean().item() for one, other in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=128, help="pixels (default: 128, 1024 tokens)")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per solver and scale")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    pipe = DiffusionPipeline.from_pretrained(path(MODEL))
    pipe.set_progress_bar_config(disable=True)
    own, glyphs = dict(pipe.scheduler.config), read_glyphs()
    prompts = [
        caption(glyphs[i].name, background) for i, background in choose_prompts(options.prompts, seed=23)
    ]
    lines = []
    for scale in GUIDANCE:
        for name in SOLVERS:
            pipe.scheduler = scheduler(pipe, own, name)
            runs = [watched(pipe, prompt, scale, SEED + i, options.size) for i, prompt in enumerate(prompts)]
            line = {"model": MODEL, "size": options.size, "steps": STEPS, "prompts": len(prompts)}
            line |= {"solver": name, "guidance": scale}
            for what in runs[0]:
                for lag in LAGS:
                    found = statistics.mean(agreement(run[what], lag) for run in runs)
                    line[f"{what}, {lag} before"] = round(found, 3)
            print(line, flush=True)
            lines.append(line)
    options.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
