"""The time of attention to merged tokens by each way to count them by their sizes, on a CPU.

The sizes are those of a plan for smooth random tokens, at ratio 0.5. All ways run in turns, in one thread;
the shortest CPU time of each counts, because other programs only make it longer. FlexAttention is left out:
where it is not compiled, it computes the logits of all pairs.

    python benchmarks/bias.py                # prints the times
    python benchmarks/bias.py --record       # and writes them to bias_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge import ToMeConfig
from tokenmerge.ops.sized_attention import attend_by_columns, attend_by_groups
from tokenmerge.planners import PLANNERS

RECORD = Path(__file__).with_name("bias_cpu.jsonl")
TOKENS = (1024, 4096)
HEADS = {40: 8, 64: 10, 128: 4}  # number by size
ROUNDS = 15


def sizes_of_a_plan(n: int) -> Tensor:
    """Return how many tokens each of n / 2 merged ones stands for: ``[1, n / 2]``."""
    side = math.isqrt(n)
    noise = torch.randn(1, 64, side // 4, side // 4, generator=torch.Generator().manual_seed(0))
    x = F.interpolate(noise, (side, side), mode="bicubic").flatten(2).transpose(1, 2)
    settings = ToMeConfig(ratio=0.5, planner="tiled").at_level(1)
    return PLANNERS["tiled"](x, (1, side, side), n // 2, settings, torch.tensor(7)).sizes


def ways(n: int, d: int) -> dict[str, Callable[[], Tensor]]:
    """Return the ways by name, for queries and keys of the merged tokens."""
    sizes = sizes_of_a_plan(n)
    draw = torch.Generator().manual_seed(d)
    heads = [torch.randn(1, HEADS[d], n // 2, d, generator=draw) for _ in range(3)]
    bias = sizes.log().view(1, 1, 1, -1)
    by_name = F.scaled_dot_product_attention
    return {
        "none": partial(F.scaled_dot_product_attention, *heads),
        "mask": partial(F.scaled_dot_product_attention, *heads, attn_mask=bias),
        "columns": partial(attend_by_columns, by_name, *heads, sizes, heads_first=True),
        "groups": partial(attend_by_groups, *heads, sizes),
    }


@torch.no_grad()
def milliseconds(n: int, d: int, rounds: int) -> dict[str, float]:
    """Return the shortest time of each way."""
    calls = ways(n, d)
    shortest = dict.fromkeys(ways(n, d), math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            shortest[name] = min(shortest[name], 1e3 * (time.process_time() - start))
    return {name: round(value, 3) for name, value in shortest.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help=f"write the times to {RECORD.name}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for n in TOKENS:
        for d in HEADS:
            sizes = len(sizes_of_a_plan(n).unique())
            facts = {"tokens": n, "merged": n // 2, "head": d, "heads": HEADS[d], "sizes": sizes}
            rows.append({**facts, "ms": milliseconds(n, d, options.rounds), "torch": torch.__version__})
            print(json.dumps(rows[-1]), flush=True)
    if options.record:
        RECORD.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
