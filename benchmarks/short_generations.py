"""Short generations: the default method beside fewer steps, at equal operations, in 8 to 16 steps.

A line of the record is one image: its settings, its speed-up by operations, and its PSNR to the dense
image of the same seed and number of steps. Prompts and seeds are others than those that the policy was fitted
on. A second run with the same record continues where the first one stopped. `--table` compares both: between
two numbers of steps, a straight line connects the closeness of fewer steps.

    # 40 minutes; it also writes the table of docs/few-steps.md
    python benchmarks/short_generations.py --out benchmarks/short_generations_cpu.jsonl
    python benchmarks/short_generations.py --table --out benchmarks/short_generations_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from policy import FIELDS, STRONG, TRANSFORMER, UNET, Artist, Scene, decibels, prompts_of, read, write
from policy_check import Planner

from tokenmerge import ToMeConfig
from tokenmerge.plans import plan_for
from tokenmerge.plans.estimate import psnr_of

PROMPTS = 47
SEED = 8500
COUNT = 6
SIZE = 128
SOLVERS = {UNET: "DPM++ 2M", TRANSFORMER: "flow Euler"}
STEPS = (8, 10, 12, 16)
SPEEDUPS = (1.3, 1.5, 2.0)
OWN = "default method"
FEWER = "fewer steps"
PAGE = Path(__file__).parent.parent / "docs" / "few-steps.md"
BLOCK = re.compile(r"(<!-- short generations: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
Cells = Mapping[tuple[Any, ...], Sequence[tuple[float, ...]]]


def scenes() -> Iterator[Scene]:
    """Yield the images to draw, one prompt after the other."""
    for number, prompt in enumerate(prompts_of(PROMPTS, COUNT)):
        for (model, solver), strong, steps in itertools.product(SOLVERS.items(), (False, True), STEPS):
            guidance = STRONG[model] if strong else 3.0
            yield Scene(model, SIZE, steps, solver, guidance, prompt, SEED + number)


def measure(out: Path) -> None:
    """Draw the images that are not in the record."""
    artist = Artist()
    planner = Planner(artist)
    done = {key(line) for line in read(out)}
    for scene in scenes():
        facts = planner.facts(scene)
        plans = {speedup: plan_for(facts, speedup) for speedup in SPEEDUPS}
        wanted: list[tuple[dict[str, Any], ToMeConfig | None, int | None]] = []
        for aim, plan in plans.items():
            about = {"method": OWN, "aim": aim, "counted": round(plan.speedup, 3)}
            wanted.append((about, plan.config, None))
        fastest = max(plan.speedup for plan in plans.values())
        for steps in range(scene.steps - 1, int(scene.steps / fastest) - 1, -1):
            about = {"method": FEWER, "aim": steps, "counted": round(scene.steps / steps, 3)}
            wanted.append((about, None, steps))
        for about, config, steps in wanted:
            line: dict[str, Any] = {**dataclasses.asdict(scene), **about}
            if key(line) in done:
                continue
            line["psnr"] = decibels(artist.error(scene, config, steps))
            if config is not None:
                line["expected"] = psnr_of(plans[about["aim"]].expected_error)
            write(out, line)
        print(scene, flush=True)


def key(line: Mapping[str, Any]) -> str:
    return json.dumps([line[name] for name in (*FIELDS, "method", "aim")])


def between(points: Sequence[tuple[float, float]], counted: float) -> float:
    """Return the closeness of fewer steps at a speed-up, on straight lines between ``points``.

    >>> between([(1.0, 50.0), (2.0, 30.0)], 1.5)
    40.0
    """
    for (low, closer), (high, less) in itertools.pairwise(sorted(points)):
        if low <= counted <= high:
            return closer + (less - closer) * (counted - low) / (high - low)
    raise ValueError(f"no image of fewer steps at {counted}×")


def cells_of(lines: Sequence[Mapping[str, Any]]) -> Cells:
    """Return by model, guidance, steps and speed-up: counted, expected, and both closenesses."""
    pictures: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        pictures[json.dumps([line[name] for name in FIELDS])].append(line)
    cells: dict[tuple[Any, ...], list[tuple[float, ...]]] = defaultdict(list)
    for own in pictures.values():
        points = [(line["counted"], line["psnr"]) for line in own if line["method"] == FEWER]
        for line in own:
            if line["method"] == OWN:
                cell = tuple(line[name] for name in ("model", "guidance", "steps", "aim"))
                fewer = between(points, line["counted"])
                cells[cell].append((line["counted"], line["expected"], line["psnr"], fewer))
    return dict(sorted(cells.items()))


def table(cells: Cells) -> Iterator[str]:
    """Yield a Markdown table: means over the prompts, and in how many the default method is closer."""
    heads = "model", "guidance", "steps", "asked for", "counted", "expected, dB", f"{OWN}, dB", f"{FEWER}, dB"
    yield f"| {' | '.join(heads)} | closer in |"
    yield f"|---|{'---:|' * len(heads)}"
    for cell, values in cells.items():
        means = [statistics.mean(value) for value in zip(*values, strict=True)]
        closer = sum(own > fewer for *_, own, fewer in values)
        shown = " | ".join([f"{means[0]:.2f}×", *(f"{mean:.1f}" for mean in means[1:])])
        yield f"| {' | '.join(map(str, cell[:3]))} | {cell[3]:g}× | {shown} | {closer} of {len(values)} |"


def leads(cells: Cells) -> dict[tuple[Any, ...], float]:
    """Return by how many dB the default method is closer than fewer steps, in the mean over the prompts."""
    return {cell: statistics.mean(own - fewer for *_, own, fewer in values) for cell, values in cells.items()}


def page(cells: Cells) -> str:
    """Return the table of the documentation: by how many dB the default method is closer."""
    found = leads(cells)
    steps, speedups = (list(dict.fromkeys(cell[place] for cell in found)) for place in (2, 3))
    rows = [
        f"| | asked for | {' | '.join(f'{count} steps' for count in steps)} |",
        f"|---|---:|{'---:|' * len(steps)}",
    ]
    for model, guidance in dict.fromkeys(cell[:2] for cell in found):
        for speedup in speedups:
            shown = " | ".join(f"{found[model, guidance, count, speedup]:+.1f} dB" for count in steps)
            rows.append(f"| `{model}`, guidance {guidance:g} | {speedup:g}× | {shown.replace('-', '−')} |")
    return "\n".join((*rows, ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        measure(options.out)
        cells = cells_of(read(options.out))
        text = PAGE.read_text(encoding="utf-8")
        written = BLOCK.sub(lambda found: found[1] + page(cells) + found[2], text)
        PAGE.write_text(written, encoding="utf-8")
    print(*table(cells_of(read(options.out))), sep="\n")


if __name__ == "__main__":
    main()
