"""Closeness and saved operations of token-wise reuse, `auto`, step reuse alone, and fewer steps.

Pictures of `emoji-mmdit` are drawn dense and with each method, for prompts and seeds that were not used to
choose settings. A line of the record is one picture: PSNR to the dense picture of the same seed, dense
operations over those of the method (`counted`, for the whole generation), and wall and CPU seconds. The
seconds are meaningful only on a quiet machine. A second run with the same record continues where the first
one stopped. `--table` prints the record as a table.

    python benchmarks/tokenwise.py --out benchmarks/tokenwise_cpu.jsonl
    python benchmarks/tokenwise.py --table --out benchmarks/tokenwise_cpu.jsonl
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from closeness import psnr
from diffusers import DiffusionPipeline
from solvers import draw, key, read, write
from turns import at_least_2

from tokenmerge import Correction, StepReuse, ToMeConfig, presets, token_merging
from tokenmerge.auto import choose
from tokenmerge.report import counted_speedup
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

MODEL, DENSE = "emoji-mmdit", "dense"
Method = Callable[[DiffusionPipeline], ToMeConfig]


def auto(ratio: float) -> Method:
    return lambda pipe: choose(pipe, ratio)


def fixed(**settings: Any) -> Method:
    return lambda pipe: ToMeConfig(**settings)


def token_wise(ratio: float, every: int, **settings: Any) -> Method:
    """Token-wise reuse around blocks. Of ``every`` full steps, one is dense."""
    return fixed(
        **{
            **{"ratio": ratio, "scope": "block", "planner": "tiled", "proportional": True},
            **{"combine": "reuse", "correction": Correction(every=every), **settings},
        }
    )


METHODS: Mapping[str, Method] = {
    **{f"auto {ratio:g}": auto(ratio) for ratio in (0.25, 0.5, 0.6)},
    **{
        f"step reuse alone, every {every:g}": fixed(ratio=0.0, reuse=StepReuse(every=every, spacing=0.8))
        for every in (2, 3, 4)
    },
    "token-wise 0.75, dense 1 of 6": token_wise(0.75, 6),
    "token-wise 0.75, extrapolated, dense 1 of 6": token_wise(0.75, 6, combine="extrapolate"),
    "token-wise 0.75, extrapolated, dense 1 of 6, in a stack": token_wise(
        0.75, 6, combine="extrapolate", scope="stack"
    ),
    "ras 0.5": lambda pipe: presets.ras(0.5),
    "ras 0.5, proportional": lambda pipe: presets.ras(0.5, proportional=True),
    "clusca": lambda pipe: presets.clusca(),
    "token-wise 0.5, dense 1 of 4": token_wise(0.5, 4),
    "merged 0.5, dense 1 of 4": token_wise(0.5, 4, combine="mean"),
    "token-wise 0.5, dense 1 of 2, step reuse every 2": token_wise(
        0.5, 2, reuse=StepReuse(every=2, spacing=0.8)
    ),
}
FEWER_STEPS = (10, 7, 5)  # of 20


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The fields of the record that all pictures of a prompt share, for each prompt."""
    glyphs = read_glyphs()
    for number, (index, background) in enumerate(choose_prompts(options.prompts, seed=23)):
        yield {
            **{"model": MODEL, "solver": "own", "guidance": options.guidance, "size": options.size},
            **{"steps": options.steps, "prompt": caption(glyphs[index].name, background)},
            "seed": 7000 + number,
        }


def run(options: argparse.Namespace) -> None:
    """Draw the pictures that are not in the record. The methods are interleaved at each prompt."""
    pipe = DiffusionPipeline.from_pretrained(path(MODEL))
    pipe.set_progress_bar_config(disable=True)
    side = options.size // pipe.vae_scale_factor
    configs = {name: method(pipe) for name, method in METHODS.items()}

    @functools.cache
    def counted(name: str) -> float:
        return counted_speedup(pipe, configs[name], side, side, batch=2, steps=options.steps)

    for row in rows(options):
        lacking = {key({**row, "method": name}) for name in (DENSE, *METHODS, *map(fewer, FEWER_STEPS))}
        lacking -= {key(line) for line in read(options.out)}
        if not lacking:
            continue
        dense, *taken = draw(pipe, row, options.steps)
        if key({**row, "method": DENSE}) in lacking:
            line = {"method": DENSE, "used": options.steps, "psnr": None, "counted": 1.0, "taken": taken}
            write(options.out, {**row, **line})
        for name in (*METHODS, *map(fewer, FEWER_STEPS)):
            if key({**row, "method": name}) not in lacking:
                continue
            steps = options.steps if name in METHODS else int(name.split()[1])
            with token_merging(pipe, configs[name]) if name in METHODS else nullcontext():
                image, *taken = draw(pipe, row, steps)
            saving = counted(name) if name in METHODS else options.steps / steps
            found = {"method": name, "used": steps, "psnr": psnr(image, dense)[0]}
            write(options.out, {**row, **found, "counted": round(saving, 3), "taken": taken})
            print(f"{row['prompt']}: {name} {found['psnr']:.1f} dB, {saving:.2f}x", flush=True)


def fewer(steps: int) -> str:
    """The name of a dense generation with fewer steps in the record."""
    return f"dense, {steps} steps"


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table for each size and number of steps, ordered by the saved operations."""
    latest = {key(line): line for line in lines if line["method"] != DENSE}
    groups: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in latest.values():
        where = tuple(line[name] for name in ("model", "size", "steps", "guidance"))
        groups[where][line["method"]].append(line)
    for (model, size, steps, guidance), found in groups.items():
        yield f"{model}, {size} × {size} pixels, {steps} steps, guidance {guidance:g}:\n"
        yield "| method | counted | PSNR to dense | prompts |"
        yield "|---|---:|---:|---:|"
        for method, own in sorted(found.items(), key=lambda item: item[1][0]["counted"]):
            values = [line["psnr"] for line in own]
            error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
            closeness = f"{statistics.mean(values):.1f}{error} dB"
            yield f"| {method} | {own[0]['counted']:.2f}× | {closeness} | {len(values)} |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256, help="pixels")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--prompts", type=at_least_2, default=4)
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per picture")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(read(options.out))))
    else:
        run(options)


if __name__ == "__main__":
    main()
