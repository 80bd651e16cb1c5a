"""Draw docs/plans.svg: what each step of a generation does at three speeds.

python docs/plans.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import diffusers
from diffusers import DiffusionPipeline

from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts
from tokenmerge.plans import pays_from
from tokenmerge.plans.generation import plan_generation
from tokenmerge.report.notes import signs_of
from tokenmerge_tools import demo

PICTURE = Path(__file__).with_name("plans.svg")
SPEEDUPS = (1.5, 2.0, 3.0)
MODEL, GUIDANCE = "emoji-unet", 7.5
STEPS, TOKENS, FEWEST_TOKENS = 20, (1, 64, 64), 500  # the last is measured on each machine
# The colour of a sign, and its meaning in the legend.
COLOURS = {
    "M": ("#1f6f54", "full, on merged tokens"),
    "D": ("#0b3b2c", "full"),
    "C": ("#0b3b2c", "full, to correct the others"),
    "s": ("#9ccfb8", "shallow: only the finest level of the UNet"),
    "·": ("#e4ebe8", "skipped"),
}
CELL, LEFT = 30, 130  # pixels


def plans() -> dict[float, tuple[str, float]]:
    """Return for each speed-up the signs of the plan, and the ratio of the tokens that merge."""
    pipe = DiffusionPipeline.from_pretrained(demo.path(MODEL))
    facts = DefaultMethod.of(pipe, find_hosts(pipe), 2.0).facts
    facts = dataclasses.replace(facts, fewest_tokens=pays_from(FEWEST_TOKENS))
    made = {}
    for speedup in SPEEDUPS:
        method = DefaultMethod(speedup, facts)
        config = method.settings(method.facts_at(TOKENS, STEPS, GUIDANCE))
        signs = signs_of(plan_generation(config, STEPS), config.merges, facts.model == "unet")
        made[speedup] = signs, config.ratio
    return made


def drawing() -> str:
    """Return the image: a row of cells for each plan, and a legend."""
    made = plans()
    parts, top = [], 10
    for speedup, (signs, ratio) in made.items():
        middle = top + CELL / 2 + 5
        parts.append(_text(10, middle, f"speedup={speedup:g}", weight="bold"))
        for place, sign in enumerate(signs):
            left = LEFT + place * CELL
            parts.append(_cell(left, top, sign))
            ink = "#ffffff" if sign in "MDC" else "#33413c"
            parts.append(_text(left + CELL / 2 - 1, middle, sign, colour=ink, anchor="middle"))
        top += CELL + 2
        full = sum(sign in "MDC" for sign in signs)
        said = f"{full} of {STEPS} steps are full; {100 * ratio:g} % of the tokens merge"
        parts.append(_text(LEFT, top + 14, said))
        top += 36
    used = [sign for sign in COLOURS if any(sign in signs for signs, _ in made.values())]
    for sign in used:
        parts += [_cell(LEFT, top, sign, side=16), _text(LEFT + 24, top + 13, f"{sign}  {COLOURS[sign][1]}")]
        top += 22
    width, height = LEFT + STEPS * CELL + 10, top + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="sans-serif" font-size="13">', back, *parts, "</svg>", ""])


def _cell(left: float, top: float, sign: str, side: int = CELL - 2) -> str:
    return f'<rect x="{left}" y="{top}" width="{side}" height="{side}" rx="3" fill="{COLOURS[sign][0]}"/>'


def _text(
    left: float, top: float, text: str, colour: str = "#222222", anchor: str = "start", weight: str = "normal"
) -> str:
    place = f'x="{left:g}" y="{top:g}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{text}</text>"


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    PICTURE.write_text(drawing(), encoding="utf-8")
    print(PICTURE)
