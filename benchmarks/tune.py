"""Measure what the search of `tokenmerge tune` gains over the rule, on prompts that it never saw.

For each bundled model, under weak and under strong guidance, the search begins with the rule's plan for the
wanted speed-up. Every plan that it tries is no slower than the rule's, by counted operations. Then the best
plan and the rule's draw other prompts from other seeds. Each line of the record is one picture: of the
search, with the SNR of its final latents in dB; or of the other prompts, with its PSNR. A second run with the
same record continues where the first one stopped.

    python benchmarks/tune.py measure --out benchmarks/tune_plans_cpu.jsonl
    python benchmarks/tune.py table --out benchmarks/tune_plans_cpu.jsonl
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
from tokenmerge.plans import speedup_of
from tokenmerge_tools.closeness import snr
from tokenmerge_tools.demo import path
from tokenmerge_tools.evaluate.prompts import built_in_prompts
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.tune.plans import Budget, SearchedPlan, neighbours, starts
from tokenmerge_tools.tune.search import search

CASES = (("emoji-mmdit", 7.0), ("emoji-unet", 7.5), ("emoji-mmdit", 3.0), ("emoji-unet", 3.0))
SIZE, STEPS, SPEEDUP = 128, 20, 2.0
# The search draws these prompts, each with its number as the seed. The check draws those from UNSEEN on.
SEARCHED, UNSEEN, SEED = (1, 2, 4, 3), 50, 1000


class OutOfTime(Exception):
    """The search has had its time."""


class Case:
    """One model and guidance scale, with the pictures that the record has."""

    def __init__(self, model: str, guidance: float, out: Path, seconds: float) -> None:
        self.model, self.guidance, self.out, self.left = model, guidance, out, seconds
        self.lines = [line for line in read(out) if (line["model"], line["guidance"]) == (model, guidance)]
        self.left -= sum(line["seconds"] for line in self.lines if "snr" in line)
        self.snr = {(line["plan"], line["prompt"]): line["snr"] for line in self.lines if "snr" in line}
        self.pipe = DiffusionPipeline.from_pretrained(path(model))
        self.pipe.set_progress_bar_config(disable=True)
        self.dense = lru_cache(self.draw)
        hosts = find_hosts(self.pipe)
        side = SIZE // self.pipe.vae_scale_factor
        known = {"grid": hosts[0].grid_at(side, side), "steps": STEPS, "guidance": guidance}
        self.facts = dataclasses.replace(DefaultMethod.of(self.pipe, hosts, SPEEDUP).facts, **known)

    def draw(self, prompt: int, seed: int, output: str, config: ToMeConfig | None = None) -> torch.Tensor:
        """Draw a picture [c, h, w] or its final latents; None: the dense one."""
        patch = None if config is None else merge_in_hosts(self.pipe, config, check_size=False)
        try:
            drawn = self.pipe(
                built_in_prompts()[prompt].text,
                height=SIZE,
                width=SIZE,
                num_inference_steps=STEPS,
                guidance_scale=self.guidance,
                generator=torch.Generator().manual_seed(seed),
                output_type=output,
            )
            return torch.as_tensor(drawn.images[0])
        finally:
            if patch is not None:
                patch.remove()

    def closeness(self, plan: SearchedPlan, item: int) -> float:
        """Return the SNR of the final latents, from the record or a new picture."""
        prompt = SEARCHED[item]
        if (plan.name, prompt) not in self.snr:
            if self.left <= 0:
                raise OutOfTime
            start = time.process_time()
            dense = self.dense(prompt, prompt, "latent")
            found = snr(self.draw(prompt, prompt, "latent", plan.config), dense)
            seconds = time.process_time() - start
            self.left -= seconds
            self.snr[plan.name, prompt] = found
            self.write(plan, prompt=prompt, snr=round(found, 3), seconds=round(seconds, 2))
        return self.snr[plan.name, prompt]

    def write(self, plan: SearchedPlan, **values: Any) -> None:
        """Append a picture to the record."""
        counted = round(speedup_of(self.facts, plan.config), 3)
        line = {
            "model": self.model,
            "guidance": self.guidance,
            "plan": plan.name,
            "speedup": counted,
            **values,
        }
        self.lines.append(line)
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def found(self) -> tuple[SearchedPlan, SearchedPlan]:
        """Return the rule's plan and the best one of the search."""
        begin = starts(self.facts, SPEEDUP)
        best, budget = begin[0], Budget(self.facts, speedup_of(self.facts, begin[0].config))
        plans = search(
            begin, lambda plan, random: neighbours(plan, budget, random), self.closeness, len(SEARCHED)
        )
        try:
            for best in plans:
                print(f"  {len(self.snr)} pictures, {self.left:.0f} s left: {best.name}", flush=True)
        except OutOfTime:
            pass
        return begin[0], best

    def check(self, rule: SearchedPlan, best: SearchedPlan, count: int) -> None:
        """Draw other prompts with both plans."""
        done = {(line["role"], line["plan"], line["prompt"]) for line in self.lines if "psnr" in line}
        for prompt in range(UNSEEN, UNSEEN + count):
            for role, plan in (("rule", rule), ("best", best)):
                if (role, plan.name, prompt) not in done:
                    seed = SEED + prompt
                    drawn = self.draw(prompt, seed, "np", plan.config)
                    error = float(((drawn - self.dense(prompt, seed, "np")) ** 2).mean())
                    psnr = min(100.0, -10 * math.log10(max(error, 1e-12)))
                    self.write(plan, role=role, prompt=prompt, seed=seed, psnr=round(psnr, 2))
                    print(f"  {prompt} {role}: {psnr:.1f} dB", flush=True)


def read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def measure(options: argparse.Namespace) -> None:
    quiet_libraries("benchmarks/tune.py")
    for model, guidance in CASES:
        print(f"{model}, guidance {guidance:g}", flush=True)
        case = Case(model, guidance, options.out, options.seconds)
        case.check(*case.found(), options.prompts)
    table(options)


def table(options: argparse.Namespace) -> None:
    """Print the mean PSNR of both plans on the unseen prompts, and the gain with its standard error."""
    gains = []
    for model, guidance in CASES:
        own = [one for one in read(options.out) if (one["model"], one["guidance"]) == (model, guidance)]
        last = [one for one in own if one.get("role") == "best"][-1:]
        psnr = {
            role: {
                one["prompt"]: one["psnr"] for one in own if one.get("role") == role and one["plan"] == plan
            }
            for role, plan in (
                ("rule", own[0]["plan"] if own else ""),
                ("best", last[0]["plan"] if last else ""),
            )
        }
        both = [psnr["best"][prompt] - psnr["rule"][prompt] for prompt in psnr["best"].keys() & psnr["rule"]]
        if len(both) < 2:
            continue
        gains.append(statistics.fmean(both))
        print(
            f"{model}, guidance {guidance:g}: rule {own[0]['plan']} at {own[0]['speedup']:.2f}×, "
            f"{statistics.fmean(psnr['rule'].values()):.1f} dB; best {last[0]['plan']} at "
            f"{last[0]['speedup']:.2f}×, {statistics.fmean(psnr['best'].values()):.1f} dB; gain "
            f"{gains[-1]:.1f} ± {statistics.stdev(both) / math.sqrt(len(both)):.1f} dB on {len(both)} "
            f"prompts, after {sum('snr' in one for one in own)} pictures"
        )
    if gains:
        print(f"mean gain: {statistics.fmean(gains):.2f} dB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("--seconds", type=float, default=180.0, help="CPU seconds of a search (default: 180)")
    parser.add_argument("--prompts", type=int, default=6, help="unseen prompts (default: 6)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    {"measure": measure, "table": table}[options.what](options)


if __name__ == "__main__":
    main()
