"""What the runtime notes of its own error, beside the true closeness of the picture.

Each line of the record is one generation with the default method: model, solver, guidance, size, steps,
speed, prompt, settings, how wrong the forecasts of step reuse would have been in the steps that knew the
truth, and the squared error to the dense picture of the same seed. A second run with the same record
continues where the first one stopped. `--table` says how well an estimate ranks and bounds the true errors.

    python benchmarks/estimate.py --out benchmarks/estimate_cpu.jsonl
    python benchmarks/estimate.py --table --out benchmarks/estimate_cpu.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import DiffusionPipeline
from solvers import GUIDANCE, scheduler

from tokenmerge import ToMeConfig, apply_token_merging
from tokenmerge.models.find import find_hosts
from tokenmerge.models.work import Amount, Share, Work
from tokenmerge.plans import Facts, harm_of
from tokenmerge.plans.estimate import estimate_closeness, log_features
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

SOLVERS = {
    "emoji-unet": ("DPM++ 2M", "DDIM", "Euler", "Euler ancestral"),
    "emoji-mmdit": ("flow Euler", "flow Heun"),
}
CLASSES: Mapping[str, Any] = {"emoji-unet": ("unet", "deep"), "emoji-mmdit": ("transformer", "blocks")}
SPEEDUPS = (1.2, 1.5, 2.0, 2.5, 3.0)
KEY = ("model", "solver", "guidance", "size", "steps", "speedup", "prompt")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", nargs="+", choices=list(SOLVERS), default=list(SOLVERS))
    parser.add_argument("--size", type=int, nargs="+", default=[128])
    parser.add_argument("--steps", type=int, nargs="+", default=[20])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--first-prompt", type=int, default=40, help="prompts before it serve other scripts")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        show(list(read(options.out)))
        return
    diffusers.utils.logging.set_verbosity_error()
    known = {key(line) for line in read(options.out)} if options.out.exists() else set()
    for model in options.model:
        measure(model, options, known)


def measure(model: str, options: argparse.Namespace, known: set[tuple[Any, ...]]) -> None:
    """Draw what the record does not have yet."""
    pipe = DiffusionPipeline.from_pretrained(path(model))
    pipe.set_progress_bar_config(disable=True)
    own, glyphs = dict(pipe.scheduler.config), read_glyphs()
    chosen = choose_prompts(options.first_prompt + options.prompts)[options.first_prompt :]
    prompts = [caption(glyphs[i].name, background) for i, background in chosen]
    conditions = itertools.product(options.size, options.steps, SOLVERS[model], GUIDANCE[model])
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
    errors = [[one.step, one.part, one.gap, *one.error.tolist()] for one in run.errors]
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    levels = [] if sigmas is None else [round(float(sigma), 5) for sigma in sigmas]
    return {
        "settings": run.config.changed(),
        "sigmas": levels,
        "errors": errors,
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


def read(file: Path) -> Iterator[dict[str, Any]]:
    for text in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(text)


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in KEY)


def psnr(mse: float) -> float:
    return -10 * math.log10(max(mse, 1e-12))


def show(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print how well the estimate ranks and bounds the true errors, and the numbers that fit best.

    The numbers are also fitted on each model alone and tried on the other one.
    """
    models = sorted({line["model"] for line in lines})
    fits = [("all", lines, lines)]
    fits += [(f"not fitted on {one}", without(lines, one), of(lines, one)) for one in models]
    for name, fitted_on, tried_on in fits:
        weights = np.linalg.lstsq(features(fitted_on), errors_of(fitted_on), rcond=None)[0]
        title = f"{name}, weights {', '.join(f'{weight:.2f}' for weight in weights)}"
        report(title, tried_on, features(tried_on) @ weights)
    sizes = sorted({line["size"] for line in lines})
    parts = [("", lines), *((f", size {size}", [r for r in lines if r["size"] == size]) for size in sizes)]
    for name, own in parts:
        logs = np.array([math.log(10 ** (-estimated(line) / 10)) for line in own])
        report(f"as in the policy{name}", own, logs)


def of(lines: Sequence[Mapping[str, Any]], model: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["model"] == model]


def without(lines: Sequence[Mapping[str, Any]], model: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["model"] != model]


def features(lines: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return 1, the log of the expected harm, and that of the noted errors: ``[line, 3]``."""
    return np.array([log_features(harm(line), *run_of(line)) for line in lines])


def harm(line: Mapping[str, Any]) -> float:
    """Return the harm that the present policy expects of the settings."""
    config, steps, _ = run_of(line)
    model, part = CLASSES[line["model"]]
    work = Work((Share(part, 1, frozenset(), Amount()),))
    return harm_of(Facts(model, work, (1, 1, 1), steps, line["guidance"]), config)


def errors_of(lines: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Return the logs of the true squared errors."""
    return np.log([max(line["mse"], 1e-10) for line in lines])


def run_of(line: Mapping[str, Any]) -> tuple[ToMeConfig, int, dict[str, dict[int, float]]]:
    noted: dict[str, dict[int, float]] = {}
    for step, part, _, *error in line["errors"]:
        noted.setdefault(part, {})[step] = max(error)
    steps = (
        len(line["sigmas"]) - 1 if line["sigmas"] else line["steps"]
    )  # Heun's method calls twice in a step
    return ToMeConfig.from_dict(line["settings"]), steps, noted


def estimated(line: Mapping[str, Any]) -> float:
    return estimate_closeness(harm(line), *run_of(line)).psnr


def report(name: str, lines: Sequence[Mapping[str, Any]], expected: np.ndarray) -> None:
    """Print rank correlations, over all and within a case, and the error that 90 % of the estimates keep."""
    true = errors_of(lines)
    cases = defaultdict(list)
    for place, line in enumerate(lines):
        cases[line["model"], line["solver"], line["guidance"], line["size"]].append(place)
    within = [rank_correlation(expected[own], true[own]) for own in cases.values() if len(own) > 4]
    off = (expected - true) * 10 / math.log(10)
    bound = np.quantile(np.abs(off), 0.9)
    print(
        f"{name}: {len(lines)} runs, rank correlation {rank_correlation(expected, true):.2f} over all, "
        f"{np.median(within):.2f} within a case (median); 90 % within {bound:.1f} dB; "
        f"true closeness {np.median(off):+.1f} dB from the estimate (median)"
    )


def rank_correlation(ones: np.ndarray, others: np.ndarray) -> float:
    """Return Spearman's rank correlation."""
    ranks = [values.argsort().argsort() for values in (ones, others)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    main()
