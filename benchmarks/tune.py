"""Measure what the search of `tokenmerge tune` gains over the rule, on prompts that it never saw.

For each bundled model, under weak and under strong guidance, the search begins with the rule's plan for the
wanted speed-up. Every plan that it tries is no slower than the rule's, by operations. Then the best
plan and the rule's draw other prompts from other seeds. A line of the record is one image of the search,
with the SNR of its final latents in dB, or one of the other prompts, with the PSNR of both plans. Where the
search finds no closer plan, there is nothing to compare, and a line says so. A second run with the same
record continues where the first one stopped; with more seconds, it searches on.

    python benchmarks/tune.py measure --out benchmarks/tune_cpu.jsonl
    python benchmarks/tune.py table --out benchmarks/tune_cpu.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from tokenmerge import ToMeConfig
from tokenmerge.api import merge_in_hosts
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.closeness import snr
from tokenmerge_tools.demo import path
from tokenmerge_tools.evaluate.prompts import built_in_prompts
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.tune.plans import Budget, SearchedPlan, neighbours, rule_plan
from tokenmerge_tools.tune.search import search

CASES = (("emoji-unet", 7.5), ("emoji-mmdit", 7.0), ("emoji-unet", 3.0), ("emoji-mmdit", 3.0))
SIZE = 128
STEPS = 20
# The search draws these prompts, each with its number as the seed. The check draws those from UNSEEN on.
SEARCHED = (1, 2, 4, 3)
UNSEEN = 50
EQUAL = 100.0  # dB of an image that equals dense in every pixel
LEAST_ERROR = 1e-12
SEED = 1000


class OutOfTime(Exception):
    """The search has had its time."""


class Case:
    """One model, guidance scale and speed-up, with the images that the record has."""

    def __init__(self, model: str, guidance: float, options: argparse.Namespace) -> None:
        self.known = {"model": model, "guidance": guidance, "wanted": options.speedup}
        self.out = options.out
        self.left = options.seconds
        lines = [line for line in read(options.out) if self.known.items() <= line.items()]
        self.snr = {(line["plan"], line["prompt"]): line["snr"] for line in lines if "snr" in line}
        self.left -= sum(line["seconds"] for line in lines if "snr" in line)
        checked = [line for line in lines if "rule" in line]
        self.checked = {(line["rule"], line["best"], line.get("prompt")) for line in checked}
        self.psnr = {
            (line[role], line["prompt"]): line[f"psnr_{role}"]
            for line in checked
            if "prompt" in line
            for role in ("rule", "best")
        }
        self.pipe = DiffusionPipeline.from_pretrained(path(model))
        self.pipe.set_progress_bar_config(disable=True)
        self.dense = lru_cache(self.draw)
        hosts = find_hosts(self.pipe)
        side = SIZE // self.pipe.vae_scale_factor
        self.dense(SEARCHED[0], SEARCHED[0], "latent")
        self.facts = dataclasses.replace(
            DefaultMethod.of(self.pipe, hosts, options.speedup).facts,
            grid=hosts[0].grid_at(side, side),
            steps=STEPS,
            guidance=guidance,
        )
        self.rule = rule_plan(self.facts, options.speedup)
        self.budget = Budget(self.facts, Budget(self.facts, 1).counted(self.rule))

    def draw(self, prompt: int, seed: int, output: str, config: ToMeConfig | None = None) -> torch.Tensor:
        """Draw an image [c, h, w] or its final latents. Without settings, it is the dense one."""
        patch = None if config is None else merge_in_hosts(self.pipe, config, check_size=False)
        try:
            drawn = self.pipe(
                built_in_prompts()[prompt],
                height=SIZE,
                width=SIZE,
                num_inference_steps=STEPS,
                guidance_scale=self.known["guidance"],
                generator=torch.Generator().manual_seed(seed),
                output_type=output,
            )
            return torch.as_tensor(drawn.images[0])
        finally:
            if patch is not None:
                patch.remove()

    def closeness(self, plan: SearchedPlan, item: int) -> float:
        """Return the SNR of the final latents, from the record or a new image."""
        prompt = SEARCHED[item]
        if (plan.name, prompt) not in self.snr:
            if self.left <= 0:
                raise OutOfTime
            dense = self.dense(prompt, prompt, "latent")
            start = time.process_time()
            found = snr(self.draw(prompt, prompt, "latent", plan.config), dense)
            seconds = time.process_time() - start
            self.left -= seconds
            self.snr[plan.name, prompt] = found
            counted = round(self.budget.counted(plan), 3)
            values = {"snr": round(found, 3), "seconds": round(seconds, 2)}
            self.write(plan=plan.name, speedup=counted, prompt=prompt, **values)
        return self.snr[plan.name, prompt]

    def write(self, **values: Any) -> None:
        """Append a line to the record."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self.known, **values}, ensure_ascii=False) + "\n")

    def found(self) -> SearchedPlan:
        """Search, and return the best plan."""
        best = self.rule
        plans = search(
            [self.rule],
            lambda plan, random: neighbours(plan, self.budget, random),
            self.closeness,
            len(SEARCHED),
        )
        try:
            for best in plans:
                print(f"  {len(self.snr)} images, {self.left:.0f} s left: {best.name}", flush=True)
        except OutOfTime:
            pass
        return best

    def check(self, best: SearchedPlan, count: int) -> None:
        """Draw other prompts with the rule's plan and the best one, unless they are the same."""
        plans = {"rule": self.rule, "best": best}
        names = {role: plan.name for role, plan in plans.items()}
        counted = {f"speedup_{role}": round(self.budget.counted(plan), 3) for role, plan in plans.items()}
        if best == self.rule:
            count = 0
            self.write(**names, **counted)
        for prompt in range(UNSEEN, UNSEEN + count):
            if (*names.values(), prompt) in self.checked:
                continue
            for plan in plans.values():
                if (plan.name, prompt) not in self.psnr:
                    dense = self.dense(prompt, SEED + prompt, "np")
                    error = ((self.draw(prompt, SEED + prompt, "np", plan.config) - dense) ** 2).mean()
                    decibels = -10 * math.log10(max(float(error), LEAST_ERROR))
                    self.psnr[plan.name, prompt] = min(EQUAL, decibels)
            psnr = {f"psnr_{role}": round(self.psnr[plan.name, prompt], 2) for role, plan in plans.items()}
            self.write(**names, **counted, prompt=prompt, seed=SEED + prompt, **psnr)
            print(f"  prompt {prompt}: {psnr}", flush=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def measure(options: argparse.Namespace) -> None:
    quiet_libraries("benchmarks/tune.py")
    torch.set_num_threads(1)
    for model, guidance in CASES:
        print(f"{model}, guidance {guidance:g}", flush=True)
        case = Case(model, guidance, options)
        case.check(case.found(), options.prompts)
    table(options)


def table(options: argparse.Namespace) -> None:
    """Print what each search found, with its gain on the unseen prompts and the standard error."""
    print("| model | guidance | counted | default method | found | gain | images of the search |")
    print("|---|---|---|---|---|---|---|")
    lines = list(read(options.out))
    for model, guidance in CASES:
        known = {"model": model, "guidance": guidance, "wanted": options.speedup}
        own = [line for line in lines if known.items() <= line.items()]
        pairs = dict.fromkeys((line["rule"], line["best"]) for line in own if "rule" in line)
        for rule, best in pairs:
            checked = [line for line in own if (line.get("rule"), line.get("best")) == (rule, best)]
            cells = [f"`{model}`", f"{guidance:g}", f"{checked[-1]['speedup_rule']:.2f}×", f"`{rule}`"]
            if best == rule:
                cells += ["no closer plan", "0"]
            elif len(checked) > 1:
                both = [line["psnr_best"] - line["psnr_rule"] for line in checked]
                cells += [f"`{best}`", f"{with_error(both)} on {len(both)} prompts"]
            else:
                continue
            last = own.index(checked[-1])
            pictures = sum("snr" in line for line in own[:last])
            print(f"| {' | '.join(cells)} | {pictures} |")


def with_error(values: list[float]) -> str:
    """Return a mean with its standard error.

    >>> with_error([1.0, 3.0])
    '2.0 ± 1.0 dB'
    """
    mean = f"{statistics.fmean(values):.1f}".replace("-", "−")
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.1f} dB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--speedup", type=float, default=2.0, help="wanted speed-up (default: 2)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=150.0,
        help="CPU seconds of each search, without dense (default: 150)",
    )
    parser.add_argument("--prompts", type=int, default=8, help="unseen prompts (default: 8)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"measure": measure, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
