"""Measure how close the default method is where it merges nothing, as on fast GPUs.

The model, the prompts, the seeds, the size, the number of steps and the guidance are those of readme.py.
Beside the default method are as many steps of the unchanged model as have the same operations. A line of the
record has the speed-up by operations of each image on the model that drew it.

    # 20 minutes; begun again, it goes on after the last prompt in the record
    OUT=benchmarks/plans_without_merging_cpu.jsonl
    OMP_NUM_THREADS=1 python benchmarks/plans_without_merging.py measure --prompts 12 --out $OUT
    python benchmarks/plans_without_merging.py write $OUT  # README.md and results.md
"""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import rivals
from diffusers import DiffusionPipeline
from readme import GUIDANCE, MODEL, PROMPTS, SEED, SIZE, SPEEDUPS, STEPS, Lines, beside, draw, main, read

from tokenmerge import calibration
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans.choose import SpeedupPlan
from tokenmerge_tools import demo
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

README = Path(__file__).parent.parent / "README.md"
PAGE = README.parent / "docs" / "results.md"
HOLDOUT = Path(__file__).with_name("holdout_cpu.jsonl")
BLOCK = re.compile(r"(<!-- ?(plans without merging|closeness):.*?-->\n).*?(<!-- ?end ?-->)", flags=re.DOTALL)
HARD_TO_TELL = 40  # dB from which on images are hard to tell apart


class Cell(NamedTuple):
    """A mean closeness in dB, and the speed-up by operations of the model that drew the images."""

    psnr: float
    speedup: float


def plans(pipe: DiffusionPipeline) -> dict[float, SpeedupPlan]:
    """Return the plan for each speed. None of them merges."""
    calibration.TOKENS_ON_CPU = 10**9
    side = SIZE // pipe.vae_scale_factor
    found = {}
    for speedup in SPEEDUPS:
        hosts = find_hosts(pipe)
        method = DefaultMethod.of(pipe, hosts, speedup)
        found[speedup] = method.plan(method.facts_at(hosts[0].grid_at(side, side), STEPS, GUIDANCE))
        assert not found[speedup].config.merges
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
        line: dict[str, Any] = {"prompt": prompt, "seed": seed, "psnr": {}, "speedup": {}, "fewer steps": {}}
        for speedup, plan in made.items():
            key = f"{speedup:g}"
            line["psnr"][key] = beside(dense, *draw(pipe, prompt, seed, {"config": plan.config}))["psnr"]
            line["speedup"][key] = round(plan.speedup, 3)
            steps = round(STEPS / speedup)
            fewer = beside(dense, *draw(pipe, prompt, seed, steps=steps))
            line["fewer steps"][key] = [steps, fewer["psnr"]]
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def cells_of(lines: Lines) -> tuple[list[Cell], dict[int, Cell]]:
    """Return the means over the prompts: of the plan at each speed, and of each smaller number of steps."""
    own = []
    fewer = {}
    for one in SPEEDUPS:
        key = f"{one:g}"
        psnr = statistics.mean(line["psnr"][key] for line in lines)
        own.append(Cell(psnr, lines[0]["speedup"][key]))
        steps = lines[0]["fewer steps"][key][0]
        psnr = statistics.mean(line["fewer steps"][key][1] for line in lines)
        fewer[steps] = Cell(psnr, STEPS / steps)
    return own, fewer


def table(lines: Lines) -> str:
    """Return the means over the prompts, in Markdown."""
    own, fewer = cells_of(lines)
    heads = [f"`speedup={one:.1f}`" for one in SPEEDUPS]
    rows = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    rows.append(f"| without merging | {' | '.join(map(shown, own))} |")
    cells = [f"{steps} steps: {shown(cell)}" for steps, cell in fewer.items()]
    rows.append(f"| fewer steps | {' | '.join(cells)} |")
    return "\n".join([*rows, ""])


def shown(cell: Cell) -> str:
    return f"{cell.psnr:.0f} dB at {cell.speedup:.2f}×"


def of_flux() -> tuple[list[Cell], Cell]:
    """Return the cells of the small FLUX, and that of half of its steps."""
    lines = [line for line in read(HOLDOUT) if line["size"] == 256]
    dense = {line["picture"]: line["flops"] for line in lines if line["psnr"] == 100}

    def cell(method: str, setting: float) -> Cell:
        own = [line for line in lines if (line["method"], line["setting"]) == (method, setting)]
        psnr = statistics.mean(line["psnr"] for line in own)
        return Cell(psnr, statistics.mean(dense[line["picture"]] / line["flops"] for line in own))

    return [cell("tokenmerge", one) for one in SPEEDUPS], cell("dense", STEPS / 2)


def of_transformer(guidance: float, merges: bool) -> tuple[list[Cell], Cell]:
    """Return the cells of the bundled transformer at 128 × 128 pixels, and that of half of its steps."""
    drawn = rivals.records_of(rivals.DRAWN)
    records = (drawn if merges else rivals.without_merging(drawn))[rivals.MERGING, guidance]

    def cell(variant: str, setting: float) -> Cell:
        own = [record for record in records if record.variant == variant]
        (found,) = (record for record in own if list(record.settings.values()) == [setting])
        return Cell(float(found.figures["psnr"]), found.cost["counted"])

    return [cell("auto", one) for one in SPEEDUPS], cell("fewer-steps", STEPS / 2)


def readme_table(lines: Lines) -> str:
    """Return the table of README.md: small models at each speed, and in half of the steps.

    Nothing merges, except in the row that says so.
    """
    own, fewer = cells_of(lines)
    rows = {"small FLUX, 256 px": of_flux()}
    for scale in (3.0, 7.0):
        rows[f"small SD3, 128 px, guidance {scale:g}"] = of_transformer(scale, merges=False)
    rows["the same, where tokens merge"] = of_transformer(7.0, merges=True)
    rows[f"small UNet, {SIZE} px, guidance {GUIDANCE:g}"] = own, fewer[STEPS // 2]
    at_1, at_2, at_3 = (f"`speedup={one:.1f}`" for one in SPEEDUPS)
    heads = f"| dB (speed-up by operations) | {at_1} | {at_2} | {STEPS // 2} of {STEPS} steps | {at_3} |"
    made = [heads, "|---|---:|---:|---:|---:|"]
    for name, ((slow, middle, fast), half) in rows.items():
        cells = []
        for cell in (slow, middle, half, fast):
            psnr = f"{cell.psnr:.0f}"
            psnr = f"**{psnr}**" if int(psnr) >= HARD_TO_TELL else psnr
            cells.append(f"{psnr} ({cell.speedup:.2f}×)")
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
