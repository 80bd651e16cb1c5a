"""Does a model draw what it is asked for? Judged by `tokenmerge_tools.demo.retrieval`, not by eye.

python -m tools.training.evaluate tools/src/tokenmerge_tools/demo/emoji-unet --contact-sheet sheet.jpg
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw, ImageFont
from rich.progress import track

from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.demo.retrieval import Gallery
from tokenmerge_tools.pipelines.loading import find_model, load_pipeline

BATCH = 10
COLUMNS = 8
SHEET_SIZE = 48


def generate(
    pipe: DiffusionPipeline,
    prompts: Sequence[str],
    seeds: Sequence[int],
    size: int,
    steps: int,
    guidance: float,
) -> np.ndarray:
    """Generate one image per prompt and seed: uint8 [b, size, size, 3]."""
    pictures = pipe(
        list(prompts),
        height=size,
        width=size,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        output_type="np",
    ).images
    return (pictures * 255).round().astype(np.uint8)


def contact_sheet(pictures: Sequence[np.ndarray], names: Sequence[str]) -> Image.Image:
    """Lay images out in rows, each above its name."""
    size, label = pictures[0].shape[0], 14
    letters = size // 6  # that fit under an image
    rows = -(-len(pictures) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * size, rows * (size + label)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(10)
    for i, (picture, name) in enumerate(zip(pictures, names, strict=True)):
        left, top = i % COLUMNS * size, i // COLUMNS * (size + label)
        sheet.paste(Image.fromarray(picture), (left, top))
        pen.text((left + 2, top + size), name[:letters], fill="black", font=font)
    return sheet


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    prompts: Annotated[int, typer.Option(help="Number of different glyphs asked for.")] = 100,
    seeds: Annotated[int, typer.Option(help="Images per prompt.")] = 4,
    size: Annotated[int, typer.Option(help="Side of the images in pixels.")] = 128,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 20,
    guidance: Annotated[float, typer.Option(help="Guidance scale.")] = 3.0,
    device: Annotated[str, typer.Option(help="Where to generate: cpu, cuda, …")] = "cpu",
    sheet: Annotated[
        Path | None, typer.Option("--contact-sheet", help=f"Write the first {SHEET_SIZE} images here.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure how often glyph and background are the ones asked for."""
    pipe = load_pipeline(find_model(str(model)), torch.float32, torch.device(device))
    pipe.set_progress_bar_config(disable=True)
    glyphs = read_glyphs()
    gallery = Gallery()
    asked = [(*pair, seed) for seed in range(seeds) for pair in choose_prompts(prompts)]
    pictures: list[np.ndarray] = []
    clock = time.perf_counter()
    for start in track(range(0, len(asked), BATCH), "generating"):
        batch = asked[start : start + BATCH]
        texts = [caption(glyphs[glyph].name, background) for glyph, background, _ in batch]
        pictures += list(generate(pipe, texts, [seed for *_, seed in batch], size, steps, guidance))
    seconds = (time.perf_counter() - clock) / len(asked)

    found = [gallery.identify(Image.fromarray(picture)) for picture in pictures]
    misses = [
        (glyphs[glyph].name, glyphs[found_glyph].name)
        for (glyph, _, _), (found_glyph, _) in zip(asked, found, strict=True)
        if glyph != found_glyph
    ]
    backgrounds = np.mean([a[1] == f[1] for a, f in zip(asked, found, strict=True)])
    figures = {
        "pictures": len(asked),
        "size": size,
        "steps": steps,
        "guidance": guidance,
        "glyph_accuracy": round(1 - len(misses) / len(asked), 4),
        "background_accuracy": round(float(backgrounds), 4),
        "seconds_per_picture": round(seconds, 2),
    }
    for name, seen in misses:
        typer.echo(f"asked for {name}, got {seen}")
    typer.echo(json.dumps(figures, indent=2))
    if output:
        output.write_text(json.dumps(figures, indent=2) + "\n")
    if sheet:
        names = [glyphs[glyph].name for glyph, *_ in asked[:SHEET_SIZE]]
        contact_sheet(pictures[:SHEET_SIZE], names).save(sheet, quality=88)


if __name__ == "__main__":
    typer.run(main)
