"""How close and how fast the ways are in which half of the tokens can merge: is `ratio=0.5` the best of them?

The models are the bundled ones, and the hold-out model. No number was fitted on their prompts. Speed is
counted: dense operations over those with merging, in a whole generation. Closeness is the PSNR to the dense
image of the same seed. A setting whose row is in the record is not measured again.

    python -m benchmarks.ratio --out benchmarks/ratio_cpu.jsonl          # all models: about two hours
    python -m benchmarks.ratio emoji-mmdit --out benchmarks/ratio_cpu.jsonl
    python -m benchmarks.ratio --show benchmarks/ratio_cpu.jsonl         # only print the tables
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from benchmarks.holdout.measure import NAMES
from benchmarks.holdout.train import caption as photo_caption
from diffusers import DiffusionPipeline

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig, token_merging
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

HOLD_OUT = Path(__file__).parent / "holdout" / "photo-flux"
# The scales of guidance of each model. That of the hold-out model has no classifier-free guidance.
GUIDANCE = {"emoji-mmdit": (3.0, 7.0), "emoji-unet": (3.0, 7.5), "photo-flux": (3.5,)}
SIZES = {"emoji-mmdit": 128, "emoji-unet": 128, "photo-flux": 256}
STEPS = 20
_NO_RESULT = "–"  # in a cell of the table
SHARED = MergeSharing(blocks=True)
FIRST = Correction(every=10_000)  # the first step alone is dense


def stack(every: Correction = FIRST, **changes: Any) -> dict[str, Any]:
    """Tokens merge once for all blocks."""
    settings = {"features": "model_residual", "proportional": True, "ratio": 0.5, **changes}
    return {
        "config": ToMeConfig(
            scope="block", planner="tiled", merge_sharing=SHARED, correction=every, **settings
        )
    }


def layers(**changes: Any) -> dict[str, Any]:
    """Tokens merge around self-attention."""
    settings = {"proportional": True, **changes}
    return {"config": ToMeConfig(ratio=0.5, planner="tiled", **settings)}


WAYS: dict[str, dict[str, Any]] = {
    "`ratio=0.5`": {"ratio": 0.5},
    "around self-attention": layers(),
    "around self-attention, one plan": layers(merge_sharing=SHARED),
    "around self-attention, one plan, by the residual": layers(
        merge_sharing=SHARED, features="model_residual"
    ),
    "stack, first step dense, the same ratio in all steps": stack(),
    "stack, by the input, not corrected": stack(Correction(), features="input"),
    "stack, not corrected": stack(Correction()),
    "stack, one step in 10 dense": stack(Correction(every=10)),
    "stack, one step in 4 dense": stack(Correction(every=4)),
    "stack, first step dense, not proportional": stack(proportional=False),
    "stack, ratio 0.3, first step dense": stack(ratio=0.3),
    # Beside them, the default method, step reuse alone, and fewer steps.
    "`speedup=2.0`": {"speedup": 2.0},
    "`speedup=2.4`": {"speedup": 2.4},
    "`speedup=2.9`": {"speedup": 2.9},
    "`speedup=3.3`": {"speedup": 3.3},
    "`speedup=4.0`": {"speedup": 4.0},
    "step reuse alone, every 2": {"config": ToMeConfig(ratio=0.0, reuse=StepReuse(every=2))},
    "step reuse alone, every 3": {"config": ToMeConfig(ratio=0.0, reuse=StepReuse(every=3))},
    "10 steps": {"steps": 10},
    "8 steps": {"steps": 8},
}


def load(model: str) -> Any:
    """Load a pipeline that is quiet."""
    pipe = DiffusionPipeline.from_pretrained(HOLD_OUT if model == "photo-flux" else path(model))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def prompts_of(model: str, count: int) -> list[str]:
    """Return prompts that no setting was fitted on; the hold-out model has four."""
    if model == "photo-flux":
        return [photo_caption(name) for name in NAMES]
    glyphs = read_glyphs()
    return [caption(glyphs[i].name, background) for i, background in choose_prompts(count)]


def draw(pipe: Any, prompts: Sequence[str], size: int, guidance: float, steps: int = STEPS) -> np.ndarray:
    """Return the images [prompts, size, size, 3], from 0 to 1, each with its own seed."""
    pictures = [
        pipe(
            prompt,
            height=size,
            width=size,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images
        for seed, prompt in enumerate(prompts)
    ]
    return np.concatenate(pictures)


def decibels(pictures: np.ndarray, dense: np.ndarray) -> list[float]:
    """Return the PSNR to dense of each image, in dB."""
    error = ((pictures - dense) ** 2).mean(axis=(1, 2, 3))
    return [round(float(value), 2) for value in -10 * np.log10(np.maximum(error, 1e-10))]


def rows_of(record: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a record, which may not exist yet."""
    if record is None or not record.exists():
        return []
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def measure(model: str, guidance: float, options: argparse.Namespace) -> None:
    """Measure the ways that the record lacks for one model and scale of guidance."""
    known = {
        row["way"] for row in rows_of(options.out) if (row["model"], row["guidance"]) == (model, guidance)
    }
    missing = {way: given for way, given in WAYS.items() if way not in known}
    if not missing:
        return
    pipe = load(model)
    prompts = prompts_of(model, options.prompts)
    size = SIZES[model]
    dense = draw(pipe, prompts, size, guidance)
    for way, given in missing.items():
        row: dict[str, Any] = {"model": model, "guidance": guidance, "size": size, "steps": STEPS, "way": way}
        try:
            row |= one_way(pipe, given, prompts, size, guidance, dense)
        except ValueError as error:  # such as blocks of a UNet that cannot do this
            row["refused"] = str(error)
        print(shown(row), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def one_way(
    pipe: Any,
    given: Mapping[str, Any],
    prompts: Sequence[str],
    size: int,
    guidance: float,
    dense: np.ndarray,
) -> dict[str, Any]:
    """Return the closeness and the speed-up by operations of one way."""
    if "steps" in given:
        pictures = draw(pipe, prompts, size, guidance, given["steps"])
        return {"psnr": decibels(pictures, dense), "counted": STEPS / given["steps"]}
    with token_merging(pipe, **given) as patch:
        psnr = decibels(draw(pipe, prompts, size, guidance), dense)
        return {"psnr": psnr, "counted": round(patch.report().speedup, 3)}


def shown(row: Mapping[str, Any]) -> str:
    """Return a row of the record as a line."""
    begins = f"{row['model']:<12} guidance {row['guidance']:<4g} {row['way']:<56}"
    if "refused" in row:
        return f"{begins} refused: {row['refused'][:60]}"
    return (
        f"{begins} {row['counted']:.2f}× {statistics.mean(row['psnr']):.1f} dB (worst {min(row['psnr']):.1f})"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: a row for each way, a column for each model and guidance."""
    columns = list(dict.fromkeys((row["model"], row["guidance"]) for row in rows))
    found = {(row["way"], row["model"], row["guidance"]): row for row in rows}
    lines = ["| " + " | ".join(["", *(f"{model}, guidance {scale:g}" for model, scale in columns)]) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for way in WAYS:
        cells = [cell_of(found.get((way, *column))) for column in columns]
        if any(cell != _NO_RESULT for cell in cells):
            lines.append("| " + " | ".join([way, *cells]) + " |")
    return lines


def cell_of(row: Mapping[str, Any] | None) -> str:
    """Return the mean closeness and the speed-up by operations of a row."""
    if row is None or "refused" in row:
        return _NO_RESULT
    return f"{statistics.mean(row['psnr']):.1f} dB at {row['counted']:.2f}×"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*GUIDANCE, []], help="default: all")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--guidance", type=float, help="this scale alone")
    parser.add_argument("--out", type=Path, help="append each row to this file, and measure what it lacks")
    parser.add_argument("--show", type=Path, metavar="RECORD", help="only print the rows of a record")
    parser.add_argument(
        "--table", type=Path, metavar="RECORD", help="only print a record as a Markdown table"
    )
    options = parser.parse_args()
    if options.show is not None:
        print("\n".join(map(shown, rows_of(options.show))))
        return
    if options.table is not None:
        print("\n".join(table(rows_of(options.table))))
        return
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for model in options.models or GUIDANCE:
        for guidance in GUIDANCE[model]:
            if options.guidance in (None, guidance):
                measure(model, guidance, options)


if __name__ == "__main__":
    main()
