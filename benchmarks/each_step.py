"""What each denoising step contributes to the loss: images in which one step alone merges or skips a part.

For each step, `emoji-unet` draws with all other steps dense, and in that step alone merges tokens, skips its
deep stages, or skips its finest level too. A line of the record is the mean squared error of one image to
the dense image of the same seed. Where errors of single steps are small, they add up, so their sizes say
which steps to spare. A second run with the same record continues where the first one stopped. `--table`
prints the record as a table.

    python benchmarks/each_step.py --guidance 3 7.5 --out benchmarks/each_step_cpu.jsonl
    python benchmarks/each_step.py --table --out benchmarks/each_step_cpu.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from closeness import load
from diffusers import StableDiffusionPipeline

from tokenmerge import MergeSharing, StepReuse, ToMeConfig, token_merging
from tokenmerge.config import dense_outside
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

SEED = 7000
FIRST = 2  # an extrapolation needs two steps before it
MERGED = "merged"
DEEP = "without deep stages"
BOTH = "without finest level"
RATIO = 0.65


def configs(step: int, steps: int) -> Iterator[tuple[str, ToMeConfig]]:
    """Return settings that change one step alone, by what they do in it."""
    places = tuple(i / (steps - 1) for i in range(steps))
    others = places[:step] + places[step + 1 :]
    yield (
        MERGED,
        ToMeConfig(
            ratio=RATIO,
            sx=4,
            planner="tiled",
            proportional=True,
            merge_sharing=MergeSharing(blocks=True),
            rules=dense_outside(step / steps, (step + 1) / steps),
        ),
    )
    for what, shallow in ((DEEP, (places[step],)), (BOTH, ())):
        yield what, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=others, shallow_steps=shallow))


def draw(pipe: StableDiffusionPipeline, row: Mapping[str, Any]) -> Any:
    return pipe(
        row["prompt"],
        height=row["size"],
        width=row["size"],
        num_inference_steps=row["steps"],
        guidance_scale=row["guidance"],
        generator=torch.Generator().manual_seed(row["seed"]),
        output_type="np",
    ).images


def run(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    pipe = load()
    glyphs = read_glyphs()
    chosen = choose_prompts(options.prompts, seed=23)
    prompts = [caption(glyphs[i].name, background) for i, background in chosen]
    done = {key(line) for line in read(options.out)}
    for scale in options.guidance:
        for number, prompt in enumerate(prompts):
            row = {"size": options.size, "steps": options.steps, "guidance": scale}
            row |= {"prompt": prompt, "seed": SEED + number}
            dense = None
            for step in range(FIRST, options.steps):
                for what, config in configs(step, options.steps):
                    line = {**row, "step": step, "what": what}
                    if key(line) in done:
                        continue
                    dense = draw(pipe, row) if dense is None else dense
                    with token_merging(pipe, config):
                        error = float(((draw(pipe, row) - dense) ** 2).mean())
                    write(options.out, {**line, "error": error})
                    print(f"guidance {scale:g}, step {step}, {what}: {error:.1e}", flush=True)


def key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("size", "steps", "guidance", "prompt", "step", "what"))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table with a row for each step: the mean error over the prompts, in millionths."""
    found: dict[int, dict[tuple[float, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[line["step"]][line["guidance"], line["what"]].append(line["error"])
    order = {MERGED: 0, DEEP: 1, BOTH: 2}
    columns = sorted(set().union(*found.values()), key=lambda column: (column[0], order[column[1]]))
    yield f"| step | {' | '.join(f'guidance {scale:g}, {what}' for scale, what in columns)} |"
    yield f"|---:|{'---:|' * len(columns)}"
    for step, row in sorted(found.items()):
        means = {column: f"{1e6 * statistics.mean(errors):.1f}" for column, errors in row.items()}
        cells = [means.get(column, "") for column in columns]
        yield f"| {step + 1} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=256, help="pixels (default: 256, 4096 tokens)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0, 7.5])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    parser.add_argument("--table", action="store_true", help="print the record as a table, and draw nothing")
    options = parser.parse_args()
    if not options.table:
        run(options)
    print(*table(read(options.out)), sep="\n")


if __name__ == "__main__":
    main()
