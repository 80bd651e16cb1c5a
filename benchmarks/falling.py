"""How close images are where the ratio of a transformer's stack falls over the steps, and where it does not.

The settings are those of `ratio=`. Each fall has four factors of the ratio, one for each quarter of the
steps, with a mean of 1. Prompts and seeds are those that the policy is fitted on. A line of the record is one
image: its settings, and its PSNR to the dense image of the same seed. A second run with the same record
continues where the first one stopped. `--table` prints the record.

    python benchmarks/falling.py --out benchmarks/falling_cpu.jsonl
    python benchmarks/falling.py --table --out benchmarks/falling_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from policy import (
    CAPTIONS,
    PHOTOGRAPHS,
    PROMPTS,
    SEED,
    TRANSFORMER,
    Artist,
    Scene,
    decibels,
    key,
    prompts_of,
    read,
    write,
)

from tokenmerge import ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.plans.falling import falling
from tokenmerge.ratio_method import settings_of_ratio

# The factors of the ratio, from the first quarter of the steps to the last.
FALLS: Mapping[str, tuple[float, ...]] = {
    "none": (1.0, 1.0, 1.0, 1.0),
    "from 1.15 to 0.85": (1.15, 1.05, 0.95, 0.85),
    "from 1.25 to 0.75": (1.25, 1.1, 0.9, 0.75),
    "from 1.4 to 0.6": (1.4, 1.15, 0.85, 0.6),
    "from 0.75 to 1.25": (0.75, 0.9, 1.1, 1.25),
}
RATIOS = (0.3, 0.5)
COUNT = 4  # prompts


def scenes() -> Iterator[Scene]:
    """Yield the images to draw."""
    for (number, prompt), guidance in itertools.product(enumerate(prompts_of(PROMPTS, COUNT)), (3.0, 7.0)):
        yield Scene(TRANSFORMER, 128, 20, "flow Euler", guidance, prompt, SEED + number)
    for number, prompt in enumerate(CAPTIONS):
        yield Scene(PHOTOGRAPHS, 256, 20, "flow Euler", 1.0, prompt, SEED + number)


def settings_of(pipe: Any, ratio: float, factors: Sequence[float]) -> ToMeConfig:
    """Return the settings of `ratio=` for a pipeline, with another fall."""
    own = settings_of_ratio(pipe, find_hosts(pipe.transformer), ratio)
    return falling(dataclasses.replace(own, rules=()), factors)


def measure(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    artist = Artist()
    done = {key(line) for line in read(options.out)}
    for scene, ratio, (fall, factors) in itertools.product(scenes(), RATIOS, FALLS.items()):
        config = settings_of(artist.pipe(scene.model, scene.solver), ratio, factors)
        about = {"ratio": ratio, "fall": fall, "settings": config.changed()}
        line = {**dataclasses.asdict(scene), **about}
        if key(line) not in done:
            line["psnr"] = decibels(artist.error(scene, config))
            write(options.out, line)
            print(f"{line['psnr']:.1f} dB: {scene.model}, {scene.guidance:g}, {ratio:g}, {fall}", flush=True)


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: a row for each fall, and the mean of the images of a model and a guidance."""
    found: dict[tuple[str, Any], list[float]] = defaultdict(list)
    columns = {}
    for line in lines:
        column = line["model"], line["guidance"], line["ratio"]
        columns[column] = f"{line['model']}, guidance {line['guidance']:g}, ratio {line['ratio']:g}"
        found[line["fall"], column].append(line["psnr"])
    yield "| factors of the ratio | " + " | ".join(columns.values()) + " |"
    yield "|---|" + "---:|" * len(columns)
    for fall in FALLS:
        cells = [f"{statistics.mean(found[fall, column]):.1f} dB" for column in columns]
        yield f"| {fall} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        measure(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
