"""Measure how close plans are that merge nothing, as on fast GPUs: of SDXL, SD 1.5, and the model itself.

A plan says which denoising steps run the whole model, and which the finest level of a UNet alone, or nothing.
How many of each fit into a speed depends on the model: the finest level is 5 % of the operations of SDXL at
1024 × 1024 pixels, and 37 % of those of `emoji-unet` at 256 × 256. So each plan is made for one model, by its
operations, and runs on the small bundled one. Prompts, seeds, size, steps and guidance are those of
readme.py. Beside the plans are as many steps of the unchanged model as have the same operations.

    # 45 minutes; begun again, it goes on after the last prompt in the record
    OUT=benchmarks/plans_without_merging_cpu.jsonl
    OMP_NUM_THREADS=1 python benchmarks/plans_without_merging.py measure --prompts 12 --out $OUT
    python benchmarks/plans_without_merging.py write $OUT  # README.md and results.md
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import rivals
import torch
from diffusers import DiffusionPipeline
from readme import GUIDANCE, MODEL, PROMPTS, SEED, SIZE, SPEEDUPS, STEPS, Lines, beside, draw, main, read

from tokenmerge import ToMeConfig, calibration
from tokenmerge.default_method import settings_for
from tokenmerge_tools import demo
from tokenmerge_tools.bench.loaded_model import build_denoiser, find_geometry
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

# What a plan is made for: name, geometry, and sides of the image in latents.
MODELS = {"SDXL, 1024 px": ("sdxl", 128), "SD 1.5, 512 px": ("sd15", 64)}
OWN = f"`{MODEL}`, {SIZE} px"
README = Path(__file__).parent.parent / "README.md"
PAGE = README.parent / "docs" / "results.md"
HOLDOUT = Path(__file__).with_name("holdout_cpu.jsonl")
BLOCK = re.compile(r"(<!-- ?(plans without merging|closeness):.*?-->\n).*?(<!-- ?end ?-->)", flags=re.DOTALL)
# Steps of the unchanged model with the operations of 20 steps of a small transformer at 1.5×, 2× and 3×.
HARD_TO_TELL = 40  # dB from which on images are hard to tell apart
FEWER = (13, 10, 6)


def plans(pipe: DiffusionPipeline) -> dict[str, dict[float, ToMeConfig]]:
    """Return the settings for each speed, by the model that they are made for. None of them merges."""
    calibration.TOKENS_ON_CPU = 10**9
    found = {}
    for name, (geometry, side) in MODELS.items():
        unet = build_denoiser(find_geometry(geometry), torch.float32, torch.device("meta"), seed=0)
        arguments = {
            "height": side,
            "width": side,
            "steps": STEPS,
            "guidance": GUIDANCE,
            "follows_steps": True,
        }
        found[name] = {speedup: settings_for(unet, speedup, **arguments) for speedup in SPEEDUPS}
    side = SIZE // pipe.vae_scale_factor
    found[OWN] = {one: settings_for(pipe, one, side, side, STEPS, GUIDANCE) for one in SPEEDUPS}
    for configs in found.values():
        assert not any(config.merges for config in configs.values())
    return found


def measure(out: Path, prompts: int) -> None:
    """Draw each prompt dense, with each plan, and in fewer steps."""
    pipe = DiffusionPipeline.from_pretrained(demo.path(MODEL))
    pipe.set_progress_bar_config(disable=True)
    made = plans(pipe)
    done = len(read(out)) if out.exists() else 0
    for number, (glyph, background) in enumerate(choose_prompts(prompts, seed=PROMPTS)):
        if number < done:
            continue
        prompt = caption(read_glyphs()[glyph].name, background)
        seed = SEED + number
        dense, _ = draw(pipe, prompt, seed)
        line: dict[str, Any] = {"prompt": prompt, "seed": seed, "psnr": {}, "fewer steps": {}}
        for name, configs in made.items():
            drawn = {one: draw(pipe, prompt, seed, {"config": config}) for one, config in configs.items()}
            line["psnr"][name] = {f"{one:g}": beside(dense, *own)["psnr"] for one, own in drawn.items()}
        for speedup in SPEEDUPS:
            steps = round(STEPS / speedup)
            fewer = beside(dense, *draw(pipe, prompt, seed, steps=steps))
            line["fewer steps"][f"{speedup:g}"] = [steps, fewer["psnr"]]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def table(lines: Lines) -> str:
    """Return the means over the prompts, in Markdown."""
    heads = [f"{one:g}×" for one in SPEEDUPS]
    rows = [f"| plan of | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in (*MODELS, OWN):
        means = []
        for one in SPEEDUPS:
            mean = statistics.mean(line["psnr"][name][f"{one:g}"] for line in lines)
            means.append(f"{mean:.0f} dB")
        rows.append(f"| {name} | {' | '.join(means)} |")
    cells = []
    for one in SPEEDUPS:
        own = [line["fewer steps"][f"{one:g}"] for line in lines]
        cells.append(f"{own[0][0]} steps: {statistics.mean(found for _, found in own):.0f} dB")
    return "\n".join([*rows, f"| none: fewer steps | {' | '.join(cells)} |", ""])


def readme_table(lines: Lines) -> str:
    """Return the table of README.md: small models at each speed, and in as few steps as cost what 2× does."""
    flux = [line for line in read(HOLDOUT) if line["size"] == 256]
    drawn = rivals.records_of(rivals.DRAWN)

    def of_flux(method: str, setting: float) -> float:
        own = [line for line in flux if (line["method"], line["setting"]) == (method, setting)]
        return statistics.mean(line["psnr"] for line in own)

    def of_sd3(guidance: float, variant: str, setting: float) -> float:
        records = [record for record in drawn["emoji-mmdit", guidance] if record.variant == variant]
        (found,) = (record for record in records if list(record.settings.values()) == [setting])
        return float(found.figures["psnr"])

    def of_unet(plan: str, speedup: float) -> tuple[float, ...]:
        key = f"{speedup:g}"
        pairs = [(line["psnr"][plan][key], line["fewer steps"][key][1]) for line in lines]
        return tuple(map(statistics.mean, zip(*pairs, strict=True)))

    pairs = [*zip(SPEEDUPS, FEWER, strict=True)]
    rows = {"like FLUX": [(of_flux("tokenmerge", one), of_flux("dense", steps)) for one, steps in pairs]}
    for plan in MODELS:
        model = plan.split(",")[0]
        rows[f"like {model}, guidance {GUIDANCE:g}"] = [of_unet(plan, one) for one in SPEEDUPS]
    for scale in (3.0, 7.0):
        of_scale = []
        for one, steps in pairs:
            of_scale.append((of_sd3(scale, "auto", one), of_sd3(scale, "fewer-steps", steps)))
        rows[f"like SD3, guidance {scale:g}"] = of_scale
    at_1, at_2, at_3 = (f"`speedup={one:.1f}`" for one in SPEEDUPS)
    made = [f"| dB | {at_1} | {at_2} | {FEWER[1]} steps, also 2× | {at_3} |", "|---|---:|---:|---:|---:|"]
    for name, values in rows.items():
        (slow, _), (middle, fewer), (fast, _) = values
        figures = (slow, middle, fewer, fast)
        cells = [f"**{one:.0f}**" if round(one) >= HARD_TO_TELL else f"{one:.0f}" for one in figures]
        made.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*made, ""])


def write(lines: Lines) -> None:
    """Write the tables into README.md and docs/results.md."""
    made = {"plans without merging": table(lines), "closeness": readme_table(lines)}
    for page in (README, PAGE):
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(lambda found: found[1] + made[found[2]] + found[3], text), encoding="utf-8")


if __name__ == "__main__":
    main(__doc__, measure, write)
