"""The default method beside the former `auto`, at equal operations, on prompts that no rule was made on.

The former `auto` was 149 numbers fitted on the bundled models, with special cases for schedulers, guidance
and schedules. Its lines of the record were drawn by this script at commit 9f052aa, which still ran its
settings, and stay as they are. A line is one image: its settings, and its PSNR to the dense image of the same
seed. The default method is asked for the speed-up by operations that `auto` has there. A speed-up that is
lower by at most 0.1 % counts as equal: a closeness falls by about 20 dB where the speed-up rises by 1, so
this is worth less than 0.1 dB. A second run with the same record continues where the first one stopped, and
drops images with settings that are no longer chosen. `--table` prints the record.

    python benchmarks/policy_check.py --out benchmarks/policy_check_cpu.jsonl
    python benchmarks/policy_check.py --table --out benchmarks/policy_check_cpu.jsonl

`--corrections` draws the default method with its corrections, and with a plan that has none. `--noise` draws
schedulers that add noise at weak guidance, with the plan that others get there, and with their own, which is
that of strong guidance. All of these reach the same speed-up by operations.

    python benchmarks/policy_check.py --corrections --out benchmarks/corrections_cpu.jsonl
    python benchmarks/policy_check.py --noise --out benchmarks/noise_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
from policy import FIELDS, TRANSFORMER, UNET, Artist, Scene, decibels, prompts_of, read, write

from tokenmerge import ToMeConfig
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import ROUNDING as REACHED
from tokenmerge.plans import RunFacts, Schedule, choose, facts_of, plan_for, speedup_of
from tokenmerge.plans.choose import SpeedupPlan
from tokenmerge.runtime.steps.scheduler import next_schedule

PROMPTS = 46
SEED = 8400
# Schedulers by the number of the prompt. The policy was fitted with others, except for flow Euler.
SOLVERS = {UNET: ("DDIM", "DEIS", "DPM++ SDE"), TRANSFORMER: ("flow Euler",)}
AUTO = "former auto"
OWN = "default method"
EQUAL = 1 - 1e-3  # of a speed-up that counts as equal, divided by the other one
# Where corrections are tried: model, size in pixels, steps, guidance, speed-ups, prompts.
CORRECTED: tuple[tuple[str, int, int, float, tuple[float, ...], int], ...] = (
    (TRANSFORMER, 192, 8, 7.0, (1.5,), 2),
    (TRANSFORMER, 192, 8, 3.0, (1.5,), 2),
    (UNET, 256, 20, 3.0, (1.6,), 1),
    (TRANSFORMER, 192, 20, 7.0, (2.0,), 2),
    (TRANSFORMER, 192, 20, 3.0, (2.0,), 2),
)


NOISY_SOLVERS = ("Euler ancestral", "DPM++ SDE", "DDPM")
NOISY: tuple[tuple[str, int, int, float, tuple[float, ...], int], ...] = (
    (UNET, 128, 20, 3.0, (1.3, 1.6, 2.0), 6),
    (UNET, 256, 20, 3.0, (1.3, 2.0, 3.0), 3),
)


def scenes(
    cells: Sequence[Any], solvers: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Scene, Sequence[float]]]:
    """Yield the images to draw with different plans, and the speed-ups."""
    chosen = prompts_of(PROMPTS, max(cell[-1] for cell in cells))
    for model, size, steps, guidance, aims, count in cells:
        for number in range(count):
            solver = solvers[model][number % len(solvers[model])]
            yield Scene(model, size, steps, solver, guidance, chosen[number], SEED + number), aims


class Planner:
    """What the default method chooses, also with fewer corrections."""

    def __init__(self, artist: Artist) -> None:
        self._artist = artist
        self._hosts: dict[str, RunFacts] = {}

    def facts(self, scene: Scene) -> RunFacts:
        """Return the facts about the generation of an image."""
        pipe = self._artist.pipe(scene.model, scene.solver)
        if scene.model not in self._hosts:
            (host,) = find_hosts(getattr(pipe, "unet", None) or pipe.transformer)
            self._hosts[scene.model] = facts_of(host, (1, 1, 1), 1)
        return dataclasses.replace(
            self._hosts[scene.model],
            grid=(1, scene.size // 4, scene.size // 4),
            steps=scene.steps,
            guidance=scene.guidance,
            schedule=next_schedule(pipe, scene.steps),
        )

    def beside(self, former: Mapping[str, Any]) -> tuple[dict[str, Any], ToMeConfig]:
        """Return a line for the default method at the speed-up of `auto`, and the settings to draw."""
        scene = Scene(**{name: former[name] for name in FIELDS})
        plan = plan_for(self.facts(scene), former["counted"] * EQUAL + REACHED)
        about = {"aim": former["aim"], "method": OWN, "counted": round(plan.speedup, 3)}
        return {**dataclasses.asdict(scene), **about, "settings": plan.config.changed()}, plan.config

    def corrected(self, scene: Scene, aims: Sequence[float]) -> Iterator[tuple[dict[str, Any], ToMeConfig]]:
        """Yield the same for the default method with corrections, and without them."""
        facts = self.facts(scene)
        for aim in aims:
            usual = plan_for(facts, aim)
            if not usual.config.correction.on:
                continue
            without = without_corrections(facts, aim)
            plans = {"with": usual.config, "without": without.config}
            for method, config in plans.items():
                about = {"aim": aim, "method": method, "counted": round(speedup_of(facts, config), 3)}
                yield {**dataclasses.asdict(scene), **about, "settings": config.changed()}, config

    def noisy(self, scene: Scene, aims: Sequence[float]) -> Iterator[tuple[dict[str, Any], ToMeConfig]]:
        """Yield the same for the plan of schedulers that add no noise, and for that of those that do."""
        facts = self.facts(scene)
        for aim, noisy in itertools.product(aims, (False, True)):
            plan = plan_for(dataclasses.replace(facts, schedule=Schedule(adds_noise=noisy)), aim)
            # The record says "solvers" for schedulers.
            method = "plan for solvers that add noise" if noisy else "plan of the others"
            about = {"aim": aim, "method": method, "counted": round(plan.speedup, 3)}
            yield {**dataclasses.asdict(scene), **about, "settings": plan.config.changed()}, plan.config


def without_corrections(facts: RunFacts, aim: float) -> SpeedupPlan:
    """Return the plan of the default method if nothing could be corrected."""
    with patch.object(choose, "_CORRECTIONS", (0,)):
        choose.plans_of.cache_clear()
        plan = plan_for(facts, aim)
    choose.plans_of.cache_clear()
    return plan


def measure(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record, and drop those that are no longer wanted."""
    artist = Artist()
    planner = Planner(artist)
    found = {key(line): line for line in read(options.out)}
    kept: list[dict[str, Any]] = []
    if options.corrections:
        found_scenes = scenes(CORRECTED, SOLVERS)
        wanted = [pair for scene, aims in found_scenes for pair in planner.corrected(scene, aims)]
    elif options.noise:
        found_scenes = scenes(NOISY, {UNET: NOISY_SOLVERS})
        wanted = [pair for scene, aims in found_scenes for pair in planner.noisy(scene, aims)]
    else:
        kept = [line for line in found.values() if line["method"] == AUTO]
        wanted = [planner.beside(line) for line in kept]
    kept += [found[key(line)] for line, _ in wanted if key(line) in found]
    options.out.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    drawn = {picture(line): line["psnr"] for line in kept if line["method"] != AUTO}
    for line, config in wanted:
        if key(line) not in found:
            if picture(line) not in drawn:
                scene = Scene(**{name: line[name] for name in FIELDS})
                drawn[picture(line)] = decibels(artist.error(scene, config))
            line["psnr"] = drawn[picture(line)]
            write(options.out, line)
            print(f"{line['psnr']:.1f} dB: {line}", flush=True)


def key(line: Mapping[str, Any]) -> str:
    return json.dumps([*(line[name] for name in (*FIELDS, "aim", "method")), line["settings"]])


def picture(line: Mapping[str, Any]) -> str:
    return json.dumps([*(line[name] for name in FIELDS), line["settings"]])


Cell = tuple[Any, ...]


def cells_of(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[Cell, list[list[Any]]]:
    """Return for each cell the lines of both methods, a pair an image."""
    scenes: dict[Cell, dict[str, Any]] = defaultdict(dict)
    for line in lines:
        scenes[tuple(line[name] for name in (*FIELDS, "aim"))][line["method"]] = line
    cells: dict[Cell, list[list[Any]]] = defaultdict(list)
    for scene in scenes.values():
        if all(method in scene for method in methods):
            pair = [scene[method] for method in methods]
            cells[tuple(pair[0][name] for name in ("model", "size", "steps", "guidance", "aim"))].append(pair)
    return dict(sorted(cells.items()))


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of the cells, the mean difference, the worst cell, and what is not monotone."""
    first, *others = dict.fromkeys(line["method"] for line in lines)
    for other in others:
        yield from comparison(lines, [first, other])
        yield ""


def comparison(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> Iterator[str]:
    cells = cells_of(lines, methods)
    yield f"| model | pixels | steps | guidance | images | {' | '.join(methods)} | difference, dB |"
    yield "|---|---:|---:|---:|---:|" + "---|" * (len(methods) + 1)
    gains: dict[Cell, float] = {}
    for cell, pairs in cells.items():
        shown = []
        for place in range(len(methods)):
            mean = {
                name: statistics.mean(pair[place][name] for pair in pairs) for name in ("psnr", "counted")
            }
            shown.append(f"{mean['psnr']:.1f} dB, {mean['counted']:.2f}×")
        gains[cell] = statistics.mean(pair[1]["psnr"] - pair[0]["psnr"] for pair in pairs)
        own = " | ".join([*map(str, cell[:4]), str(len(pairs)), *shown])
        yield f"| {own} | {gains[cell]:+.1f} |"
    everything = list(gains.values())
    error = statistics.stdev(everything) / len(everything) ** 0.5
    worst = min(gains, key=gains.__getitem__)
    yield ""
    yield f"Mean difference over {len(cells)} cells: {statistics.mean(everything):+.2f} ± {error:.2f} dB"
    yield f"Worst cell: {gains[worst]:+.1f} dB, {', '.join(map(str, worst))}×"
    yield from monotone(cells, methods)


def monotone(cells: Mapping[Cell, Sequence[Sequence[Any]]], methods: Sequence[str]) -> Iterator[str]:
    """Yield how often an image is closer at a higher speed-up, and by how much at most."""
    for place, method in enumerate(methods):
        by_scene: dict[Cell, list[tuple[float, float]]] = defaultdict(list)
        for pairs in cells.values():
            for pair in pairs:
                line = pair[place]
                by_scene[tuple(line[name] for name in FIELDS)].append((line["counted"], line["psnr"]))
        rises = [
            late[1] - early[1]
            for points in by_scene.values()
            for early, late in zip(sorted(points), sorted(points)[1:], strict=False)
            if late[0] > early[0]
        ]
        more = [rise for rise in rises if rise > 0.5]
        yield (
            f"{method}: closer by more than 0.5 dB at the next higher speed-up in {len(more)} of "
            f"{len(rises)} pairs of images, at most by {max([*rises, 0.0]):.1f} dB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--corrections", action="store_true", help="compare with no corrections instead")
    parser.add_argument(
        "--noise", action="store_true", help="compare plans for schedulers that add noise instead"
    )
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        measure(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
