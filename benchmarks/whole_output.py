"""Measure step reuse that extrapolates the output of the whole model, beside step reuse of its blocks.

Models without described blocks are skipped as a whole. `measure` draws with the bundled models in both
ways, at the same speed-ups by operations and with step reuse alone. A line of the record is one image, with
its mean squared error to the dense image of the same seed. A second run with the same record continues where
the first one stopped. `table` prints the table of `docs/methods/when.md`. It also prints the number that the
policy has from half of the prompts, and how many images with the others are near what it expects.

    python benchmarks/whole_output.py measure --out benchmarks/whole_output_cpu.jsonl
    python benchmarks/whole_output.py table --out benchmarks/whole_output_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from policy import SEED, STRONG, TRANSFORMER, UNET, Artist, Scene, prompts_of

from tokenmerge import ToMeConfig
from tokenmerge.api import merge_in_hosts
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge.models.undescribed import as_whole
from tokenmerge.plans import RunFacts, facts_of, policy
from tokenmerge.plans.choose import ROUNDING, plans_of, reaches_of
from tokenmerge.runtime.steps.scheduler import next_schedule

PROMPTS = 43  # a choice of its own: the policy is fitted on others
COUNT = 6
FITTED = 3  # prompts that the number of the policy comes from
WITHIN = 12  # dB around the expected closeness before a run, in which the handle says that most images are
STEPS = 20
SIZE = 128
SPEEDUPS = (1.5, 2.0, 3.0)
WAYS = ("blocks", "whole output")
SOLVER = {UNET: "DPM++ 2M", TRANSFORMER: "flow Euler"}
Line = Mapping[str, Any]


def scenes() -> Iterator[Scene]:
    for number, prompt in enumerate(prompts_of(PROMPTS, COUNT)):
        for model in (UNET, TRANSFORMER):
            for guidance in (3.0, STRONG[model]):
                yield Scene(model, SIZE, STEPS, SOLVER[model], guidance, prompt, SEED + number)


def host_of(pipe: Any, way: str) -> Host:
    """Return the description of a pipeline's denoiser, by its blocks or as one part."""
    (host,) = find_hosts(pipe)
    return host if way == "blocks" else as_whole(host.root, pipe)


def settings_of(pipe: Any, host: Host, guidance: float, speedup: float) -> ToMeConfig:
    """Return the step reuse that the default method would choose, with nothing merged."""
    grid = host.grid_at(SIZE // 8, SIZE // 8)
    schedule = next_schedule(pipe, STEPS)
    facts: RunFacts = facts_of(host, grid, STEPS, guidance=guidance, schedule=schedule)
    plans = plans_of(facts, ToMeConfig(ratio=0.0))
    return next(plan.config for plan in plans if plan.speedup + ROUNDING >= speedup)


def measure(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    done = {key_of(line) for line in read(options.out)}
    artist = Artist()
    for scene in scenes():
        dense = None
        for speedup in SPEEDUPS:
            for way in WAYS:
                line = {
                    "model": scene.model,
                    "guidance": scene.guidance,
                    "prompt": scene.prompt,
                    "seed": scene.seed,
                    "speedup": speedup,
                    "way": way,
                }
                if key_of(line) in done:
                    continue
                if dense is None:
                    dense = artist.draw(scene)
                pipe = artist.pipe(scene.model, scene.solver)
                host = host_of(pipe, way)
                config = settings_of(pipe, host, scene.guidance, speedup)
                patch = merge_in_hosts(pipe, config, hosts=(host,), check_size=False)
                try:
                    image = draw(pipe, scene)
                finally:
                    patch.remove()
                full = list(config.reuse.steps_of(STEPS).full)
                write(options.out, {**line, "full": full, "error": float(((image - dense) ** 2).mean())})


def draw(pipe: Any, scene: Scene) -> Any:
    return pipe(
        scene.prompt,
        height=scene.size,
        width=scene.size,
        num_inference_steps=scene.steps,
        guidance_scale=scene.guidance,
        generator=torch.Generator().manual_seed(scene.seed),
        output_type="np",
    ).images[0]


def key_of(line: Line) -> str:
    return json.dumps([line[name] for name in ("model", "guidance", "prompt", "seed", "speedup", "way")])


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def decibels(error: float) -> float:
    return -10 * math.log10(error)


def table_of(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a Markdown table: a row for each model and guidance scale."""
    head = " | ".join(f"{speedup:g}×" for speedup in SPEEDUPS)
    rows = [f"| model | guidance | {head} |", "|---|---:|" + "---:|" * len(SPEEDUPS)]
    for model, guidance in dict.fromkeys((line["model"], line["guidance"]) for line in lines):
        cells = []
        for speedup in SPEEDUPS:
            own = [
                line
                for line in lines
                if (line["model"], line["guidance"], line["speedup"]) == (model, guidance, speedup)
            ]
            means = [
                statistics.mean(decibels(line["error"]) for line in own if line["way"] == way) for way in WAYS
            ]
            cells.append(f"{means[0]:.1f} → {means[1]:.1f} dB")
        rows.append(f"| {model} | {guidance:g} | {' | '.join(cells)} |")
    return rows


def factor_of(lines: Sequence[Line]) -> float:
    """Return the error of skipping a whole model, divided by the expected one of a transformer's blocks.

    It is the geometric mean over the images of a model and a guidance scale, and the largest of these. The
    policy has this number of the first prompts.
    """
    found: dict[tuple[str, float], list[float]] = {}
    for line in lines:
        place = line["model"], line["guidance"]
        found.setdefault(place, []).append(math.log(line["error"] / expected("transformer", line)))
    return float(f"{max(math.exp(statistics.mean(own)) for own in found.values()):.2g}")


def expected(model: str, line: Line) -> float:
    """Return the error that the policy expects of a class of model with the steps of a line."""
    row = policy.expected_errors_of(model, line["guidance"])
    return row.of_skipping("blocks", reaches_of(line["full"], STEPS), STEPS)


def parts_of(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Return the images of whole models with the first prompts, and those with the others."""
    whole = [line for line in lines if line["way"] == "whole output"]
    first = list(dict.fromkeys(line["prompt"] for line in whole))[:FITTED]
    return (
        [line for line in whole if line["prompt"] in first],
        [line for line in whole if line["prompt"] not in first],
    )


def within(lines: Sequence[Line], decibels_off: float) -> int:
    """Return how many images are at most so many dB from the closeness that the policy expects."""
    off = [decibels(line["error"]) - decibels(expected("output", line)) for line in lines]
    return sum(abs(one) <= decibels_off for one in off)


def table(options: argparse.Namespace) -> None:
    """Print the table."""
    lines = read(options.out)
    fitted, others = parts_of(lines)
    print("\n".join(table_of(lines)))
    times = factor_of(fitted)
    print(f"with {FITTED} prompts, at most {times:g} times the expected error of a transformer's blocks")
    print(
        f"with the others, {within(others, WITHIN)} of {len(others)} within {WITHIN} dB of what is expected"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"measure": measure, "table": table}[options.command](options)


if __name__ == "__main__":
    main()
