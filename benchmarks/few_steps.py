"""Which methods pay in generations of 1, 2, 4 and 8 steps, as with LCM, Lightning, Turbo and Schnell models.

It compares `auto`, merging around layers, keys and whole blocks, step reuse, block caches, and dense with
fewer steps, on both bundled models. A line of the record is one image: PSNR to the dense image of the
same seed and number of steps, and the operations of the denoiser, counted while it ran. With `--time`, the
line has the seconds of the whole pipeline instead, and the methods are interleaved at each prompt. A second
run with the same record continues where the first one stopped. `--table` prints the record as a table.

    python benchmarks/few_steps.py --size 128 --out benchmarks/few_steps_cpu.jsonl
    python benchmarks/few_steps.py --size 256 --prompts 2 --time --out benchmarks/few_steps_cpu.jsonl
    python benchmarks/few_steps.py --table --out benchmarks/few_steps_cpu.jsonl

Distilled models do not run twice for guidance, so guidance 1 represents them. The bundled models are not
distilled: at 1 and 2 steps their images are blurred, and only the closeness to dense is meaningful.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import diffusers
import torch
from closeness import psnr
from diffusers import DiffusionPipeline

from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.pipelines.counting import counting
from tokenmerge_tools.pipelines.loading import denoiser_name, twin
from tokenmerge_tools.variants.variant import VARIANTS, parse_variant

MODELS = ("emoji-unet", "emoji-mmdit")
STEPS = (1, 2, 4, 8)
GUIDANCE = (1.0, 3.0)
DENSE = "dense"
EQUAL = 100.0  # dB of an image that equals dense in every pixel
_TILED = "tome:planner=tiled,proportional,max_downsample=8"
_KEYS = "tome:scope=keys,proportional,max_downsample=8"
# Name in the record and the table → variant as a user would type it.
METHODS: Mapping[str, str] = {
    **{f"auto {speedup:g}": f"auto:speedup={speedup:g}" for speedup in (1.5, 2.0, 3.0)},
    **{f"layers {ratio:g}": f"{_TILED},ratio={ratio:g}" for ratio in (0.25, 0.5, 0.75)},
    **{f"blocks {ratio:g}": f"{_TILED},scope=block,ratio={ratio:g}" for ratio in (0.25, 0.5, 0.75)},
    **{f"keys {ratio:g}": f"{_KEYS},ratio={ratio:g}" for ratio in (0.5, 0.75)},
    "finest level 0.5": "tome:planner=tiled,proportional,ratio=0.5",
    "step reuse 2": "tome:ratio=0,max_downsample=8,reuse.every=2",
    "DeepCache 2": "deepcache:interval=2",
    "cache-dit 0.2": "cache-dit:threshold=0.2",
}
# The time of these methods is measured too. The others have only operations.
TIMED = ("auto 1.5", "auto 2", "layers 0.5", "blocks 0.5", "blocks 0.75")
OF_ONE_MODEL = {
    **dict.fromkeys(("keys 0.5", "keys 0.75", "finest level 0.5", "DeepCache 2"), "emoji-unet"),
    "cache-dit 0.2": "emoji-mmdit",
}
FROM_2_STEPS = ("step reuse 2", "DeepCache 2", "cache-dit 0.2")  # at 1 step, nothing can be reused


def fewer_steps(steps: int) -> list[int]:
    """Return the numbers of dense steps that a generation is compared with.

    >>> fewer_steps(8), fewer_steps(1)
    ([7, 6, 5, 4], [])
    """
    return list(range(steps - 1, max(steps // 2, 1) - 1, -1)) if steps > 1 else []


def methods(model: str, steps: int, timed: bool) -> Iterator[tuple[str, str | None, int]]:
    """Yield the name in the record, the variant and the number of steps, dense first."""
    yield DENSE, None, steps
    for name, text in METHODS.items():
        if OF_ONE_MODEL.get(name, model) == model and not (steps == 1 and name in FROM_2_STEPS):
            kind = VARIANTS.get(text.partition(":")[0])
            if kind and kind.missing() is None and (not timed or name in TIMED):
                yield name, text, steps
    for number in fewer_steps(steps):
        yield dense_name(number), None, number


def dense_name(steps: int) -> str:
    return f"dense, {steps_in_words(steps)}"


def steps_in_words(steps: int) -> str:
    return f"{steps} steps" if steps > 1 else f"{steps} step"


@contextlib.contextmanager
def applied(pipe: DiffusionPipeline, text: str | None) -> Iterator[DiffusionPipeline]:
    """Yield a copy of the pipeline with a variant applied."""
    copied = twin(pipe)
    with contextlib.ExitStack() as in_force:
        if text is not None:
            (spec,) = parse_variant(text, [0.5])
            in_force.enter_context(spec.apply(copied, spec.config(copied)))
        yield copied


def draw(
    pipe: DiffusionPipeline, row: Mapping[str, Any], steps: int, timed: bool
) -> tuple[Any, dict[str, Any]]:
    """Draw the image of a row: ``[1, size, size, 3]``, and its cost."""

    def call() -> Any:
        return pipe(
            row["prompt"],
            height=row["size"],
            width=row["size"],
            num_inference_steps=steps,
            guidance_scale=row["guidance"],
            generator=torch.Generator().manual_seed(row["seed"]),
            output_type="np",
        ).images

    if timed:
        start = time.perf_counter()
        image = call()
        return image, {"seconds": round(time.perf_counter() - start, 3)}
    with counting(getattr(pipe, denoiser_name(pipe))) as counted:
        image = call()
    return image, {"flops": counted.flops}


def run(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    glyphs = read_glyphs()
    chosen = choose_prompts(options.prompts, seed=23)
    prompts = [caption(glyphs[i].name, background) for i, background in chosen]
    done = {key(line) for line in read(options.out)}
    for model in options.model:
        pipe = DiffusionPipeline.from_pretrained(path(model))
        pipe.set_progress_bar_config(disable=True)
        for number, prompt in enumerate(prompts):
            for size in options.size:
                for steps in options.steps:
                    for scale in options.guidance:
                        row = {"model": model, "size": size, "steps": steps, "guidance": scale}
                        row |= {
                            "prompt": prompt,
                            "seed": 7000 + number,
                            "cost": "seconds" if options.time else "flops",
                        }
                        draw_row(pipe, row, options, done)


def draw_row(
    pipe: DiffusionPipeline, row: dict[str, Any], options: argparse.Namespace, done: set[Any]
) -> None:
    """Draw the missing images of one prompt, and write a line for each."""
    found = list(methods(row["model"], row["steps"], options.time))
    missing = [one for one in found if key({**row, "method": one[0]}) not in done]
    if not missing:
        return
    if options.time:  # draw all methods again, so that they are interleaved
        missing = found
        if row["steps"] == min(options.steps):  # the first calls load kernels
            for _, text, _ in found:
                with applied(pipe, text) as patched:
                    draw(patched, row, row["steps"], timed=True)
    dense = None
    for name, text, steps in dict.fromkeys([found[0], *missing]):
        with applied(pipe, text) as patched:
            image, cost = draw(patched, row, steps, options.time)
        dense = image if dense is None else dense
        close = None if name == DENSE else min(round(psnr(image, dense)[0], 3), EQUAL)
        line = {**row, "method": name, "used": steps, "psnr": close, **cost}
        with options.out.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        print({k: line[k] for k in ("model", "size", "steps", "guidance", "method", "psnr")}, flush=True)


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("model", "size", "steps", "guidance", "prompt", "cost", "method"))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table for each model and size: a row per method, a column per steps and guidance."""
    latest = {key(line): line for line in lines}
    for (model, size), group in groupby(sorted(latest.values(), key=_place), key=_place):
        rows: dict[str, dict[tuple[int, float], list[dict[str, Any]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for line in group:
            dense = latest.get(key({**line, "method": DENSE}))
            if line["method"] != DENSE and dense is not None:
                speed = dense[line["cost"]] / line[line["cost"]]
                rows[line["method"]][line["steps"], line["guidance"]].append({**line, "speed": speed})
        heads = sorted(set().union(*rows.values()), key=lambda head: (head[1], head[0]))
        yield f"{model}, {size} × {size} pixels:\n"
        named = [f"{steps_in_words(steps)}, guidance {scale:g}" for steps, scale in heads]
        yield f"| | {' | '.join(named)} |"
        yield "|---|" + "---|" * len(heads)
        order = [*METHODS, *map(dense_name, range(7, 0, -1))]
        for name in filter(rows.__contains__, order):  # the record has former methods too
            yield f"| {name} | {' | '.join(_cell(rows[name].get(head, [])) for head in heads)} |"
        yield ""


def _place(line: Mapping[str, Any]) -> tuple[str, int]:
    return line["model"], line["size"]


def _cell(lines: list[dict[str, Any]]) -> str:
    """Write the mean closeness, and the median speed-ups in operations and in time that were measured."""
    if not lines:
        return ""
    close = statistics.mean(line["psnr"] for line in lines)
    parts = ["equal" if close >= EQUAL else f"{close:.1f} dB"]
    for cost, word in (("flops", "counted"), ("seconds", "timed")):
        speeds = [line["speed"] for line in lines if line["cost"] == cost]
        if speeds:
            parts.append(f"{statistics.median(speeds):.2f}× {word}")
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--size", type=int, nargs="+", default=[128, 256], help="pixels (default: 128 256)")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--guidance", type=float, nargs="+", default=GUIDANCE)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--time", action="store_true", help="measure seconds instead of operations")
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if not options.table:
        run(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
