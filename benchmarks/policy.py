"""The policy of the default method: measure what its choices lose, and fit the table.

`measure` draws images of both bundled models with step reuse alone and with token merging alone. A line of
the record is one image: its settings, and its mean squared error to the dense image of the same seed. A
second run with the same record continues where the first one stopped. Lines with the scheduler `own` are from
`tokenmerge evaluate`, and have the mean over its prompts. `fit` writes the expected errors into the policy,
and leaves its other numbers as they are: the scale from which guidance is strong; the size of a grid below
which merging loses more than skipping (few_steps_cpu.jsonl); how many times more it loses without
proportional attention (settings_cpu.jsonl). `policy_check.py` tries the policy on other prompts.

    python benchmarks/policy.py measure --out benchmarks/policy_cpu.jsonl
    python benchmarks/policy.py fit --out benchmarks/policy_cpu.jsonl

`--stacks` draws stacks of blocks of a transformer, at several ratios and with more or fewer dense steps, also
beside step reuse. `fit` needs this record too. `table` prints how close stacks alone are.

    python benchmarks/policy.py measure --stacks --out benchmarks/stacks_cpu.jsonl
    python benchmarks/policy.py table --out benchmarks/stacks_cpu.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
from diffusers import DiffusionPipeline
from solvers import scheduler

from tokenmerge import ToMeConfig
from tokenmerge.api import merge_in_hosts
from tokenmerge.plans import policy
from tokenmerge.plans.choose import distance, reaches_of, without_the_last
from tokenmerge.plans.falling import falling, width_of_cells
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.records.kinds import with_new_names

Settings = Mapping[str, Any]
# What says whether, and by which noise levels, a full step makes good what forecasts missed.
MAKES_GOOD = "tokenmerge.runtime.patching.call_context._sigmas_to_make_good"
# Prompts and seeds that the policy is fitted on: choose_prompts(…, seed=PROMPTS), SEED + number.
PROMPTS = 42
SEED = 8000
BASE: Settings = {
    "planner": "tiled",
    "proportional": True,
    "merge_sharing.blocks": True,
    "max_downsample": 8,
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """Images to draw: a model, a size in pixels, steps, a scheduler, a guidance scale, and a prompt."""

    model: str
    size: int
    steps: int
    solver: str
    guidance: float
    prompt: str
    seed: int


def reuse(steps: int, full_steps: int, finest: int | None = None) -> dict[str, Any]:
    """Return settings with these numbers of full steps, and of steps with the finest level."""
    every = {"reuse.every": distance(steps, full_steps)}
    return every if finest is None else {**every, "reuse.shallow_every": distance(steps, finest)}


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
    for full_steps, finest in counts[steps]:
        yield {**NONE, **reuse(steps, full_steps, None if finest == steps else finest)}


def of_transformer(steps: int) -> Iterator[Settings]:
    for full_steps in {20: (15, 12, 10, 8, 6), 8: (6, 5, 4, 3), 4: (3,)}[steps]:
        yield {**NONE, **reuse(steps, full_steps)}


def placed(steps: int) -> Iterator[Settings]:
    """Step reuse alone, with the full steps where the default method has them after a clean end."""
    for full_steps in {20: (17, 15, 12, 10, 8, 6), 8: (6, 5, 4, 3)}[steps]:
        yield {**NONE, **at_places(steps, full_steps)}


def at_places(steps: int, full_steps: int) -> dict[str, Any]:
    """Return settings with this number of full steps, as the default method has them after a clean end."""
    full = without_the_last(steps, full_steps, policy.TAIL_OF_A_CLEAN_END)
    return {"reuse.full_steps": [step / (steps - 1) for step in full]}


def merging_in_unet(steps: int) -> Iterator[Settings]:
    yield fine(0.5)
    yield fine(0.5, correction__every=2)
    yield fine(0.5, sx=4)
    yield fine(0.75, sx=4)
    yield fine(0.5, correction__every=4)
    yield fine(0.25)
    yield fine(0.25, correction__every=2)
    yield fine(0.5, correction__every=8)


def fine(ratio: float, **more: Any) -> dict[str, Any]:
    """Merge at the finest level alone."""
    return merging(ratio, max_downsample=1, **more)


def both_in_unet(steps: int) -> Iterator[Settings]:
    yield {**NONE, **reuse(steps, 8)}
    yield {**NONE, **reuse(steps, 11)}
    yield fine(0.5)
    yield {**NONE, **reuse(steps, 8, 13)}
    yield fine(0.3) | reuse(steps, 8)
    yield fine(0.5) | reuse(steps, 14)


def merging_in_transformer(steps: int) -> Iterator[Settings]:
    by_residual = {"features": "model_residual"}
    yield merging(0.5)
    yield merging(0.5, scope="block")
    yield merging(0.5, scope="block", correction__every=4)
    yield from (merging(ratio, scope="block", **by_residual) for ratio in (0.5, 0.25, 0.75))
    yield merging(0.5, **by_residual)
    yield from (merging(0.5, scope="block", **by_residual, correction__every=every) for every in (2, 4))
    yield merging(0.25, scope="block", **by_residual, correction__every=2)
    yield merging(0.5, scope="block", **by_residual, correction__every=8)
    yield from (merging(0.5, **by_residual, correction__every=every) for every in (2, 4, 8))


# Ratio, scope, distance of corrections, full steps.
MIXED = ((0.2, "layers", 4, 12), (0.2, "layers", 2, 12), (0.3, "block", 4, 15), (0.3, "layers", 8, 12))


def both_in_transformer(steps: int) -> Iterator[Settings]:
    for every in (0, 2, 4, 10, 20):
        yield merging(0.4, scope="block", features="model_residual", correction__every=every)
    for ratio, scope in ((0.4, "layers"), (0.2, "layers"), (0.2, "block")):
        yield merging(ratio, scope=scope, features="model_residual", correction__every=4)
    for full_steps in (15, 12, 10, 8):
        yield {**NONE, **reuse(steps, full_steps)}
    for ratio, scope, every, full_steps in MIXED:
        merged = merging(ratio, scope=scope, features="model_residual", correction__every=every)
        yield merged | reuse(steps, full_steps)


def stacks(steps: int) -> Iterator[Settings]:
    """Whole blocks that merge once, with the first step dense, or one step in 4."""
    for ratio, every in itertools.product(STACK_RATIOS, {20: (20, 4), 8: (8, 4), 4: (4,)}[steps]):
        yield stack(ratio, every)


def stacks_and_reuse(steps: int) -> Iterator[Settings]:
    """Stacks alone, step reuse alone, and both."""
    yield from stacks(steps)
    for full_steps in {20: (17, 15, 12, 10, 8, 6), 8: (7, 6, 5, 4, 3), 4: (3,)}[steps]:
        yield {**NONE, **at_places(steps, full_steps)}
    both = {20: (15, 10, 8), 8: (7, 6, 5), 4: (3,)}[steps]
    for ratio, full_steps in itertools.product((0.2, 0.4), both):
        yield stack(ratio, 4) | at_places(steps, full_steps)


def stack(ratio: float, every: int) -> dict[str, Any]:
    """Merge whole blocks once, with one step in ``every`` on all tokens, and a ratio that falls."""
    settings = merging(ratio, scope="block", features="model_residual", correction__every=every)
    settings["sx"] = width_of_cells(ratio)
    return falling(ToMeConfig.from_dict(settings)).changed()


def merging_in_few_steps(steps: int) -> Iterator[Settings]:
    by_residual = {"features": "model_residual"}
    yield merging(0.4, **by_residual)
    yield merging(0.4, scope="block", correction__every=4, **by_residual)
    yield merging(0.6, **by_residual)
    yield merging(0.25, **by_residual)
    yield merging(0.4, scope="block", **by_residual)
    yield merging(0.4, correction__every=4, **by_residual)


STACK_RATIOS = (0.1, 0.2, 0.35, 0.5, 0.65)
POLICY = Path(policy.__file__).with_name("policy.json")
UNET = "emoji-unet"
TRANSFORMER = "emoji-mmdit"
PHOTOGRAPHS = "photo-flux"
STRONG = {UNET: 7.5, TRANSFORMER: 7.0}
PIXELS = {UNET: 4, TRANSFORMER: 4, PHOTOGRAPHS: 8}  # per side of a token
# Photographs that holdout/measure.py does not draw.
CAPTIONS = ("a photograph of a motorcycle", "a photograph of an astronaut")


def scenes() -> Iterator[tuple[Scene, list[Settings]]]:
    """Yield the scenes of the record, each with its settings: the cheapest first, then further prompts."""
    reused = (UNET, of_unet)
    merged = (UNET, merging_in_unet)
    mixed = (UNET, both_in_unet)
    blocks = (TRANSFORMER, of_transformer)
    whole = (TRANSFORMER, merging_in_transformer)
    few = (TRANSFORMER, merging_in_few_steps)
    either = (TRANSFORMER, both_in_transformer)
    order: list[tuple[tuple[str, Any], int, int, str, int, tuple[str, ...]]] = []
    both = "weak", "strong"
    for number in range(2):
        order += [(reused, 128, 20, solver, number, both) for solver in ("DPM++ 2M", "Euler")]
        order += [(reused, 128, 20, solver, number, ("strong",)) for solver in ("Euler ancestral", "UniPC")]
        order += [(reused, 128, steps, "DPM++ 2M", number, both) for steps in (8, 4)]
        order += [(blocks, 128, steps, "flow Euler", number, both) for steps in (20, 8, 4)]
        order += [(merged, 192, 8, "DPM++ 2M", number, ("weak", "strong"))]
        order += [(mixed, 192, 20, "DPM++ 2M", number, ("strong",))]
        order += [(whole, 192, 8, "flow Euler", number, ("strong", "weak"))]
    order += [(few, 192, 4, "flow Euler", 0, ("strong",))]
    order += [(either, 192, 20, "flow Euler", number, both) for number in range(2)]
    clean = TRANSFORMER, placed
    for size, steps in ((128, 20), (128, 8), (192, 20)):
        order += [(clean, size, steps, "flow Euler", number, both) for number in range(2)]
    prompts = prompts_of(PROMPTS, 2)
    for (model, settings), size, steps, solver, number, strengths in order:
        for strength in strengths:
            guidance = STRONG[model] if strength == "strong" else 3.0
            prompt = prompts[number]
            yield Scene(model, size, steps, solver, guidance, prompt, SEED + number), list(settings(steps))
    for number, prompt in enumerate(CAPTIONS):
        scene = Scene(PHOTOGRAPHS, 512, 20, "flow Euler", 1.0, prompt, SEED + number)
        yield scene, list(both_in_transformer(20))


def scenes_of_stacks() -> Iterator[tuple[Scene, list[Settings]]]:
    """Yield scenes of both transformers, each with the settings of its stack of blocks."""
    prompts = prompts_of(PROMPTS, 2)
    # Twenty steps at 256 pixels take as long as all others, so they have one prompt.
    for size, steps, count in ((128, 20, 2), (256, 8, 2), (256, 4, 2), (128, 8, 2), (256, 20, 1)):
        for number, guidance in itertools.product(range(count), (3.0, STRONG[TRANSFORMER])):
            scene = Scene(TRANSFORMER, size, steps, "flow Euler", guidance, prompts[number], SEED + number)
            yield scene, list(stacks_and_reuse(steps))
    for steps, (number, prompt) in itertools.product((20, 8), enumerate(CAPTIONS)):
        scene = Scene(PHOTOGRAPHS, 256, steps, "flow Euler", 1.0, prompt, SEED + number)
        yield scene, list(stacks_and_reuse(steps))


def prompts_of(seed: int, count: int) -> list[str]:
    chosen = choose_prompts(count, seed=seed)
    return [caption(read_glyphs()[i].name, background) for i, background in chosen]


class Artist:
    """Draws scenes, with the dense image of the last one in memory."""

    def __init__(self) -> None:
        self._pipes: dict[str, tuple[DiffusionPipeline, dict[str, Any]]] = {}
        self._dense: tuple[Scene, Any] | None = None

    def pipe(self, model: str, solver: str) -> DiffusionPipeline:
        """Return the pipeline of a bundled model with this scheduler."""
        if model not in self._pipes:
            folder = Path(__file__).parent / "holdout" / model if model == PHOTOGRAPHS else path(model)
            made = DiffusionPipeline.from_pretrained(folder)
            made.set_progress_bar_config(disable=True)
            self._pipes[model] = made, dict(made.scheduler.config)
        pipe, own = self._pipes[model]
        pipe.scheduler = scheduler(pipe, own, solver)
        return pipe

    def draw(self, scene: Scene, config: ToMeConfig | None = None, steps: int | None = None) -> Any:
        """Draw an image [h, w, 3]; None: the dense one."""
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
        patch = merge_in_hosts(pipe, config, method="", check_size=False)  # the default size has few tokens
        try:
            return call()
        finally:
            patch.remove()

    def error(self, scene: Scene, config: ToMeConfig | None, steps: int | None = None) -> float:
        """Return the mean squared error of an image to the dense one."""
        if self._dense is None or self._dense[0] != scene:
            self._dense = scene, self.draw(scene)
        return float(((self.draw(scene, config, steps) - self._dense[1]) ** 2).mean())


def as_forecast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which nothing makes good what forecasts missed.

    The policy has the errors of forecasts, and in a number of its own how much of them is left after that.
    """
    return mock.patch(MAKES_GOOD, return_value=None)


def measure(options: argparse.Namespace) -> None:
    """Draw the images that are not in the record."""
    artist = Artist()
    done = {key(line) for line in read(options.out)}
    for scene, settings in scenes_of_stacks() if options.stacks else scenes():
        for one in settings:
            line = {**dataclasses.asdict(scene), "settings": one}
            if key(line) not in done:
                start = time.process_time()
                with as_forecast():
                    error = artist.error(scene, ToMeConfig.from_dict({**BASE, **one}))
                write(options.out, {**line, "error": error})
                print(scene, one, f"{error:.2e} {time.process_time() - start:.1f} s", flush=True)


def table(options: argparse.Namespace) -> None:
    """Print how close stacks of blocks alone are, at 128 pixels in 20 steps."""
    print("\n".join(table_of_stacks(read(options.out))))


def table_of_stacks(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: a row for each ratio and each distance of dense steps."""
    found: dict[tuple[float, int, float], list[float]] = {}
    for line in lines:
        settings = line["settings"]
        if (line["size"], line["steps"]) != (128, 20) or "correction.every" not in settings:
            continue
        if "reuse.full_steps" in settings:
            continue
        place = settings["ratio"], settings["correction.every"], line["guidance"]
        found.setdefault(place, []).append(decibels(line["error"]))
    scales = sorted({scale for _, _, scale in found})
    rows = ["| ratio | steps on all tokens | " + " | ".join(f"guidance {scale:g}" for scale in scales) + " |"]
    rows.append("|---:|---|" + "---:|" * len(scales))
    places = {(ratio, every) for ratio, every, _ in found}
    for ratio, every in sorted(places, key=lambda place: (place[0], -place[1])):
        cells = [f"{statistics.mean(found[ratio, every, scale]):.1f} dB" for scale in scales]
        dense = f"one in {every}" if every < 20 else "the first"
        rows.append(f"| {ratio:g} | {dense} | {' | '.join(cells)} |")
    return rows


def fit(options: argparse.Namespace) -> None:
    """Fit the expected errors of each class of model and strength of guidance, and write the table."""
    lines = read(options.out) + read(STACKS)
    table: dict[str, Any] = json.loads(options.policy.read_text(encoding="utf-8"))
    records = {"unet": [options.out], "transformer": [options.out, STACKS]}
    for name, models in (("unet", (UNET,)), ("transformer", (TRANSFORMER, PHOTOGRAPHS))):
        own = [line for line in lines if line["model"] in models and is_as_chosen(line)]
        table[name] = {"record": " and ".join(f"benchmarks/{record.name}" for record in records[name])}
        for strength in ("weak", "strong"):
            chosen = [line for line in own if (line["guidance"] >= 5) == (strength == "strong")]
            coherent = (name, strength) == COHERENT
            table[name][strength] = fitted(name, chosen, coherent)
            if coherent:
                table[name][strength]["skipped steps err"] = "in one direction"
            if (name, strength) == UNCORRECTED:
                table[name][strength]["corrected"] = None
    options.policy.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


def is_as_chosen(line: Mapping[str, Any]) -> bool:
    """Return whether tokens merge as they do under the policy, and the image is the same but for details."""
    settings = line["settings"]
    if (line["model"], line["steps"]) == NOT_FITTED:
        return False
    features = "input" if line["model"] == UNET else "model_residual"
    if line["error"] > FARTHEST[line["model"]]:
        return False
    return not settings["ratio"] or settings.get("features", "input") == features


# Starting values of the fit, by what they belong to: size at 1 and growth.
SKIP = {"unet": {"deep": (1e-5, 2.0), "finest": (1e-4, 1.0)}, "transformer": {"blocks": (1e-4, 2.0)}}
# In the record of transformers, whole blocks lose as much as attention does.
MERGE = {"unet": "layers", "transformer": "block"}
# An image farther than 20 dB shows something else. How far says little, and would hide how fast errors of
# skipped steps grow. Without the 6 images of a UNet, its finest level would be expected to lose too little.
FARTHEST = {UNET: math.inf, TRANSFORMER: 0.01, PHOTOGRAPHS: 0.01}
# In 8 steps the two transformers disagree: with 5 full steps, photo-flux has 43 dB and emoji-mmdit 34; with
# 0.35 of the tokens merged, 33 and 45 dB. One row cannot say both. With these images, it would expect skipped
# steps to lose about as much far from the last full step as near to it.
NOT_FITTED = (PHOTOGRAPHS, 8)
LEAST = 1e-7  # an error that nobody sees, as in the estimate


def fitted(name: str, lines: list[dict[str, Any]], coherent: bool) -> dict[str, Any]:
    """Fit one row by the errors' logarithms. Each scene may differ from the row by a factor of its own.

    Each model counts as much as the others, however many of the images are its own.
    Where skipped steps err in one direction, errors add before they are squared.
    """
    scope = MERGE[name]
    start = {**SKIP[name], scope: (0.02, 3.0)}
    size = {key: torch.tensor(value[0]).log().requires_grad_() for key, value in start.items()}
    growth = {key: torch.tensor(value[1]).requires_grad_() for key, value in start.items()}
    corrected, fading = (torch.tensor(value, requires_grad=True) for value in (-2.3, 1.0))
    places = {place: i for i, place in enumerate(dict.fromkeys(map(scene_of, lines)))}
    offsets = torch.zeros(len(places), requires_grad=True)
    place = torch.tensor([places[scene_of(line)] for line in lines])
    errors = torch.tensor([line["error"] for line in lines]).log()
    steps = torch.tensor([float(line["steps"]) for line in lines])
    images = Counter(line["model"] for line in lines)
    weights = torch.tensor([len(lines) / len(images) / images[line["model"]] for line in lines])
    reaches, ratios, corrects = terms(name, lines)
    optimizer = torch.optim.Adam([*size.values(), *growth.values(), corrected, fading, offsets], lr=0.05)
    for _ in range(ITERATIONS):
        expected_error = torch.zeros(len(lines))
        for part in SKIP[name]:
            power = growth[part] / (2 if coherent else 1)
            grown = torch.where(reaches[part] > 0, reaches[part].clamp(min=1e-9) ** power, 0.0)
            mean = grown.sum(dim=1) / steps
            expected_error = expected_error + size[part].exp() * (mean**2 if coherent else mean)
        left = corrected.exp() * (corrects - 1).clamp(min=1) ** fading.abs()
        # At most 1, with a slope that keeps the fit moving.
        left = torch.where(corrects > 0, torch.minimum(left, 1 + 0.1 * (left - 1)), 1.0)
        merged = torch.where(ratios > 0, ratios.clamp(min=1e-9) ** growth[scope], 0.0)
        expected_error = expected_error + size[scope].exp() * merged * left
        off = expected_error.clamp(min=LEAST).log() + offsets[place] - errors
        loss = torch.nn.functional.huber_loss(off, torch.zeros_like(off), reduction="none", delta=0.5)
        optimizer.zero_grad()
        ((loss * weights).sum() + SPREAD * (offsets**2).sum()).backward()
        optimizer.step()
    spread = 4.34 * off.detach().abs()
    print(f"{name}: {len(lines)} images of {len(places)} scenes, off by {spread.mean():.1f} dB on average")
    row = {key: [float(f"{size[key].exp().item():.2g}"), round(growth[key].item(), 2)] for key in start}
    return {
        "skip": {key: row[key] for key in SKIP[name]},
        "merge": {scope: row[scope]},
        "corrected": [float(f"{corrected.exp().item():.2g}"), round(abs(fading.item()), 2)],
    }


# Where errors of skipped steps add before they are squared. The images are then off by 1.5 dB from the fit
# on average, in place of 1.9 dB. In the other rows they are further off with this than without.
COHERENT = ("transformer", "strong")
# Where corrections lose: by 0.9 to 9 dB in the record.
UNCORRECTED = ("unet", "strong")
SPREAD = 0.2  # of the factors of scenes: a penalty
ITERATIONS = 600
STACKS = Path(__file__).with_name("stacks_cpu.jsonl")


def scene_of(line: Mapping[str, Any]) -> str:
    return json.dumps([line[name] for name in FIELDS])


def terms(
    name: str, lines: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return reaches [line, step] by part, ratios [line], and distances of corrections [line]."""
    longest = max(line["steps"] for line in lines)
    reaches = {part: torch.zeros(len(lines), longest) for part in SKIP[name]}
    ratios = torch.zeros(len(lines))
    corrects = torch.zeros(len(lines))
    for i, line in enumerate(lines):
        settings = ToMeConfig.from_dict({**BASE, **line["settings"]})
        steps = line["steps"]
        runs = settings.reuse.steps_of(steps)
        of_part = dict(zip(SKIP[name], (runs.full, runs.finest), strict=False))
        for part, own in of_part.items():
            clean = line["model"] == TRANSFORMER  # its schedule has almost no noise before the last step
            if settings.reuse.on and (found := reaches_of(own, steps, clean)):
                reaches[part][i, : len(found)] = torch.tensor(found)
        tokens = (line["size"] // PIXELS[line["model"]]) ** 2
        if settings.ratio and tokens >= settings.min_tokens:
            ratios[i] = settings.ratio
        full_steps = len(runs.full) if settings.reuse.on else steps
        corrects[i] = min(settings.correction.every, full_steps) * steps / full_steps
    return reaches, ratios, corrects


def decibels(error: float) -> float:
    return round(-10 * math.log10(max(error, 1e-10)), 3)


def key(line: Mapping[str, Any]) -> str:
    return json.dumps({name: line[name] for name in (*FIELDS, "settings")}, sort_keys=True)


FIELDS = tuple(field.name for field in dataclasses.fields(Scene))


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a record, with the current names of settings."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for line in lines:
        if "settings" in line:
            line["settings"] = with_new_names(line["settings"])
    return lines


def write(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "fit", "table"))
    parser.add_argument("--stacks", action="store_true", help="measure stacks of blocks alone")
    parser.add_argument("--policy", type=Path, default=POLICY, help="the table that the fit writes")
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per image")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    {"measure": measure, "fit": fit, "table": table}[options.what](options)


if __name__ == "__main__":
    sys.exit(main())
