"""Where the full steps of a generation lie: at equal distances, or elsewhere.

Images are drawn with step reuse alone, each time with the same number of full steps and of steps with
the finest level. A line of the record is one image: where these steps lie, and its PSNR to the dense
image of the same seed. A second run with the same record continues where the first one stopped. `--table`
prints the gain over equal distances. The second prompt of the record was drawn with
`--prompts 2 --model emoji-unet --strength strong`.

    python benchmarks/places.py --out benchmarks/places_cpu.jsonl
    python benchmarks/places.py --table --out benchmarks/places_cpu.jsonl

The layouts are:

- `even`: the first two steps and the last are full, and others at equal distances.
- `later`: these are closer together towards the end (`tokenmerge.plans.choose.later_ones`).
- `before the last`: the first step is full, others lie at equal distances, and the last is not full
  (`without_the_last`).

The exponent of `later` was chosen on images of `emoji-unet` with other prompts, and with UniPC, DPM++ 2M,
DDIM and Euler ancestral. `before the last` was chosen on `emoji-mmdit` with flow Euler and other prompts; it
is also tried on `emoji-unet`, with a scheduler whose last step has little noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
from policy import FIELDS, STRONG, TRANSFORMER, UNET, Artist, Scene, decibels, prompts_of, read, write

from tokenmerge import StepReuse, ToMeConfig
from tokenmerge.plans.choose import distance, later_ones, nearest, without_the_last

PROMPTS = 45
SEED = 8300
STEPS = 20
SIZE = 128
EXPONENT = 0.8
TAIL = 0.6
# Numbers of full steps and of steps with the finest level. Of a UNet they are those of the default method
# at 1024 tokens and speed-ups of about 1.4 and 1.8.
COUNTS = {
    ("later", "weak"): ((10, 11), (6, 8)),
    ("later", "strong"): ((8, 17), (8, 13)),
    ("before the last", "weak"): ((12, STEPS), (8, STEPS)),
    ("before the last", "strong"): ((12, STEPS), (8, STEPS)),
}
SOLVERS = {
    TRANSFORMER: (("flow Euler", "before the last"),),
    UNET: (
        *((solver, "later") for solver in ("DEIS", "DPM++ SDE", "Euler")),
        ("DPM++ 2M Karras", "before the last"),
    ),
}


def scenes(prompts: int) -> Iterator[tuple[Scene, str, str]]:
    """Yield scenes, each with the strength of guidance and the layout to compare with `even`."""
    for number, prompt in enumerate(prompts_of(PROMPTS, prompts)):
        for model, solvers in SOLVERS.items():
            for solver, layout in solvers:
                for strength in ("weak", "strong"):
                    guidance = STRONG[model] if strength == "strong" else 3.0
                    yield Scene(model, SIZE, STEPS, solver, guidance, prompt, SEED + number), strength, layout


def places(layout: str, full_steps: int, finest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the full steps, and the steps that run the finest level."""
    even = StepReuse(every=distance(STEPS, full_steps), shallow_every=distance(STEPS, finest))
    full, shallow = even.steps_of(STEPS)
    if layout == "later":
        return nearest(later_ones(STEPS, full_steps, EXPONENT), shallow), shallow
    if layout == "before the last":
        return without_the_last(STEPS, full_steps, TAIL), shallow
    return full, shallow


def places_of(full: Sequence[int], shallow: Sequence[int], steps: int) -> dict[str, tuple[float, ...]]:
    """Return settings of step reuse with these full steps, and these with the finest level."""
    others = sorted({*shallow} - {*full})
    last = steps - 1
    return {
        "reuse.full_steps": tuple(step / last for step in full),
        "reuse.shallow_steps": tuple(step / last for step in others),
    }


def measure(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    out = options.out
    artist = Artist()
    done = {key(line) for line in read(out)}
    for scene, strength, other in scenes(options.prompts):
        if scene.model not in options.model or strength not in options.strength:
            continue
        for full_steps, finest in COUNTS[other, strength]:
            for layout in ("even", other):
                line = {
                    **dataclasses.asdict(scene),
                    "complete": full_steps,
                    "finest": finest,
                    "layout": layout,
                }
                if key(line) in done:
                    continue
                full, shallow = places(layout, full_steps, finest)
                settings = {"ratio": 0, "max_downsample": 8, **places_of(full, shallow, STEPS)}
                error = artist.error(scene, ToMeConfig.from_dict(settings))
                line |= {"full": full, "shallow": sorted({*shallow} - {*full}), "psnr": decibels(error)}
                write(out, line)
                print(f"{line['psnr']:.1f} dB: {line}", flush=True)


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in (*FIELDS, "complete", "finest", "layout"))


def table(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table of gains over `even`, with standard errors over the images."""
    even = {key(line): line["psnr"] for line in lines if line["layout"] == "even"}
    cells = defaultdict(list)
    for line in lines:
        usual = even.get(key({**line, "layout": "even"}))
        if line["layout"] != "even" and usual is not None:
            gain = line["psnr"] - usual
            cells[line["model"], line["layout"], line["solver"], f"{line['guidance']:g}"].append(gain)
            cells[line["model"], line["layout"], "**all**", ""].append(gain)
    yield "| model | layout | scheduler | guidance | images | gain, dB | from … to |"
    yield "|---|---|---|---:|---:|---:|---|"
    for cell, gains in sorted(cells.items()):
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        spread = f"{min(gains):+.1f} … {max(gains):+.1f}"
        gain = f"{statistics.mean(gains):+.2f} ± {error:.2f}"
        yield f"| {' | '.join(cell)} | {len(gains)} | {gain} | {spread} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--model", nargs="+", choices=list(SOLVERS), default=list(SOLVERS))
    strengths = ("weak", "strong")
    parser.add_argument("--strength", nargs="+", choices=strengths, default=strengths, help="of guidance")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        measure(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
