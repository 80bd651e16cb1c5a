"""How well `tokenmerge tune` finds the right speed, on prompts that it did not draw.

For each case, a model with a guidance scale, `tokenmerge tune` measures four prompts, once for each of some
closenesses. Then other prompts are drawn dense, at fixed speeds, and with `min_psnr=` and the file that the
tuning wrote. A line of the record is a tuning or an image: its PSNR to the dense image of the same seed, its
speed-up by operations, and the estimates of small models before and after its run. `write` puts the tables
into docs/tune.md: how far the corrected estimates are from the truth, and how often `min_psnr` was reached.
The speed that it took is compared with that of the fastest fixed plan that keeps the closeness of the image.
A second run with the same record continues where the first one stopped. The images of the tuning are kept
beside the record.

    export OMP_NUM_THREADS=1 PYTHONPATH=.
    python benchmarks/right_speed.py measure --out benchmarks/right_speed_cpu.jsonl  # an hour
    python benchmarks/right_speed.py write --out benchmarks/right_speed_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from benchmarks.holdout.train import PHOTOGRAPHS
from benchmarks.holdout.train import caption as caption_of_photograph
from diffusers import DiffusionPipeline
from tolerance import needed

from tokenmerge import token_merging
from tokenmerge.config import Tuned
from tokenmerge.config.tuned import KEYS
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import RunFacts, plan_for
from tokenmerge.plans.estimate import MOST_PSNR, psnr_of
from tokenmerge.plans.learned import corrected
from tokenmerge_tools.demo import path
from tokenmerge_tools.demo.glyphs import caption, choose_prompts, read_glyphs
from tokenmerge_tools.tune.options import TuneOptions
from tokenmerge_tools.tune.runner import tune

STEPS = 20
PROMPTS = 53  # choose_prompts(…, seed=PROMPTS): no rule was made on these
SEED = 8700
TUNED_WITH = 4  # prompts
GOALS = (30.0, 35.0, 40.0)  # dB
MOST = 3.0  # the speed-up that min_psnr may use
# Fixed speeds, from the fastest to the first one that reaches the highest goal.
SPEEDS = (3.0, 2.2, 1.7, 1.4, 1.2)
NEAR = 4.0  # dB
HOLDOUT = "photo-flux"
PAGE = Path(__file__).parent.parent / "docs" / "tune.md"
BLOCK = re.compile(r"(<!-- right speed: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
Line = dict[str, Any]


class Case(NamedTuple):
    """A model, its guidance scale, the size of its images in pixels, and the number of kept prompts."""

    model: str
    guidance: float
    size: int
    kept: int

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        if self.model == HOLDOUT:
            return Path(__file__).parent / "holdout" / HOLDOUT
        return path(self.model)

    @property
    def prompts(self) -> list[str]:
        """The prompts of the tuning, and after them those that are kept."""
        if self.model == HOLDOUT:
            return [caption_of_photograph(name) for name in list(PHOTOGRAPHS)[: TUNED_WITH + self.kept]]
        glyphs = read_glyphs()
        chosen = choose_prompts(TUNED_WITH + self.kept, seed=PROMPTS)
        return [caption(glyphs[glyph].name, background) for glyph, background in chosen]

    @property
    def about(self) -> Line:
        """What the lines of this case have in common."""
        return {"model": self.model, "guidance": self.guidance, "size": self.size}


CASES = (
    Case("emoji-unet", 7.5, 128, 8),
    Case("emoji-mmdit", 7.0, 128, 8),
    Case(HOLDOUT, 1.0, 256, 8),
    Case("emoji-unet", 3.0, 128, 8),
    Case("emoji-mmdit", 3.0, 128, 8),
)


def measure(out: Path) -> None:
    """Draw what the record does not have yet."""
    known = read(out)
    for case in CASES:
        of_case = [line for line in known if case.about.items() <= line.items()]
        contents = {line["goal"]: line["tuned"] for line in of_case if line["about"] == "tuning"}
        for goal in GOALS:
            if goal not in contents:
                contents[goal] = tuned_for(case, goal, out)
                append(out, {**case.about, "about": "tuning", "goal": goal, "tuned": contents[goal]})
        pipe = DiffusionPipeline.from_pretrained(case.folder)
        pipe.set_progress_bar_config(disable=True)
        for number, prompt in enumerate(case.prompts[TUNED_WITH:]):
            drawn = [line for line in of_case if line["about"] == "image" and line["prompt"] == prompt]
            for line in images_of(pipe, case, prompt, SEED + TUNED_WITH + number, contents, drawn):
                append(out, line)


def tuned_for(case: Case, goal: float, out: Path) -> Line:
    """Run `tokenmerge tune` for a closeness, and return what its file holds."""
    folder = out.with_suffix("") / f"{case.model}-{case.guidance:g}"
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{prompt}\n" for prompt in case.prompts[:TUNED_WITH]), encoding="utf-8")
    options = TuneOptions(
        model=str(case.folder),
        size=(case.size, case.size),
        steps=STEPS,
        guidance=case.guidance,
        min_psnr=goal,
        prompts=prompts,
        items=TUNED_WITH,
        device="cpu",
        out=folder / "tuned.json",
    )
    tuning = tune(options, on_note=print)
    if not tuning.complete:
        raise KeyboardInterrupt
    print(f"{case.model}, {case.guidance:g}: {goal:g} dB at {tuning.answer}", flush=True)
    return tuning.tuned().content()


def images_of(
    pipe: DiffusionPipeline,
    case: Case,
    prompt: str,
    seed: int,
    contents: Mapping[float, Line],
    drawn: Sequence[Line],
) -> Iterator[Line]:
    """Yield the lines of a kept prompt that were not drawn yet."""
    artist = Artist(pipe, case, prompt, seed)
    about = {**case.about, "about": "image", "prompt": prompt, "seed": seed}
    facts = facts_of(pipe, contents[GOALS[0]]["for"])
    known = {(line["goal"], line["speedup"]): line for line in drawn}
    for speedup in SPEEDS:
        fixed = known.get((None, speedup))
        if fixed is None:
            plan = plan_for(facts, speedup)
            before = {"counted": round(plan.speedup, 3), "before": round(psnr_of(plan.expected_error), 3)}
            fixed = {**about, "goal": None, "speedup": speedup, **artist.with_plan(speedup), **before}
            yield fixed
        if fixed["psnr"] >= max(GOALS):
            break
    for goal in GOALS:
        if (goal, MOST) not in known:
            yield {**about, "goal": goal, "speedup": MOST, **artist.with_tolerance(goal, contents[goal])}


def facts_of(pipe: DiffusionPipeline, found_for: Line) -> RunFacts:
    """Return the facts of the generations that were tuned."""
    hosts = find_hosts(pipe)
    return dataclasses.replace(
        DefaultMethod.of(pipe, hosts, MOST).facts,
        grid=hosts[0].grid_at(found_for["height"], found_for["width"]),
        steps=STEPS,
        guidance=found_for["guidance"],
    )


class Artist:
    """Draws the images of a prompt."""

    def __init__(self, pipe: DiffusionPipeline, case: Case, prompt: str, seed: int) -> None:
        self._pipe = pipe
        self._case = case
        self._prompt = prompt
        self._seed = seed
        self._dense: torch.Tensor | None = None

    def with_plan(self, speedup: float) -> Line:
        """Draw with the plan of a speed-up, and return the closeness and the estimate after the run."""
        dense = self._dense_image()
        with token_merging(self._pipe, speedup=speedup) as patch:
            return self._drawn(patch, dense)

    def with_tolerance(self, goal: float, content: Line) -> Line:
        """Draw with `min_psnr` and a file of `tokenmerge tune`, and return the speed-up too."""
        dense = self._dense_image()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tuned.json"
            file.write_text(json.dumps(content), encoding="utf-8")
            with token_merging(self._pipe, file, speedup=MOST, min_psnr=goal) as patch:
                found = self._drawn(patch, dense)
                return {**found, "counted": round(patch.report().speedup, 3)}

    def _drawn(self, patch: Any, dense: torch.Tensor) -> Line:
        image = self._draw()
        squared = float((image - dense).square().mean())
        estimate = patch.estimate
        assert estimate is not None
        return {"psnr": round(psnr_of(squared), 3), "after": round(min(estimate.psnr, MOST_PSNR), 3)}

    def _dense_image(self) -> torch.Tensor:
        if self._dense is None:
            self._dense = self._draw()
        return self._dense

    def _draw(self) -> torch.Tensor:
        return self._pipe(
            self._prompt,
            height=self._case.size,
            width=self._case.size,
            num_inference_steps=STEPS,
            guidance_scale=self._case.guidance,
            generator=torch.Generator().manual_seed(self._seed),
            output_type="pt",
        ).images[0]


def read(file: Path) -> list[Line]:
    if not file.exists():
        return []
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]


def append(file: Path, line: Line) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line) + "\n")
    if line["about"] == "image":
        aim = "no tolerance" if line["goal"] is None else f"{line['goal']:g} dB"
        print(f"{line['model']}, {aim}: {line['psnr']:.1f} dB at {line['counted']:.2f}×", flush=True)


Key = tuple[str, float]  # model, and its guidance scale


def errors_at_fixed_speeds(lines: Sequence[Line]) -> dict[Key, dict[str, list[float]]]:
    """Return by how many dB estimates at fixed speeds miss the truth, by case and kind of estimate.

    Each image counts with the tuning for each of the closenesses.
    """
    found: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if line["about"] == "tuning":
            errors = Tuned.of({name: line["tuned"][name] for name in KEYS}).errors
            for image in images_like(line, lines):
                of_case = found[line["model"], line["guidance"]]
                for kind in ("before", "after"):
                    mended = corrected(errors, image[kind], image["counted"], kind == "after")
                    of_case[kind].append(image["psnr"] - mended.psnr)
                    of_case[f"{kind}, plain"].append(image["psnr"] - image[kind])
    return found


def images_like(line: Line, lines: Sequence[Line]) -> Iterator[Line]:
    """Yield the kept images with fixed plans of the case that a line belongs to."""
    for image in lines:
        same = all(image[name] == line[name] for name in ("model", "guidance", "size"))
        if same and image["about"] == "image" and image["goal"] is None:
            yield image


class Kept(NamedTuple):
    """An image with a tolerance: whether it was reached, the share of the needed speed, and the estimate."""

    reached: bool
    share: float  # of the speed of the fastest fixed plan that keeps the closeness
    error: float  # of the estimate, in dB


def tolerated(lines: Sequence[Line], about: str = "image") -> dict[Key, list[Kept]]:
    """Return the images with a tolerance, by case. ``about`` is "followed" for those of a former way."""
    found: dict[Key, list[Kept]] = defaultdict(list)
    for line in lines:
        if line["about"] == about and line["goal"] is not None:
            images = [image for image in images_like(line, lines) if image["seed"] == line["seed"]]
            plans = {str(image["speedup"]): image for image in images}
            speed = needed({"fixed": plans, "min_psnr": line["goal"]})
            kept = Kept(line["psnr"] >= line["goal"], line["counted"] / speed, line["psnr"] - line["after"])
            found[line["model"], line["guidance"]].append(kept)
    return found


def table(lines: Sequence[Line]) -> str:
    """Return the tables of docs/tune.md: images with a tolerance, and estimates at fixed speeds."""
    rows = [
        f"| model, guidance | images | reached | speed, of the needed plan's | estimate within {NEAR:g} dB |",
        "|---|---:|---:|---:|---:|",
    ]
    images = tolerated(lines)
    for case, of_case in (*images.items(), (None, [image for found in images.values() for image in found])):
        share = statistics.median(image.share for image in of_case)
        cells = (
            label_of(case),
            str(len(of_case)),
            f"{statistics.mean(image.reached for image in of_case):.0%}",
            f"{share:.2f}",
            f"{near([image.error for image in of_case]):.0%}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    rows += [
        "",
        "| model, guidance | images | before a run, plain | corrected | after a run, plain | corrected |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    errors = errors_at_fixed_speeds(lines)
    for case, of_kinds in (*errors.items(), (None, pooled(errors))):
        count = len(of_kinds["before"]) // len(GOALS)
        shares = [near(of_kinds[kind]) for kind in ("before, plain", "before", "after, plain", "after")]
        rows.append(f"| {label_of(case)} | {count} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    return "\n".join((*rows, ""))


def near(errors: Sequence[float]) -> float:
    """Return the share of the estimates that are near the truth."""
    return statistics.mean(abs(error) <= NEAR for error in errors)


def pooled(errors: Mapping[Key, Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Return the errors of all cases together, by kind of estimate."""
    found: dict[str, list[float]] = defaultdict(list)
    for of_kinds in errors.values():
        for kind, of_kind in of_kinds.items():
            found[kind] += of_kind
    return found


def label_of(case: Key | None) -> str:
    """Return the name of a case in a table, or of all of them."""
    return "all" if case is None else f"`{case[0]}`, {case[1]:g}"


def write(lines: Sequence[Line]) -> None:
    """Write the tables into docs/tune.md."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda block: block[1] + table(lines) + block[2], text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "table", "write"))
    parser.add_argument("--out", type=Path, required=True, help="record, one JSON line per tuning or image")
    options = parser.parse_args()
    diffusers.utils.logging.set_verbosity_error()
    if options.what == "measure":
        measure(options.out)
    elif options.what == "table":
        print(table(read(options.out)))
    else:
        write(read(options.out))


if __name__ == "__main__":
    main()
