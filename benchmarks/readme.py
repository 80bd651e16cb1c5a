"""Measure the table of README.md: the speed asked for, the speed measured, and how the image changes.

All images are of one bundled model at one size, number of steps and guidance, with prompts that no number
of the policy was fitted on. The time of a call is its processor time on one thread: text, all steps and
decoding. The calls of a prompt are interleaved. Beside each speed are as many steps of the unchanged model as
take the same time, in the mean over the prompts.

    # 3 to 10 minutes
    OMP_NUM_THREADS=1 python benchmarks/readme.py measure --out benchmarks/readme_cpu.jsonl
    python benchmarks/readme.py write benchmarks/readme_cpu.jsonl  # README.md and two pages
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from tokenmerge import token_merging
from tokenmerge.plans import looks
from tokenmerge_tools import demo
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

MODEL = "emoji-unet"
SIZE = 256
STEPS = 20
GUIDANCE = 7.5
SPEEDUPS = (1.5, 2.0, 3.0)
Lines = list[dict[str, Any]]  # of a record
# These are others than policy.py has.
PROMPTS = 44
SEED = 9000
ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "results.md")
BLOCK = re.compile(r"(<!-- rows: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def measure(out: Path, prompts: int) -> None:
    """Draw each prompt dense and at each speed."""
    pipe = DiffusionPipeline.from_pretrained(demo.path(MODEL))
    pipe.set_progress_bar_config(disable=True)
    for warm_up in (None, *SPEEDUPS):  # nothing is timed the first time that it runs
        draw(pipe, "a red apple", 0, warm_up and {"speedup": warm_up}, steps=4)
    for number, (glyph, background) in enumerate(choose_prompts(prompts, seed=PROMPTS)):
        prompt = caption(read_glyphs()[glyph].name, background)
        seed = SEED + number
        dense, seconds = draw(pipe, prompt, seed)
        line: dict[str, Any] = {"prompt": prompt, "seed": seed, "dense": seconds}
        for speedup in SPEEDUPS:
            line[f"speedup={speedup:g}"] = beside(dense, *draw(pipe, prompt, seed, {"speedup": speedup}))
            steps = round(STEPS * line[f"speedup={speedup:g}"]["seconds"] / seconds)
            fewer = beside(dense, *draw(pipe, prompt, seed, steps=steps))
            line[f"as long as speedup={speedup:g}"] = {"steps": steps, **fewer}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def draw(
    pipe: DiffusionPipeline,
    prompt: str,
    seed: int,
    settings: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> tuple[torch.Tensor, float]:
    """Return an image and the seconds of the call.

    The settings are arguments of token_merging, or None for a dense image.
    """
    merging = contextlib.nullcontext() if settings is None else token_merging(pipe, **settings)
    with merging:
        start = time.process_time()
        picture = pipe(
            prompt,
            height=SIZE,
            width=SIZE,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE,
            generator=torch.Generator().manual_seed(seed),
            output_type="pt",
        ).images[0]
        return picture, time.process_time() - start


def beside(dense: torch.Tensor, picture: torch.Tensor, seconds: float) -> dict[str, float]:
    return {"seconds": seconds, "psnr": float(-10 * torch.log10((dense - picture).square().mean()))}


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table with its condition, in Markdown."""
    heads = [
        "| you ask for | by the clock | how the image changes | closeness | "
        "the unchanged model, in the same time |",
        "|---|---:|---|---|---|",
    ]
    prompts = "1 prompt" if len(lines) == 1 else f"{len(lines)} prompts"
    where = f"{SIZE} × {SIZE} pixels, {STEPS} steps, guidance {GUIDANCE:g}"
    note = f"*The small `{MODEL}` on one CPU thread: {where}; mean and range of {prompts}.*"
    return "\n".join([*heads, *rows(lines), "", note, ""])


def write(lines: list[dict[str, Any]]) -> None:
    """Write the table into the documents that have it."""
    made = table(lines)
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        path.write_text(BLOCK.sub(lambda found: found[1] + made + found[2], text), encoding="utf-8")
        print(path)


def rows(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the table: the median speed over the prompts, and the mean and range of the PSNR."""
    for speedup in SPEEDUPS:
        name = f"speedup={speedup:g}"
        own = [(line["dense"] / line[name]["seconds"], line[name]["psnr"]) for line in lines]
        speeds, psnr = zip(*own, strict=True)
        mean = statistics.mean(psnr)
        closeness = f"{mean:.0f} dB ({min(psnr):.0f} to {max(psnr):.0f})"
        others = [line[f"as long as {name}"] for line in lines]
        steps, lost = (statistics.mean(other[key] for other in others) for key in ("steps", "psnr"))
        beside = f"{steps:.0f} steps: {lost:.0f} dB"
        measured = statistics.median(speeds)
        yield f"| `speedup={speedup}` | {measured:.1f}× | {in_words(mean)} | {closeness} | {beside} |"


def in_words(psnr: float) -> str:
    """Say how much an image with this PSNR differs."""
    words = looks(psnr)
    # The PSNR is a mean, so some of the images differ more.
    return f"mostly {words}" if words.startswith("hard") else words


def main(
    description: str | None, measure: Callable[[Path, int], None], write: Callable[[Lines], None]
) -> None:
    """Run ``measure`` or ``write`` as the command line says."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("--out", type=Path, required=True)
    measured.add_argument("--prompts", type=int, default=4)
    commands.add_parser("write").add_argument("record", type=Path)
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if options.command == "measure":
        measure(options.out, options.prompts)
    else:
        write(read(options.record))


def read(record: Path) -> Lines:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main(__doc__, measure, write)
