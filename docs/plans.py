"""Draw the plans in docs/methods/auto.md: what each step of a generation does at three speeds.

python docs/plans.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import diffusers
from diffusers import DiffusionPipeline

from tokenmerge.config import ToMeConfig
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans.generation import plan_generation
from tokenmerge.report.summary import signs_of
from tokenmerge_tools import demo

PAGE = Path(__file__).parent / "methods" / "auto.md"
BLOCK = re.compile(r"(<!-- plans: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
SPEEDUPS = (1.5, 2.0, 3.0)
STEPS, TOKENS, FEWEST_TOKENS = 20, (1, 64, 64), 500  # the last is measured on each machine
SCENES = (("emoji-unet", 3.0), ("emoji-unet", 7.5), ("emoji-mmdit", 3.0), ("emoji-mmdit", 7.0))


def plans() -> str:
    """Return the plans as Markdown."""
    lines = ["```text"]
    for model, guidance in SCENES:
        pipe = DiffusionPipeline.from_pretrained(demo.path(model))
        method = DefaultMethod.of(pipe, find_hosts(pipe), 2.0)
        facts = dataclasses.replace(method.facts, fewest_tokens=FEWEST_TOKENS)
        lines += [f"{model}, guidance {guidance:g}"]
        for speedup in SPEEDUPS:
            config = DefaultMethod.for_facts(speedup, facts).settings(TOKENS, STEPS, guidance)
            plan = plan_generation(config, STEPS)
            signs = signs_of(plan, config.merges, facts.model == "unet")
            lines.append(f"  speedup={speedup:<4g} {signs}   {_merging(config)}")
    return "\n".join([*lines, "```", ""])


def _merging(config: ToMeConfig) -> str:
    if not config.ratio:
        return "no token merges"
    where = "whole blocks" if config.scope == "block" else "self-attention"
    return f"{100 * config.ratio:g} % of the tokens merge, {where}"


def page() -> str:
    """Return the whole page with the present plans."""
    made = plans()
    return BLOCK.sub(lambda found: found[1] + made + found[2], PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
