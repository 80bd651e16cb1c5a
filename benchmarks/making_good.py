"""How much closer images are where the next full step makes good what the forecasts before it missed.

Each image is drawn twice with the same full steps, and nothing merges: once with forecasts as they are, and
once with what they missed made good. A line of the record is one image: its number of full steps, its way,
and its PSNR to the dense image of the same seed. The package makes good without classifier-free guidance
alone. Here both ways are drawn under guidance too. A second run with the same record continues where the
first one stopped. `--table` prints the record, and the share of the error that is left.

    export PYTHONPATH=.
    python benchmarks/making_good.py --out benchmarks/making_good_cpu.jsonl
    python benchmarks/making_good.py --table --out benchmarks/making_good_cpu.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
from policy import (
    CAPTIONS,
    MAKES_GOOD,
    PHOTOGRAPHS,
    PROMPTS,
    SEED,
    TRANSFORMER,
    Artist,
    Scene,
    as_forecast,
    at_places,
    decibels,
    key,
    prompts_of,
    read,
    reuse,
    write,
)

from tokenmerge import ToMeConfig
from tokenmerge.plans import policy
from tokenmerge.plans.choose import reaches_of

AS_FORECAST, MADE_GOOD = WAYS = ("as forecast", "made good")
FULL_STEPS = {20: (12, 10, 8, 6), 8: (6, 5, 4)}  # by the number of steps
GUIDANCE = (1.0, 3.0, 7.0)
COUNT = 4  # prompts
WITHIN = 12  # dB
Cell = tuple[Any, ...]


def scenes() -> Iterator[Scene]:
    """Yield the images to draw."""
    for guidance, steps in itertools.product(GUIDANCE, FULL_STEPS):
        for number, prompt in enumerate(prompts_of(PROMPTS, COUNT)):
            yield Scene(TRANSFORMER, 128, steps, "flow Euler", guidance, prompt, SEED + number)
    for steps, (number, prompt) in itertools.product(FULL_STEPS, enumerate(CAPTIONS)):
        yield Scene(PHOTOGRAPHS, 256, steps, "flow Euler", 1.0, prompt, SEED + number)


def settings_of(scene: Scene, full_steps: int) -> dict[str, Any]:
    """Return step reuse alone, with the full steps where the default method has them."""
    own = at_places if scene.model == TRANSFORMER else reuse
    return {"ratio": 0.0, **own(scene.steps, full_steps)}


def drawn_in(way: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which what forecasts missed is made good, or is not, at any guidance."""
    if way == AS_FORECAST:
        return as_forecast()
    return mock.patch(MAKES_GOOD, lambda facts, memory, config: facts.scheduler.sigmas)


def measure(out: Path) -> None:
    """Draw the images that are not in the record."""
    artist = Artist()
    done = {key(line) + line["way"] for line in read(out)}
    for scene in scenes():
        for full_steps, way in itertools.product(FULL_STEPS[scene.steps], WAYS):
            settings = settings_of(scene, full_steps)
            line = {**dataclasses.asdict(scene), "settings": settings, "full": full_steps, "way": way}
            if key(line) + way in done:
                continue
            with drawn_in(way):
                line["psnr"] = decibels(artist.error(scene, ToMeConfig.from_dict(settings)))
            write(out, line)
            print(
                f"{line['psnr']:.1f} dB: {scene.model}, {scene.guidance:g}, {full_steps}, {way}", flush=True
            )


def cells_of(lines: Iterable[Mapping[str, Any]]) -> dict[Cell, dict[str, float]]:
    """Return for each model, guidance, number of steps and of full steps the mean PSNR of both ways."""
    found: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        cell = line["model"], line["guidance"], line["steps"], line["full"]
        found[cell][line["way"]].append(line["psnr"])
    return {cell: {way: statistics.mean(psnr) for way, psnr in ways.items()} for cell, ways in found.items()}


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: a row for each model and guidance, a column for each number of full steps."""
    cells = cells_of(lines)
    columns = [(steps, full) for steps, counts in FULL_STEPS.items() for full in counts]
    yield f"| full steps | {' | '.join(f'{full} of {steps}' for steps, full in columns)} |"
    yield "|---|" + "---:|" * len(columns)
    for model, guidance in dict.fromkeys((model, guidance) for model, guidance, _, _ in cells):
        row = []
        for column in columns:
            before, after = (cells[(model, guidance, *column)][way] for way in WAYS)
            row.append(f"{before:.1f} → {after:.1f}")
        where = f"guidance {guidance:g}" if guidance > 1 else "no guidance"
        yield f"| `{model}`, {where} | {' | '.join(row)} |"


def gains(lines: Sequence[Mapping[str, Any]], model: str) -> list[float]:
    """Return how many dB closer each cell of a model without guidance is if what was missed is made good."""
    cells = cells_of(line for line in lines if line["model"] == model and line["guidance"] == 1)
    return [ways[MADE_GOOD] - ways[AS_FORECAST] for ways in cells.values()]


def closer_than_under_guidance(lines: Sequence[Mapping[str, Any]], model: str) -> list[float]:
    """Return how many dB closer each image is, with what was missed made good, than under weak guidance.

    The images are those without guidance. The other closeness is the one that the policy expects.
    """
    found = []
    for line in lines:
        if (line["model"], line["guidance"], line["way"]) == (model, 1, MADE_GOOD):
            steps = line["steps"]
            full = ToMeConfig.from_dict(line["settings"]).reuse.steps_of(steps).full
            row = policy.expected_errors_of("transformer", line["guidance"])
            reaches = reaches_of(full, steps, ends_clean=model == TRANSFORMER)
            found.append(line["psnr"] - decibels(row.of_skipping("blocks", reaches, steps)))
    return found


def times_expected(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the error that is left, divided by the one that the policy expects under weak guidance.

    It is the geometric mean over the images of the transformer of the policy.
    """
    mean = statistics.mean(closer_than_under_guidance(lines, TRANSFORMER))
    return float(f"{10 ** (-mean / 10):.2g}")


def within(lines: Sequence[Mapping[str, Any]], decibels_off: float) -> tuple[int, int]:
    """Return how many images of the other model are at most so many dB from what is expected, of how many."""
    mean = statistics.mean(closer_than_under_guidance(lines, TRANSFORMER))
    others = closer_than_under_guidance(lines, PHOTOGRAPHS)
    return sum(abs(one - mean) <= decibels_off for one in others), len(others)


def share_left(lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the error that is left, by the transformer of the policy."""
    return round(10 ** (-statistics.mean(gains(lines, TRANSFORMER)) / 10), 2)


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
    lines = read(options.out)
    print(*table(lines), sep="\n")
    for model in (TRANSFORMER, PHOTOGRAPHS):
        closer = gains(lines, model)
        print(f"{model} without guidance: {min(closer):+.1f} to {max(closer):+.1f} dB")
    print(f"share of what forecasts missed that is left: {share_left(lines)}")
    print(f"times the expected error of skipping: {times_expected(lines)}")
    count, every = within(lines, WITHIN)
    print(f"{PHOTOGRAPHS}: {count} of {every} images within {WITHIN} dB of what is expected")


if __name__ == "__main__":
    main()
