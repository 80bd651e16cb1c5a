"""The default method beside fewer steps of the same operations, in generations of 6 to 30 steps.

Both bundled models draw with the guidance and the scheduler of their own pipelines, at `speedup=2.0`: with
merging, as on CPUs, and without it, as on fast GPUs. A line of the record is one image: its settings, its
speed-up by operations, and its PSNR to the dense image of the same seed and number of steps. The prompts and
seeds are others than those that the policy was fitted on. Fewer steps have at least the operations of the
default method. A second run with the same record continues where the first one stopped. `write` puts the
table into docs/few-steps.md, and prints up to how many steps fewer steps can be as close.

    # two hours on one thread
    OMP_NUM_THREADS=1 python benchmarks/by_steps.py measure --out benchmarks/by_steps_cpu.jsonl
    python benchmarks/by_steps.py write --out benchmarks/by_steps_cpu.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from tokenmerge import apply_token_merging, calibration
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

PROMPTS = 47
SEED = 8500
GUIDANCE = {"emoji-unet": 7.5, "emoji-mmdit": 7.0}  # by default in their pipelines
SPEEDUP = 2.0
TOKENS_ON_CPU = calibration.TOKENS_ON_CPU
STEPS = (6, 8, 10, 12, 15, 20, 25, 30)
# By model and size in pixels: how many prompts are drawn, and whether with merging, without it, or both. At
# 128 pixels, the default method merges nothing in the UNet.
COUNTS = {
    ("emoji-unet", 128): (5, (False,)),
    ("emoji-mmdit", 128): (5, (True, False)),
    ("emoji-unet", 256): (2, (True, False)),
    ("emoji-mmdit", 256): (1, (True, False)),
}
MOST_KEPT = 100  # images
OWN = "default method"
FEWER = "fewer steps"
ENOUGH = 0.25  # of the images, in which fewer steps are as close or closer
FIELDS = ("model", "size", "steps", "guidance", "merges", "prompt", "seed")
PAGE = Path(__file__).parent.parent / "docs" / "few-steps.md"
# (model, size in pixels, whether tokens merge) → steps → dB by which the default method is closer, by prompt
Leads = Mapping[tuple[str, int, bool], Mapping[int, Sequence[float]]]
BLOCK = re.compile(r"(<!-- by steps: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def scenes() -> Iterator[dict[str, Any]]:
    """Yield the conditions of the images to draw."""
    glyphs = read_glyphs()
    chosen = choose_prompts(max(count for count, _ in COUNTS.values()), seed=PROMPTS)
    for (model, size), (count, ways) in COUNTS.items():
        for number, (glyph, background) in enumerate(chosen[:count]):
            prompt = caption(glyphs[glyph].name, background)
            for steps, merges in itertools.product(STEPS, ways):
                values = (model, size, steps, GUIDANCE[model], merges, prompt, SEED + number)
                yield dict(zip(FIELDS, values, strict=True))


class Artist:
    """Draws the images of the record."""

    def __init__(self) -> None:
        self._pipes: dict[str, DiffusionPipeline] = {}
        self._images: dict[tuple[Any, ...], torch.Tensor] = {}

    def pipe(self, model: str) -> DiffusionPipeline:
        """Return the pipeline of a bundled model, as it loads."""
        if model not in self._pipes:
            self._pipes[model] = DiffusionPipeline.from_pretrained(path(model))
            self._pipes[model].set_progress_bar_config(disable=True)
        return self._pipes[model]

    def dense(self, scene: Mapping[str, Any], steps: int) -> torch.Tensor:
        """Return the image of the unchanged model in so many steps. The last ones are kept."""
        key = (*(scene[name] for name in FIELDS if name not in ("steps", "merges")), steps)
        if key not in self._images:
            if len(self._images) > MOST_KEPT:
                self._images.clear()
            self._images[key] = self.draw(scene, steps)
        return self._images[key]

    def draw(self, scene: Mapping[str, Any], steps: int) -> torch.Tensor:
        """Draw an image as the pipeline is now."""
        drawn = self.pipe(scene["model"])(
            scene["prompt"],
            height=scene["size"],
            width=scene["size"],
            num_inference_steps=steps,
            guidance_scale=scene["guidance"],
            generator=torch.Generator().manual_seed(scene["seed"]),
            output_type="pt",
        )
        return drawn.images[0]

    def with_default_method(self, scene: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
        """Return the image of the default method, and its speed-up by operations."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in few steps, they say that the image will look different
            patch = apply_token_merging(self.pipe(scene["model"]), speedup=SPEEDUP)
            try:
                image = self.draw(scene, scene["steps"])
                assert scene["merges"] or not patch.config.merges
                return image, patch.report().speedup
            finally:
                patch.remove()


def measure(out: Path) -> None:
    """Draw the images that are not in the record: all of a prompt and a number of steps together."""
    artist = Artist()
    done = {scene_of(line) for line in read(out)}
    for scene in scenes():
        if scene_of(scene) in done:
            continue
        calibration.TOKENS_ON_CPU = TOKENS_ON_CPU if scene["merges"] else 10**9
        dense = artist.dense(scene, scene["steps"])
        image, speedup = artist.with_default_method(scene)
        own = {**scene, "method": OWN, "used": scene["steps"], "speedup": round(speedup, 3)}
        used = with_as_many_operations(scene["steps"], speedup)
        fewer = {**scene, "method": FEWER, "used": used, "speedup": round(scene["steps"] / used, 3)}
        own["psnr"] = psnr(image, dense)
        fewer["psnr"] = psnr(artist.dense(scene, used), dense)
        with out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in (own, fewer))
        print(own["psnr"], fewer["psnr"], scene, flush=True)


def with_as_many_operations(steps: int, speedup: float) -> int:
    """Return the number of dense steps that have at least the operations of a speed-up.

    A tenth of a step less counts as equal.

    >>> with_as_many_operations(20, 1.995), with_as_many_operations(8, 2.22)
    (10, 4)
    """
    return math.ceil(steps / speedup - 0.1)


def psnr(image: torch.Tensor, dense: torch.Tensor) -> float:
    """Return the PSNR in dB, with three decimals."""
    return round(float(-10 * torch.log10((image - dense).square().mean().clamp(min=1e-10))), 3)


def scene_of(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in FIELDS)


def read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def leads(lines: Sequence[Mapping[str, Any]]) -> Leads:
    """Return by how many dB the default method is closer."""
    psnr = {(scene_of(line), line["method"]): line["psnr"] for line in lines}
    found: dict[tuple[str, int, bool], dict[int, list[float]]] = {}
    for scene in sorted({scene_of(line) for line in lines}):
        about = dict(zip(FIELDS, scene, strict=True))
        of_steps = found.setdefault((about["model"], about["size"], about["merges"]), {})
        of_steps.setdefault(about["steps"], []).append(psnr[scene, OWN] - psnr[scene, FEWER])
    return found


def few_steps(found: Leads, size: int, merges: bool) -> int:
    """Return the largest number of steps at which fewer steps can be as close, or 0 if there is none.

    They are so in at least a quarter of the images of one of the models.

    >>> lead = {("a", 128, False): {8: [-1.0, 2.0], 10: [2.0, 1.0]}, ("b", 128, False): {8: [1.0], 10: [1.0]}}
    >>> few_steps(lead, 128, merges=False), few_steps(lead, 256, merges=False)
    (8, 0)
    """
    most = 0
    for (_, of_size, of_merging), of_steps in found.items():
        for steps, of_prompts in of_steps.items():
            as_close = sum(lead <= 0 for lead in of_prompts)
            if (of_size, of_merging) == (size, merges) and as_close >= ENOUGH * len(of_prompts):
                most = max(most, steps)
    return most


def table(found: Leads) -> str:
    """Return the table of docs/few-steps.md: the mean over the prompts, and in how many it is closer."""
    rows = [f"| | {' | '.join(f'{steps} steps' for steps in STEPS)} |", "|---|" + "---:|" * len(STEPS)]
    for (model, size, merges), of_steps in sorted(found.items(), reverse=True):
        cells = []
        for steps in STEPS:
            of_prompts = of_steps[steps]
            closer = sum(lead > 0 for lead in of_prompts)
            mean = f"{statistics.mean(of_prompts):+.1f}".replace("-", "−")
            cells.append(f"{mean} ({closer}/{len(of_prompts)})")
        way = ", tokens merge" if merges else ""
        rows.append(f"| `{model}`, {size} px{way} | {' | '.join(cells)} |")
    return "\n".join((*rows, ""))


def write(lines: Sequence[Mapping[str, Any]]) -> None:
    """Write the table into docs/few-steps.md, and print what the rules of the package have to be."""
    found = leads(lines)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda block: block[1] + table(found) + block[2], text), encoding="utf-8")
    print(f"tokenmerge.plans.few_steps: MOST = {few_steps(found, 128, merges=False)}")
    print(f"MOST_ON_MANY_TOKENS = {few_steps(found, 256, merges=False)}")
    print(f"with merging: {max(few_steps(found, size, merges=True) for size in (128, 256))}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "write"))
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if options.what == "measure":
        measure(options.out)
    else:
        write(read(options.out))


if __name__ == "__main__":
    main()
