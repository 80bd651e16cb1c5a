"""Whether images with a tolerance reach it, and what that costs beside the fixed plan that reaches it too.

Each line of the record is one generation with `speedup=` and `min_psnr=`: the true PSNR to the dense image
of the same seed, the speed-up by operations and what the generation has shown of its error. The first line of
a case also has the fixed plans that were drawn for the comparison, from the fastest to the first one that
reaches the highest tolerance. `tolerance_margin_cpu.jsonl` was drawn with a margin of 4.5 dB. A second run
with the same record continues where the first one stopped. `--table` sums it up.

    python benchmarks/tolerance.py --out benchmarks/tolerance_cpu.jsonl
    python benchmarks/tolerance.py --table --out benchmarks/tolerance_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from diffusers import DiffusionPipeline
from estimate import SOLVERS, draw, noted, psnr, read
from solvers import GUIDANCE, scheduler

from tokenmerge import apply_token_merging
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import speedup_of
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

QUARTILES = (0.25, 0.5, 0.75)
SPEEDUPS = (3.0, 2.2, 1.7, 1.4, 1.2)
ASKED = tuple(itertools.product((3.0,), (30, 35, 40)))
CASE = ("model", "solver", "guidance", "size", "steps", "prompt")
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SOLVERS), default=list(SOLVERS))
    parser.add_argument("--solver", nargs="+", help="default: all of the model")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--first-prompt", type=int, default=80, help="prompts before it serve other scripts")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        show(list(read(options.out)))
        return
    diffusers.utils.logging.set_verbosity_error()
    glyphs = read_glyphs()
    chosen = choose_prompts(options.first_prompt + options.prompts)
    pipes = {model: DiffusionPipeline.from_pretrained(path(model)) for model in options.model}
    own = {model: dict(pipe.scheduler.config) for model, pipe in pipes.items()}
    of_models = [
        itertools.product([model], options.solver or SOLVERS[model], GUIDANCE[model]) for model in pipes
    ]
    # The models take turns, so that a record that is cut short has some of each.
    turns = list(filter(None, itertools.chain(*itertools.zip_longest(*of_models))))
    for number, (i, background) in enumerate(chosen[options.first_prompt :]):
        prompt = caption(glyphs[i].name, background)
        for model, solver, guidance in turns:
            pipe = pipes[model]
            pipe.set_progress_bar_config(disable=True)
            pipe.scheduler = scheduler(pipe, own[model], solver)
            values = (model, solver, guidance, options.size, options.steps, prompt)
            measure(pipe, dict(zip(CASE, values, strict=True)), 9500 + number, options.out)


def measure(pipe: DiffusionPipeline, case: Line, seed: int, out: Path) -> None:
    """Draw what the record does not have yet of one prompt with one scheduler and guidance."""
    known = [line for line in (read(out) if out.exists() else ()) if case.items() <= line.items()]
    asked = [one for one in ASKED if one not in {(line["speedup"], line["min_psnr"]) for line in known}]
    if not asked:
        return
    dense = draw(pipe, case, seed)

    def drawn(speedup: float, min_psnr: float | None = None) -> Line:
        patch = apply_token_merging(pipe, speedup=speedup, min_psnr=min_psnr)
        mse = float(((draw(pipe, case, seed) - dense) ** 2).mean())
        found = {"psnr": round(psnr(mse), 2), "mse": mse, "counted": round(counted(pipe), 3), **noted(pipe)}
        patch.remove()
        return found

    fixed: dict[str, Line] = next((line["fixed"] for line in known if line["fixed"]), {})
    for speedup in () if fixed else SPEEDUPS:
        fixed[f"{speedup:g}"] = drawn(speedup)
        if fixed[f"{speedup:g}"]["psnr"] >= max(min_psnr for _, min_psnr in ASKED):
            break
    for number, (speedup, min_psnr) in enumerate(asked):
        first = not known and not number
        line = {**case, "speedup": speedup, "min_psnr": min_psnr, **drawn(speedup, min_psnr)}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "fixed": fixed if first else {}}) + "\n")
        about = f"{case['model']}, {case['solver']}, {case['guidance']:g}, {speedup:g}×, {min_psnr} dB"
        by_plan = needed({**line, "fixed": fixed})
        print(f"{about}: {line['psnr']:.1f} dB at {line['counted']:.2f}× ({by_plan:.2f}×)", flush=True)


def counted(pipe: DiffusionPipeline) -> float:
    """Return dense operations over those of the last generation."""
    hosts = find_hosts(pipe)
    run = state_of(hosts[0].root).last_run
    facts = dataclasses.replace(
        DefaultMethod.of(pipe, hosts, 1).facts,
        grid=hosts[0].grid_at(run.height, run.width),
        steps=run.steps,
        guidance=run.guidance,
    )
    return speedup_of(facts, run.config)


def needed(line: Mapping[str, Any]) -> float:
    """Return the speed by operations of a fixed plan that just reaches the tolerance, up to the wanted one.

    Between two plans that were drawn, PSNR and speed-up are interpolated. The result is 1 if only dense
    images reach the tolerance.
    """
    plans = [(one["counted"], one["psnr"]) for one in line["fixed"].values()]
    ahead = None
    for speed, reached in sorted(plans, reverse=True):
        if reached >= line["min_psnr"]:
            if ahead is None:
                return speed
            share = (reached - line["min_psnr"]) / (reached - ahead[1])
            return speed + share * (ahead[0] - speed)
        ahead = speed, reached
    return 1.0


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print how often the tolerance was reached, and the speed beside that of the fixed plans."""
    fixed = {tuple(line[name] for name in CASE): line["fixed"] for line in lines if line["fixed"]}
    lines = [{**line, "fixed": fixed[tuple(line[name] for name in CASE)]} for line in lines]
    report("all", lines)
    for names in (("model", "min_psnr"), ("model", "guidance", "min_psnr"), (*CASE[:3], "min_psnr")):
        print(
            f"one fixed speed-up for all with the same {', '.join(names)} that reaches it as often takes "
            f"{beside_one_plan(lines, names):.2f} times the operations"
        )
    for name in ("model", "solver", "guidance", "size", "steps", "min_psnr"):
        for value in dict.fromkeys(line[name] for line in lines):
            report(f"{name} {value}", [line for line in lines if line[name] == value])


def beside_one_plan(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> float:
    """Return the operations with one fixed speed-up for all lines that agree in some fields, over ours.

    It is the fastest speed-up that was drawn whose plans reach the tolerance as often as ours do.
    """
    groups = defaultdict(list)
    for line in lines:
        groups[tuple(line[name] for name in names)].append(line)
    theirs = 0.0
    ours = 0.0
    for own in groups.values():
        reached = np.mean([line["psnr"] >= line["min_psnr"] for line in own])
        chosen = next((speed for speed in SPEEDUPS if share_reached(own, speed) >= reached), 1.0)
        for line in own:
            theirs += 1 / line["fixed"].get(f"{chosen:g}", {"counted": chosen})["counted"]
            ours += 1 / line["counted"]
    return theirs / ours


def share_reached(lines: Sequence[Mapping[str, Any]], speedup: float) -> float:
    """Return how many plans of a fixed speed-up reach the tolerance of their line.

    A plan that was not drawn does: a faster one of that image reached the highest tolerance.
    """
    plans = [(line["fixed"].get(f"{speedup:g}"), line["min_psnr"]) for line in lines]
    return float(np.mean([plan is None or plan["psnr"] >= wanted for plan, wanted in plans]))


def report(name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    reached = np.mean([line["psnr"] >= line["min_psnr"] for line in lines])
    low, middle, high = np.quantile([line["counted"] / needed(line) for line in lines], QUARTILES)
    plan = np.mean([line["fixed"][f"{line['speedup']:g}"]["psnr"] >= line["min_psnr"] for line in lines])
    print(
        f"{name}: {len(lines)} runs, reached in {reached:.0%} (without a tolerance {plan:.0%}), speed "
        f"{middle:.2f} of the needed plan's (middle half {low:.2f} to {high:.2f})"
    )


if __name__ == "__main__":
    main()
