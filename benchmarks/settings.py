"""The effect of each single setting on closeness, against a base configuration.

The base merges around self-attention of the top level of `emoji-unet`, by global matching, with proportional
attention and one plan for both halves of guidance. Each other line changes the setting that it names. A line
shows the closeness to the dense images of the same seeds as a mean over the prompts, and its difference to
the base, as mean and standard error over the prompts.

    python benchmarks/settings.py --size 128 256 --ratio 0.5
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import closeness

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig, token_merging
from tokenmerge.config import dense_outside

BASE = "base"
PLANNERS = ("tiled", "uniform", "threshold", "importance", "windows", "sito")
BLOCKS = {"scope": "block"}
SETTINGS: dict[str, Mapping[str, Any]] = {
    BASE: {},
    "proportional=False": {"proportional": False},
    "merge_sharing.guidance=False": {"merge_sharing": MergeSharing(guidance=False)},
    **{f"planner={name}": {"planner": name} for name in PLANNERS},
    "planner=toma, sx=8, sy=8": {"planner": "toma", "sx": 8, "sy": 8},
    "combine=keep": {"combine": "keep"},
    "merge_sharing.blocks": {"merge_sharing": MergeSharing(blocks=True)},
    "merge_sharing.every=4": {"merge_sharing": MergeSharing(every=4)},
    # At the same mean ratio over the steps.
    "schedule.ratio=1.4 to 0.6": {"rules": [{"until": 0.5, "ratio": 0.6}, {"start": 0.5, "ratio": 0.4}]},
    "schedule.ratio=0.6 to 1.4": {"rules": [{"until": 0.5, "ratio": 0.4}, {"start": 0.5, "ratio": 0.6}]},
    "schedule.until=0.5": {"rules": dense_outside(0, 0.5)},
    "correction.every=2": {"correction": Correction(every=2)},
    "scope=keys": {"scope": "keys"},
    "scope=block": BLOCKS,
    "scope=block, correction.every=2": {**BLOCKS, "correction": Correction(every=2)},
    "reuse.every=2": {"reuse": StepReuse(every=2)},
    "reuse.every=2, reuse.shallow_every=2": {"reuse": StepReuse(every=2, shallow_every=2)},
}


def main() -> None:
    options = closeness.parser(__doc__).parse_args()
    pipe = closeness.load()
    base = ToMeConfig(ratio=options.ratio, proportional=True)
    for size in options.size:
        dense = closeness.draw(pipe, size, options)
        found = {}
        for name, changes in SETTINGS.items():
            with token_merging(pipe, dataclasses.replace(base, **changes)):
                found[name] = closeness.psnr(closeness.draw(pipe, size, options), dense)
            print(f"{size} × {size}: {name}", file=sys.stderr, flush=True)
        closeness.record(size, options, found)
        closeness.show(size, options, found, BASE)


if __name__ == "__main__":
    main()
