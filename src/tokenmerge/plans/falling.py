"""A ratio that falls over the steps of a generation.

At the same mean, images are closer if more tokens merge in early steps than in late ones, most of all at
strong guidance. On a small FLUX it matters little. The idea is that of SDTM (arXiv 2505.11707). The four
phases and their factors are this project's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tokenmerge.config import Rule, ToMeConfig, highest_ratio

# The factors of the ratio in each quarter of the steps. Their mean is 1. More phases would make a compiled
# model compile for more numbers of tokens. A ratio that falls further is closer at strong guidance, but less
# close without guidance (benchmarks/falling_cpu.jsonl).
FACTORS = (1.15, 1.05, 0.95, 0.85)
# Above this ratio, cells are twice as wide: with fewer destinations, more sources are left to choose from.
# From 0.5 to here, those of 2 × 2 tokens are 0.6 dB closer at guidance 3, and as close at 7.
_CROWDED = 0.625


def width_of_cells(ratio: float) -> int:
    """Return the width of a destination's cell that suits a ratio in a stack of blocks, in tokens."""
    return 4 if ratio > _CROWDED else 2


def falling(config: ToMeConfig, factors: Sequence[float] = FACTORS) -> ToMeConfig:
    """Return settings whose ratio falls over the steps, and is that of ``config`` on average.

    ``factors`` are those of the ratio in as many parts of the steps, with a mean of 1. Cells are as wide as
    suits each ratio. A ratio with too little room above it falls less.
    """
    most = highest_ratio(width_of_cells(1.0), config.sy)
    room = most / config.ratio - 1 if config.ratio else 0.0
    highest = max(factors)
    if room <= 0 or highest == 1:
        return config
    share = min(1.0, room / (highest - 1))
    rules = []
    for phase, factor in enumerate(factors):
        ratio = round(config.ratio * (1 + (factor - 1) * share), 4)
        width = width_of_cells(ratio)
        changes = {"ratio": ratio, **({} if width == config.sx else {"sx": width})}
        start, until = phase / len(factors), (phase + 1) / len(factors)
        rules.append(Rule(start=start, until=until, changes=changes))
    return dataclasses.replace(config, rules=(*config.rules, *rules))
