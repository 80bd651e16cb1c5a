"""Which features are best for planning on both bundled models: inputs or residuals.

Tokens merge around self-attention of the top level of `emoji-unet`, or joint attention of `emoji-mmdit`, by
global matching, with proportional attention and without correction. A line shows the closeness to the dense
images of the same seeds as a mean over the prompts, and its difference to planning on the block's input, as
mean and standard error over the prompts. `auto` is compared too, with these features in place of its own.

    python benchmarks/features.py --size 128 --prompts 8 --out benchmarks/features_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import closeness
import torch
from diffusers import DiffusionPipeline

import tokenmerge
from tokenmerge import MergeSharing, ToMeConfig, token_merging
from tokenmerge_tools.demo import NAMES, path

BASE = "input"
SHARED = {"merge_sharing": MergeSharing(blocks=True)}
CHOICES: dict[str, Mapping[str, Any]] = {
    BASE: {},
    "residual": {"features": "residual"},
    "model_residual": {"features": "model_residual"},
    "model_residual, merge_sharing.blocks": {"features": "model_residual", **SHARED},
    "residual, merge_sharing.every=4": {
        "features": "residual",
        "merge_sharing": MergeSharing(every=4, guidance=False),
    },
}


def measure(model: str, size: int, options: argparse.Namespace) -> None:
    """Draw with each kind of features, and record the closeness of the images to dense."""
    pipe = DiffusionPipeline.from_pretrained(path(model))
    pipe.set_progress_bar_config(disable=True)
    dense = closeness.draw(pipe, size, options)
    found = {}
    base = ToMeConfig(ratio=options.ratio, proportional=True)
    for name, changes in CHOICES.items():
        with token_merging(pipe, dataclasses.replace(base, **changes)):
            found[name] = closeness.psnr(closeness.draw(pipe, size, options), dense)
        print(f"{model}, {name}", flush=True)
    closeness.show(size, options, found, base=BASE)
    if options.out is not None:
        conditions = {key: getattr(options, key) for key in ("ratio", "steps", "guidance")}
        versions = {"torch": torch.__version__, "tokenmerge": tokenmerge.__version__}
        about = {"model": model, "method": "tome", "size": size, **conditions, **versions}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**about, "psnr": found}) + "\n")


def main() -> None:
    parser = closeness.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=NAMES, default=list(NAMES))
    options = parser.parse_args()
    for model in options.model:
        for size in options.size:
            measure(model, size, options)


if __name__ == "__main__":
    main()
