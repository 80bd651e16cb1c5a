"""From how many tokens on merging pays on a CPU, where the default method times nothing.

Each line has a model, a scope, a ratio, a number of tokens, and in how many of the tries merging saved at
least half as large a part of the time as of the operations. The number ``TOKENS_ON_CPU`` of
:mod:`tokenmerge.calibration` is read from these lines. In a line without a scope and a ratio, a fifth of the
tokens merged in self-attention.

    python benchmarks/fewest_tokens.py --out benchmarks/fewest_tokens_cpu.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch

from tokenmerge import calibration

# What merges, whether in ComfyUI, batch, channels, heads, and blocks that share a plan.
MODELS = {
    "emoji-unet": ("layers", False, 2, 64, 4, 1),
    "emoji-mmdit": ("block", False, 2, 160, 5, 6),
    "sd15": ("layers", False, 2, 320, 8, 5),
    "sdxl": ("layers", False, 2, 640, 10, 5),
}
SIDES = (16, 24, 32, 40, 48, 64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="file that gets a line for each grid")
    parser.add_argument("--tries", type=int, default=5)
    options = parser.parse_args()
    with torch.no_grad(), options.out.open("w", encoding="utf-8") as file:
        for (name, shape), side in itertools.product(MODELS.items(), SIDES):
            merging = calibration.TimedMerging(torch.device("cpu"), torch.float32, *shape)
            for ratio in calibration.RATIOS[merging.scope]:
                paid = sum(calibration._pays(merging, side, ratio) for _ in range(options.tries))
                line = {"model": name, "scope": merging.scope, "ratio": ratio, "tokens": side**2}
                line |= {"paid": paid, "tries": options.tries}
                line |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
                print(json.dumps(line), file=file, flush=True)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
