"""What the runtime notes of its own error, beside the true closeness of the image.

Each line of the record is one generation with the default method: model, scheduler, guidance, size, steps,
speed, prompt, settings, what the generation has shown of its error, and the squared error to the dense
image of the same seed. A second run with the same record continues where the first one stopped. `--table`
says how well the estimate ranks and bounds the true errors, also for a record of `tolerance.py`.
`--overhead` counts what the estimate costs: operations that make tensors, which are launches on a GPU, and
CPU time with and without it, in turns.

    python benchmarks/estimate.py --prompts 3 --out benchmarks/estimate_cpu.jsonl
    python benchmarks/estimate.py --table --out benchmarks/estimate_cpu.jsonl benchmarks/tolerance_cpu.jsonl
    HOLDOUT=benchmarks/estimate_holdout_cpu.jsonl
    python benchmarks/estimate.py --model photo-flux --size 256 --prompts 4 --out $HOLDOUT
    python benchmarks/estimate.py --overhead
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from solvers import GUIDANCE, scheduler
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge.models.work import Amount, Share, Work
from tokenmerge.plans import RunFacts, Schedule
from tokenmerge.plans.estimate import Observations, estimate_closeness, psnr_of
from tokenmerge.plans.policy import ESTIMATE
from tokenmerge.runtime.memory.run_log import observations_of
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.records.kinds import with_new_names

SOLVERS = {
    "emoji-unet": ("DPM++ 2M", "Euler ancestral", "DDIM", "DPM++ SDE"),
    "emoji-mmdit": ("flow Euler", "flow Heun"),
}
HOLDOUT = "photo-flux"  # none of the numbers was fitted on its images below
CAPTIONS = tuple(f"a photograph of {what}" for what in ("a cat", "a coffee cup", "a rocket", "gravel"))
CLASSES: Mapping[str, Any] = {
    "emoji-unet": ("unet", "deep"),
    "emoji-mmdit": ("transformer", "blocks"),
    HOLDOUT: ("transformer", "blocks"),
}
SPEEDUPS = (1.3, 1.6, 2.0, 3.0)
LEAST_ERROR = 1e-12  # keeps the PSNR of equal images finite
NOTES = ("blocks.skipping._note_forecast", "memory.run_log.RunLog.note_output")
TURNS = 5
KEY = ("model", "solver", "guidance", "size", "steps", "speedup", "prompt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, nargs="+", default=[])
    parser.add_argument("--model", nargs="+", choices=list(CLASSES), default=list(SOLVERS))
    parser.add_argument("--solver", nargs="+", help="default: all of the model")
    parser.add_argument("--size", type=int, nargs="+", default=[128])
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--first-prompt", type=int, default=40, help="prompts before it serve other scripts")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    options = parser.parse_args()
    if options.table:
        runs: list[Mapping[str, Any]] = []
        for file in options.out:
            for line in read(file):
                runs += runs_of(line)
        show(runs)
        return
    diffusers.utils.logging.set_verbosity_error()
    if options.overhead:
        for model in options.model:
            overhead(model)
        return
    (options.out,) = options.out
    known = {key(line) for line in read(options.out)} if options.out.exists() else set()
    for model in options.model:
        measure(model, options, known)


def measure(model: str, options: argparse.Namespace, known: set[tuple[Any, ...]]) -> None:
    """Draw what the record does not have yet."""
    holdout = model == HOLDOUT
    pipe = DiffusionPipeline.from_pretrained(
        Path(__file__).parent / "holdout" / model if holdout else path(model)
    )
    pipe.set_progress_bar_config(disable=True)
    own = dict(pipe.scheduler.config)
    glyphs = read_glyphs()
    chosen = choose_prompts(options.first_prompt + options.prompts)[options.first_prompt :]
    prompts = [caption(glyphs[i].name, background) for i, background in chosen]
    solvers = SOLVERS.get(model, ("flow Euler",))
    guidance_scales = GUIDANCE.get(model, (1.0,))
    if holdout:
        prompts = list(CAPTIONS[: options.prompts])
    conditions = itertools.product(options.size, options.steps, options.solver or solvers, guidance_scales)
    for size, steps, solver, guidance in conditions:
        pipe.scheduler = scheduler(pipe, own, solver)
        for number, prompt in enumerate(prompts):
            about = {"model": model, "solver": solver, "guidance": guidance, "size": size, "steps": steps}
            lines = [{**about, "speedup": speedup, "prompt": prompt} for speedup in SPEEDUPS]
            lines = [line for line in lines if key(line) not in known]
            dense = draw(pipe, lines[0], 9000 + number) if lines else None
            for line in lines:
                patch = apply_token_merging(pipe, speedup=line["speedup"])
                picture = draw(pipe, line, 9000 + number)
                line["mse"] = float(((picture - dense) ** 2).mean())
                line |= noted(pipe)
                patch.remove()
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                case = f"{model}, {solver}, {guidance:g}, {line['speedup']:g}×"
                print(f"{case}: {psnr(line['mse']):.1f} dB", flush=True)


def noted(pipe: DiffusionPipeline) -> dict[str, Any]:
    """Return what the runtime noted in the last generation."""
    run = state_of(find_hosts(pipe)[0].root).last_run
    found = observations_of([run])
    return {
        "settings": run.config.changed(),
        "calls": run.steps,
        "sigmas": [round(sigma, 5) for sigma in found.sigmas],
        "noise": round(found.noise, 3),
        "errors": {
            part: {step: round(error, 6) for step, error in own.items()} for part, own in found.errors.items()
        },
    }


def draw(pipe: DiffusionPipeline, line: Mapping[str, Any], seed: int) -> np.ndarray:
    return pipe(
        line["prompt"],
        height=line["size"],
        width=line["size"],
        num_inference_steps=line["steps"],
        guidance_scale=line["guidance"],
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images[0]


def overhead(model: str) -> None:
    """Print what the estimate costs in a generation with a speed-up of 2."""
    pipe = DiffusionPipeline.from_pretrained(path(model))
    pipe.set_progress_bar_config(disable=True)
    case = {"prompt": "a red circle", "size": 128, "steps": 20, "guidance": 3.0}
    apply_token_merging(pipe, speedup=2.0)

    def generate(notes: bool, counter: contextlib.AbstractContextManager[Any]) -> float:
        with contextlib.ExitStack() as stack:
            for name in () if notes else NOTES:
                stack.enter_context(mock.patch(f"tokenmerge.runtime.{name}"))
            stack.enter_context(counter)
            began = time.process_time()
            draw(pipe, case, 1)
            return time.process_time() - began

    counts = {}
    seconds = defaultdict(list)
    for notes in (False, True):
        generate(notes, counter := Operations())
        counts[notes] = counter.number
    for notes in (False, True) * TURNS:
        seconds[notes].append(generate(notes, contextlib.nullcontext()))
    more = [noted / plain - 1 for plain, noted in zip(seconds[False], seconds[True], strict=True)]
    print(
        f"{model}: {counts[True] - counts[False]} of {counts[True]} operations "
        f"({counts[True] / counts[False] - 1:.2%}), {np.median(more):+.2%} CPU time "
        f"(median of {TURNS} pairs, {min(more):+.2%} to {max(more):+.2%})"
    )


class Operations(TorchDispatchMode):
    """Counts the operations that make a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += all(made.alias_info is None for made in func._schema.returns)
        return func(*args, **(kwargs or {}))


def runs_of(line: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the runs of a line of the record. Of a tolerance, fixed plans are in the first line of a case."""
    if "fixed" not in line:
        yield line
        return
    for speedup, run in line["fixed"].items():
        yield {**line, "speedup": float(speedup), **run}
    yield {**line, "speedup": f"tolerance of {line['min_psnr']} dB"}


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record, with the current names of settings."""
    for text in file.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "settings" in line:
            line["settings"] = with_new_names(line["settings"])
        yield line


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def psnr(mse: float) -> float:
    return -10 * math.log10(max(mse, LEAST_ERROR))


def by_solver(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean closeness of `emoji-unet` at a speed-up of 2 with each scheduler, as Markdown."""
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if (line["model"], line["size"], line["speedup"]) == ("emoji-unet", 128, 2.0):
            found[line["solver"]][line["guidance"]].append(psnr(line["mse"]))
    rows = ["| scheduler | guidance 3 | guidance 7.5 |", "|---|---:|---:|"]
    weak, strong = 3.0, 7.5  # guidance
    for solver, own in sorted(found.items(), key=lambda one: -np.mean(one[1][strong])):
        rows.append(f"| {solver} | {np.mean(own[weak]):.0f} dB | {np.mean(own[strong]):.0f} dB |")
    return "\n".join(rows)


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print how well the estimate ranks and bounds the true errors, and the closeness by scheduler."""
    print(by_solver(lines))
    report("all", lines)
    report("fixed plans", [line for line in lines if isinstance(line["speedup"], float)])
    for name in ("model", "solver", "guidance", "size", "steps", "speedup"):
        for value in dict.fromkeys(line[name] for line in lines):
            report(f"{name} {value}", [line for line in lines if line[name] == value])


def estimated(line: Mapping[str, Any], before: bool = False) -> float:
    """Return the estimate that the present policy makes of a line of the record, or made before its run."""
    model, part = CLASSES[line["model"]]
    work = Work((Share(part, 1, frozenset(), Amount()),))
    schedule = Schedule(is_euler=line["solver"] == "flow Euler")
    facts = RunFacts(model, work, (1, 1, 1), line["calls"], line["guidance"], schedule)
    errors = {part: {int(step): error for step, error in own.items()} for part, own in line["errors"].items()}
    config = ToMeConfig.from_dict(line["settings"])
    observed = Observations() if before else Observations(errors, line["sigmas"], line["noise"])
    found = estimate_closeness(facts, config, observed)
    assert found is not None
    return found.psnr


def report(name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Print rank correlations, over all and within a case, and the error that 90 % of the estimates keep."""
    expected = np.array([estimated(line) for line in lines])
    true = np.array([psnr_of(line["mse"]) for line in lines])  # what nobody sees counts as in the estimate
    cases = defaultdict(list)
    for place, line in enumerate(lines):
        cases[tuple(line[name] for name in KEY[:5])].append(place)
    within = [rank_correlation(expected[own], true[own]) for own in cases.values() if len(own) > 3]
    off = true - expected
    earlier = np.abs(true - np.array([estimated(line, before=True) for line in lines]))
    held = np.mean(np.abs(off) <= ESTIMATE["within"])
    print(
        f"{name}: {len(lines)} runs, rank correlation {rank_correlation(expected, true):.2f} over all, "
        f"{np.median(within) if within else math.nan:.2f} within a case (median); the truth is "
        f"{off.mean():+.1f} ± {off.std():.1f} dB from the estimate; 90 % within "
        f"{np.quantile(np.abs(off), 0.9):.1f} dB; {held:.0%} in the stated range; "
        f"before the run, 90 % within {np.quantile(earlier, 0.9):.1f} dB"
    )


def rank_correlation(ones: np.ndarray, others: np.ndarray) -> float:
    """Return Spearman's rank correlation."""
    ranks = [values.argsort().argsort() for values in (ones, others)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
