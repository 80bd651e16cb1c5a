"""Closeness and time of the default method under every scheduler and strength of guidance.

For each scheduler and guidance scale, images of a bundled model are drawn dense, with `auto` at 1.5 and 2,
with tomesd at 0.5, and dense with as many steps as fit into the CPU time of each `auto`. The methods are
interleaved at each prompt. A line of the record is one image: PSNR to the dense image of the same seed,
and wall and CPU seconds. A second run with the same record continues where the first one stopped. `--table`
prints the record as a table.

    python benchmarks/solvers.py --model emoji-unet --out benchmarks/solvers_cpu.jsonl
    python benchmarks/solvers.py --model emoji-mmdit --out benchmarks/solvers_cpu.jsonl
    python benchmarks/solvers.py --table --out benchmarks/solvers_cpu.jsonl

Each scheduler is configured as for real models: `clip_sample` is off, and betas are rescaled to zero terminal
SNR only with DPM++ 2M. None of these prompts and seeds was used to choose settings.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import diffusers
import tomesd
import torch
from closeness import psnr
from diffusers import DiffusionPipeline
from turns import at_least_2

from tokenmerge import apply_token_merging
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

# Name → scheduler of diffusers, and changes to its config. The bundled UNet was trained with betas rescaled
# to zero terminal SNR, which only the first of these schedulers keeps.
SOLVERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "DPM++ 2M": ("DPMSolverMultistepScheduler", {"rescale_betas_zero_snr": True}),
    "DPM++ 2M Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DPM++ SDE": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "DDIM": ("DDIMScheduler", {}),
    "PNDM": ("PNDMScheduler", {"skip_prk_steps": True}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "Euler ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "DEIS": ("DEISMultistepScheduler", {}),
    "DDPM": ("DDPMScheduler", {}),
}
FLOW_SOLVERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "flow Euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow Heun": ("FlowMatchHeunDiscreteScheduler", {}),
}
GUIDANCE = {"emoji-unet": (3.0, 7.5), "emoji-mmdit": (3.0, 7.0)}
SPEEDUPS = (1.5, 2.0)
METHODS = (*(f"auto {speedup:g}" for speedup in SPEEDUPS), "tomesd 0.5")
DENSE = "dense"


def scheduler(pipe: DiffusionPipeline, own: Mapping[str, Any], name: str) -> Any:
    """Return the scheduler for a model whose own scheduler has this config."""
    class_name, changes = {**SOLVERS, **FLOW_SOLVERS}[name]
    cls = getattr(diffusers, class_name)
    known = inspect.signature(cls.__init__).parameters
    of_the_model = (
        *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "prediction_type"),
        *("timestep_spacing", "steps_offset", "shift"),
    )
    config = {key: own[key] for key in of_the_model if key in own and key in known}
    plain = {"clip_sample": False, "use_karras_sigmas": False}
    return cls(**{**config, **{key: value for key, value in plain.items() if key in known}, **changes})


def draw(pipe: DiffusionPipeline, row: Mapping[str, Any], steps: int) -> Any:
    """Draw the image of a row of the table: ``[1, size, size, 3]``, wall seconds and CPU seconds."""
    start = time.perf_counter()
    cpu_start = time.process_time()
    image = pipe(
        row["prompt"],
        height=row["size"],
        width=row["size"],
        num_inference_steps=steps,
        guidance_scale=row["guidance"],
        generator=torch.Generator().manual_seed(row["seed"]),
        output_type="np",
    ).images
    return image, time.perf_counter() - start, time.process_time() - cpu_start


def methods(
    pipe: DiffusionPipeline, spent: Mapping[str, float], steps: int
) -> Iterator[tuple[str, str, int]]:
    """Yield the name in the record, the method and the number of steps.

    Fewer steps come last, since they need the times of auto.
    """
    model = getattr(pipe, "unet", None)
    for name in METHODS:
        if not name.startswith("tomesd") or model is not None:  # tomesd supports only UNets
            yield name, name, steps
    for ratio in SPEEDUPS:
        share = spent[f"auto {ratio:g}"] / spent[DENSE]
        yield f"fewer steps as auto {ratio:g}", DENSE, max(1, min(steps - 1, round(share * steps)))


def run(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    pipe = DiffusionPipeline.from_pretrained(path(options.model))
    pipe.set_progress_bar_config(disable=True)
    own = dict(pipe.scheduler.config)
    known = SOLVERS if hasattr(pipe, "unet") else FLOW_SOLVERS
    glyphs = read_glyphs()
    chosen = choose_prompts(options.prompts, seed=11)
    prompts = [caption(glyphs[i].name, background) for i, background in chosen]
    done = {key(line) for line in read(options.out)}
    for name in options.solver or known:
        pipe.scheduler = scheduler(pipe, own, name)
        for scale in options.guidance or GUIDANCE[options.model]:
            for number, prompt in enumerate(prompts):
                row = {
                    **{"model": options.model, "solver": name, "guidance": scale, "size": options.size},
                    **{"steps": options.steps, "prompt": prompt, "seed": 5000 + number},
                }
                if key({**row, "method": f"fewer steps as auto {SPEEDUPS[-1]:g}"}) not in done:
                    draw_row(pipe, row, options)


def draw_row(pipe: DiffusionPipeline, row: dict[str, Any], options: argparse.Namespace) -> None:
    """Draw one prompt with each method, and write a line for each image."""
    dense, *taken = draw(pipe, row, options.steps)
    spent = {DENSE: taken[1]}
    write(options.out, {**row, "method": DENSE, "used": options.steps, "psnr": None, "taken": taken})
    for label, method, steps in methods(pipe, spent, options.steps):
        remove = apply(pipe, method)
        try:
            image, *taken = draw(pipe, row, steps)
        finally:
            remove()
        spent[label] = taken[1]
        found = {"method": label, "used": steps, "psnr": psnr(image, dense)[0], "taken": taken}
        write(options.out, {**row, **found})
        print(f"{row['solver']}, {row['guidance']:g}: {label} {found['psnr']:.1f} dB", flush=True)


def apply(pipe: DiffusionPipeline, method: str) -> Any:
    """Patch a pipeline, and return a function that removes the patch."""
    name, _, number = method.partition(" ")
    if name == "auto":
        return apply_token_merging(pipe, speedup=float(number)).remove
    if name == "tomesd":
        tomesd.apply_patch(pipe, ratio=float(number))
        return lambda: tomesd.remove_patch(pipe)
    return lambda: None


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("model", "solver", "guidance", "size", "steps", "prompt", "method"))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, line: Mapping[str, Any]) -> None:
    taken = [round(seconds, 3) for seconds in line["taken"]]
    psnr = None if line["psnr"] is None else round(line["psnr"], 3)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({**line, "psnr": psnr, "taken": taken}) + "\n")


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table for each model, size and number of steps.

    A cell has the PSNR and the speed-up, which is the dense CPU time over that of the method.
    """
    latest = {key(line): line for line in lines}
    rows: dict[tuple[Any, ...], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for line in latest.values():
        dense = latest.get(key({**line, "method": DENSE}))
        if line["method"] != DENSE and dense is not None:
            speed = dense["taken"][1] / line["taken"][1]
            row = tuple(line[name] for name in ("model", "size", "steps", "solver", "guidance"))
            rows[row][line["method"]].append((line["psnr"], speed))
    for (model, size, steps), group in groupby(sorted(rows.items()), key=lambda item: item[0][:3]):
        found = list(group)
        shown = [*METHODS, *(f"fewer steps as auto {ratio:g}" for ratio in SPEEDUPS)]
        shown = [name for name in shown if any(name in cells for _, cells in found)]
        yield f"{model}, {size} × {size} pixels, {steps} steps:\n"
        yield f"| scheduler | guidance | {' | '.join(shown)} |"
        yield "|" + "---|" * (2 + len(shown))
        for (*_, solver, guidance), cells in found:
            text = [_cell(cells[name]) if name in cells else "" for name in shown]
            yield f"| {solver} | {guidance:g} | {' | '.join(text)} |"
        yield ""


def _cell(values: list[tuple[float, float]]) -> str:
    closeness = statistics.mean(psnr for psnr, _ in values)
    error = statistics.stdev(psnr for psnr, _ in values) / len(values) ** 0.5 if len(values) > 1 else None
    spread = "" if error is None else f" ± {error:.1f}"
    return f"{closeness:.1f}{spread} dB, {statistics.median(speed for _, speed in values):.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(GUIDANCE), default="emoji-unet")
    parser.add_argument("--solver", nargs="+", choices=[*SOLVERS, *FLOW_SOLVERS], help="default: all")
    parser.add_argument("--guidance", type=float, nargs="+", help="default: 3, and 7.5 (unet) or 7 (mmdit)")
    parser.add_argument("--size", type=int, default=256, help="pixels (default: 256, 4096 tokens)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=at_least_2, default=4)
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        run(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
