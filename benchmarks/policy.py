"""The policy of the default method: measure what its choices lose, fit the table, compare with another.

`measure` draws pictures of both bundled models with step reuse alone, with token merging alone and with a few
mixes. A line of the record is one picture: its settings, and its mean squared error to the dense picture of
the same seed. A second run with the same record continues where the first one stopped.

    python benchmarks/policy.py measure --out benchmarks/policy_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from solvers import scheduler

from tokenmerge import ToMeConfig, token_merging
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs

Settings = Mapping[str, Any]
# Prompts and seeds that the policy is fitted on: choose_prompts(…, seed=PROMPTS), SEED + number.
PROMPTS, SEED = 42, 8000
BASE: Settings = {
    "planner": "tiled",
    "proportional": True,
    "plans.blocks": True,
    "max_downsample": 8,
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """Pictures to draw: a model, a size in pixels, steps, a solver, a guidance scale, and a prompt."""

    model: str
    size: int
    steps: int
    solver: str
    guidance: float
    prompt: str
    seed: int


def reuse(steps: int, complete: int, finest: int | None = None) -> dict[str, Any]:
    """Return settings with these numbers of complete steps, and of steps with the finest level."""
    every = {"reuse.every": distance(steps, complete)}
    return every if finest is None else {**every, "reuse.shallow_every": distance(steps, finest)}


def distance(steps: int, complete: int) -> float:
    """Return the mean distance of evenly spaced steps, of which there are `complete`."""
    return 1 if complete >= steps else int(1000 * (steps - 2) / (complete - 2)) / 1000


def merging(ratio: float, **more: Any) -> dict[str, Any]:
    return {"ratio": ratio, **{name.replace("__", "."): value for name, value in more.items()}}


NONE = merging(0)


def of_unet(steps: int) -> Iterator[Settings]:
    """Step reuse alone."""
    counts = {
        20: [(15, 20), (10, 20), (8, 20), (6, 20), (4, 20), (10, 10), (6, 10), (6, 15), (4, 8)],
        8: [(6, 8), (4, 8), (3, 8), (6, 6), (4, 6), (4, 4)],
        4: [(3, 4), (3, 3)],
    }
    for complete, finest in counts[steps]:
        yield {**NONE, **reuse(steps, complete, None if finest == steps else finest)}


def of_transformer(steps: int) -> Iterator[Settings]:
    for complete in {20: (15, 12, 10, 8, 6), 8: (6, 5, 4, 3), 4: (3,)}[steps]:
        yield {**NONE, **reuse(steps, complete)}


def merging_in_unet(steps: int) -> Iterator[Settings]:
    yield merging(0.5)
    yield merging(0.75)
    yield merging(0.5, sx=4)
    yield merging(0.75, sx=4)
    yield merging(0.5, correction__every=2)
    yield merging(0.5, correction__every=4)
    yield merging(0.3)
    yield merging(0.5) | reuse(steps, 8)
    yield {**NONE, **reuse(steps, 8)}
    yield merging(0.5, sx=4) | reuse(steps, 8)
    yield merging(0.3, scope="block")
    yield merging(0.5) | reuse(steps, 8, 11)


def merging_in_transformer(steps: int) -> Iterator[Settings]:
    yield merging(0.5, scope="block")
    yield merging(0.25, scope="block")
    yield merging(0.5)
    yield merging(0.5, scope="block", correction__every=4)
    yield merging(0.5, scope="block", features="model_residual")
    yield merging(0.75, scope="block")
    yield merging(0.5, scope="block", correction__every=2)
    yield {**NONE, **reuse(steps, round(0.6 * steps))}
    yield merging(0.5, scope="block") | reuse(steps, round(0.6 * steps))


UNET, TRANSFORMER = "emoji-unet", "emoji-mmdit"
STRONG = {UNET: 7.5, TRANSFORMER: 7.0}


def scenes() -> Iterator[tuple[Scene, list[Settings]]]:
    """Yield the scenes of the record, each with its settings: the cheapest first, then further prompts."""
    reused, merged = (UNET, of_unet), (UNET, merging_in_unet)
    blocks, whole = (TRANSFORMER, of_transformer), (TRANSFORMER, merging_in_transformer)
    order: list[tuple[tuple[str, Any], int, int, str, int, tuple[str, ...]]] = []
    for number in range(3):
        order += [(reused, 128, 20, solver, number, ("weak", "strong")) for solver in ("DPM++ 2M", "Euler")]
        order += [(reused, 128, steps, "DPM++ 2M", number, ("weak", "strong")) for steps in (8, 4)]
        order += [(blocks, 128, steps, "flow Euler", number, ("weak", "strong")) for steps in (20, 8, 4)]
        order += [(whole, 128, 20, "flow Euler", number, ("strong", "weak"))]
        order += [(merged, 256, 20, "DPM++ 2M", number, ("strong", "weak"))]
        order += [(whole, 256, 20, "flow Euler", number, ("strong", "weak")[: 2 - number])]
    prompts = prompts_of(PROMPTS, 3)
    for (model, settings), size, steps, solver, number, strengths in order:
        for strength in strengths:
            guidance = STRONG[model] if strength == "strong" else 3.0
            prompt = prompts[number]
            yield Scene(model, size, steps, solver, guidance, prompt, SEED + number), list(settings(steps))


def prompts_of(seed: int, count: int) -> list[str]:
    chosen = choose_prompts(count, seed=seed)
    return [caption(read_glyphs()[i].name, background) for i, background in chosen]


class Artist:
    """Draws scenes, with the dense picture of the last one in memory."""

    def __init__(self) -> None:
        self._pipes: dict[str, tuple[DiffusionPipeline, dict[str, Any]]] = {}
        self._dense: tuple[Scene, Any] | None = None

    def pipe(self, model: str, solver: str) -> DiffusionPipeline:
        """Return the pipeline of a bundled model with this solver."""
        if model not in self._pipes:
            made = DiffusionPipeline.from_pretrained(path(model))
            made.set_progress_bar_config(disable=True)
            self._pipes[model] = made, dict(made.scheduler.config)
        pipe, own = self._pipes[model]
        pipe.scheduler = scheduler(pipe, own, solver)
        return pipe

    def draw(self, scene: Scene, config: ToMeConfig | None = None, steps: int | None = None) -> Any:
        """Draw a picture [h, w, 3]; None: the dense one."""
        pipe = self.pipe(scene.model, scene.solver)

        def call() -> Any:
            return pipe(
                scene.prompt,
                height=scene.size,
                width=scene.size,
                num_inference_steps=steps or scene.steps,
                guidance_scale=scene.guidance,
                generator=torch.Generator().manual_seed(scene.seed),
                output_type="np",
            ).images[0]

        if config is None:
            return call()
        with token_merging(pipe, config):
            return call()

    def error(self, scene: Scene, config: ToMeConfig | None, steps: int | None = None) -> float:
        """Return the mean squared error of a picture to the dense one."""
        if self._dense is None or self._dense[0] != scene:
            self._dense = scene, self.draw(scene)
        return float(((self.draw(scene, config, steps) - self._dense[1]) ** 2).mean())


def measure(options: argparse.Namespace) -> None:
    """Draw the pictures that are not in the record."""
    artist, done = Artist(), {key(line) for line in read(options.out)}
    for scene, settings in scenes():
        for one in settings:
            line = {**dataclasses.asdict(scene), "settings": one}
            if key(line) not in done:
                start = time.process_time()
                error = artist.error(scene, ToMeConfig.from_dict({**BASE, **one}))
                write(options.out, {**line, "error": error})
                print(scene, one, f"{error:.2e} {time.process_time() - start:.1f} s", flush=True)


def key(line: Mapping[str, Any]) -> str:
    return json.dumps({name: line[name] for name in (*FIELDS, "settings")}, sort_keys=True)


FIELDS = tuple(field.name for field in dataclasses.fields(Scene))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure",))
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per picture")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    {"measure": measure}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
