"""Measure the results in docs/methods: draw and time the methods of each grid with `tokenmerge evaluate`.

Existing results are measured again. The machine should do nothing else. Until November 2026,
`tokenmerge bench` timed these grids too, as whole pipelines; its records are beside them.

    python benchmarks/measure.py                         # all grids
    python benchmarks/measure.py cpu-methods-20          # one grid
    python benchmarks/measure.py --only auto             # `auto` and some other methods; an hour on 2 cores
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenmerge_tools.files import toml_parser

RESULTS = Path(__file__).parent / "results"
SPEEDUPS = (1.2, 1.5, 1.8, 2.0, 2.5, 3.0)
RIVALS = ("tomesd", "tome:proportional", "todo", "deepcache", "first-block-cache")
# Methods whose ratio is not one of those of `auto`.
WITH_RATIO = {
    "tomesd": "tomesd:ratio=0.5",
    "tome:proportional": "tome:proportional,ratio=0.5",
}
# Name of a grid → name of its closeness results, and number of prompts.
QUALITY = {
    "cpu-methods-20": ("cpu-quality-20", 6),
    "cpu-methods-20-256": ("cpu-quality-20-256", 3),
    "cpu-auto-20-256": ("cpu-quality-auto-20-256", 3),
    "cpu-guidance-unet": ("cpu-quality-20-guidance-7.5", 6),
    "cpu-guidance-unet-256": ("cpu-quality-20-256-guidance-7.5", 3),
    "cpu-methods-8": ("cpu-quality-8", 6),
    "cpu-methods-8-256": ("cpu-quality-8-256", 3),
    "cpu-mmdit-20": ("cpu-mmdit-quality-20", 4),
    "cpu-mmdit-20-256": ("cpu-mmdit-quality-20-256", 2),
    "cpu-guidance-mmdit": ("cpu-mmdit-quality-20-guidance-7", 4),
    "cpu-guidance-mmdit-256": ("cpu-mmdit-quality-20-256-guidance-7", 2),
    "cpu-mmdit-published-20": ("cpu-mmdit-published-quality-20", 4),
    "cpu-mmdit-published-20-256": ("cpu-mmdit-published-quality-20-256", 2),
    "cpu-cache-dit-20": ("cpu-cache-dit-quality-20", 4),
    "cpu-cache-dit-20-256": ("cpu-cache-dit-quality-20-256", 2),
    "cpu-mmdit-8": ("cpu-mmdit-quality-8", 4),
    "cpu-mmdit-8-256": ("cpu-mmdit-quality-8-256", 2),
    "cpu-methods-4": ("cpu-quality-4", 6),
    "cpu-methods-4-256": ("cpu-quality-4-256", 3),
    "cpu-mmdit-4": ("cpu-mmdit-quality-4", 4),
    "cpu-mmdit-4-256": ("cpu-mmdit-quality-4-256", 2),
}


def tokenmerge(*arguments: object) -> None:
    print("tokenmerge", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "tokenmerge_tools", *map(str, arguments)])
    if done.returncode:  # it has said why
        raise SystemExit(done.returncode)


@contextmanager
def anew(*results: Path) -> Iterator[None]:
    """Put existing results aside, to measure them again. Restore them if measuring fails or was killed."""
    for path in results:
        if (left := path.with_name(f"{path.name}.before")).exists():
            remove(path)
            left.rename(path)
    aside = {path: path.with_name(f"{path.name}.before") for path in results if path.exists()}
    for path, before in aside.items():
        path.rename(before)
    try:
        yield
    except BaseException:
        for path in results:
            remove(path)
        for path, before in aside.items():
            before.rename(path)
        raise
    for before in aside.values():
        remove(before)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_grid(name: str) -> dict[str, Any]:
    return dict(toml_parser().loads((RESULTS / f"{name}.toml").read_text(encoding="utf-8")))


def evaluate(name: str) -> None:
    grid = read_grid(name)
    ratios = grid.get("ratio", 0.5)
    ratios = ratios if isinstance(ratios, list) else [ratios]
    quality, _ = QUALITY[name]
    draw(name, grid["variants"], ratios, RESULTS / f"{quality}.jsonl")


def auto(name: str) -> None:
    """Measure `auto`, other methods and fewer steps, timed as drawn, one image at a time."""
    quality, _ = QUALITY[name]
    variants = [v for v in read_grid(name)["variants"] if v.startswith(RIVALS)]
    variants = [WITH_RATIO.get(variant, variant) for variant in variants]
    out = RESULTS / f"{quality}-of-auto.jsonl"
    speedups = [f"--speedup={speedup}" for speedup in SPEEDUPS]
    draw(name, ["auto", *variants, "fewer-steps"], (), out, "--batch=1", *speedups)


def draw(name: str, variants: Sequence[str], ratios: Iterable[float], out: Path, *more: str) -> None:
    """Measure the closeness of variants with the settings of a timed grid."""
    grid = read_grid(name)
    settings = [f"--{key}={grid[key]}" for key in ("model", "size", "steps", "guidance", "device", "dtype")]
    settings += [f"--ratio={ratio}" for ratio in ratios]
    settings += [f"--variant={variant}" for variant in variants]
    with anew(out, out.with_suffix("")):
        tokenmerge("evaluate", f"--limit={QUALITY[name][1]}", *settings, *more, "--out", out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", nargs="*", default=list(QUALITY), help=f"of {', '.join(QUALITY)}")
    parser.add_argument("--only", choices=("evaluate", "auto"), default="evaluate")
    options = parser.parse_args()
    if unknown := set(options.grid) - set(QUALITY):
        parser.error(f"no grid {', '.join(sorted(unknown))}; there are {', '.join(QUALITY)}")
    for name in options.grid:
        auto(name) if options.only == "auto" else evaluate(name)


if __name__ == "__main__":
    main()
