"""The cost of applying token merging again with another ratio, as web UIs do between passes.

The model has the geometry of Stable Diffusion 1.5 and no weights, because their values have no effect. Every
call changes the ratio, so that nothing can be reused. CPU time is measured, because other programs on the
machine disturb it less. The ways of applying are interleaved.

    python benchmarks/reapply.py
    python benchmarks/reapply.py --out benchmarks/reapply_cpu.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel

from tokenmerge import ToMeConfig, apply_patch, apply_token_merging
from tokenmerge_tools.bench.loaded_model import GEOMETRIES
from tokenmerge_tools.machine import environment


def ways() -> dict[str, Callable[[float], object]]:
    """Return the ways of applying a ratio to a patched UNet."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**GEOMETRIES["sd15"].config)
    pipe = SimpleNamespace(unet=unet, scheduler=DDIMScheduler())  # auto reads the steps from it

    def by_config(ratio: float) -> object:
        return apply_token_merging(unet, ToMeConfig(ratio=ratio))

    return {
        "apply_patch(unet, ratio)": lambda ratio: apply_patch(unet, ratio),
        "apply_token_merging(unet, ToMeConfig(ratio=ratio))": by_config,
        "apply_token_merging(unet, ratio)": lambda ratio: apply_token_merging(unet, ratio),
        "apply_token_merging(pipe, ratio)": lambda ratio: apply_token_merging(pipe, ratio),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, help="append the figures to this file, one JSON line")
    options = parser.parse_args()
    torch.set_num_threads(1)

    apply = ways()
    milliseconds: dict[str, list[float]] = {name: [] for name in apply}
    ratios = itertools.cycle((0.3, 0.5))
    for index in range(options.rounds + 2):
        ratio = next(ratios)
        for name, again in apply.items():
            begin = time.process_time()
            again(ratio)
            if index > 1:  # the first calls import, and time merging on the device
                milliseconds[name].append(1e3 * (time.process_time() - begin))
    found = {}
    for name, times in milliseconds.items():
        low, median, high = statistics.quantiles(times, n=4)
        found[name] = {"median": round(median, 2), "quartiles": [round(low, 2), round(high, 2)]}
        print(f"{name:52} {median:6.2f} ms of CPU, quartiles {low:.2f} to {high:.2f}")
    if options.out:
        conditions = {"rounds": options.rounds, "ratios": [0.3, 0.5], "environment": environment()}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"model": "SD 1.5, no weights", **conditions, "ms": found}) + "\n")


if __name__ == "__main__":
    main()
