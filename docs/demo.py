"""Draws docs/demo.png, and writes its caption and what the run printed, from what ``make demo`` drew.

    make docs/demo.png

The picture's metadata say which settings drew it, so that a test finds a stale one.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops
from PIL.PngImagePlugin import PngInfo

from tokenmerge_tools.sheets import enlarge, sheet

PICTURE = Path(__file__).with_name("demo.png")
KEY = "drawn with"
SIDE = 128  # pixels of the square that is shown enlarged
PAGES = (Path(__file__).parent.parent / "README.md", *map(PICTURE.with_name, ("index.md", "quickstart.md")))
BLOCK = re.compile(r"(<!-- (caption|printed): .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)
CAPTION = """\
*"{prompt}", by a small bundled model on a CPU: unchanged, with `speedup={speedup}`, and unchanged in fewer steps, \
which take about as long.*
"""


def main(folder: Path) -> None:
    """Draw the pictures from a folder of ``tokenmerge generate``."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    conditions, (psnr,) = run["conditions"], run["quality"]["psnr_db"]
    report = run["report"]
    speedup = conditions["options"]["merging"].get("speedup", 2)
    dense, merged, third = (
        Image.open(folder / f"{name}-00.png") for name in ("dense", "tokenmerge", "fewer-steps")
    )
    fewer, square = run["quality"]["fewer_steps"], most_different(dense, merged, third)
    factor = 2 * dense.width // SIDE
    where = "the square in which they differ most, enlarged"
    seconds = [run["variants"][name]["seconds_per_image"]["median"] for name in ("dense", "tokenmerge")]
    drawn = sheet(
        [
            (f"{seconds[0]:.1f} s", f"the unchanged model, {report['steps']} steps"),
            (f"{seconds[1]:.1f} s", f"speedup={float(speedup)}: {psnr:.1f} dB to the left one"),
            (
                f"{fewer['seconds']:.1f} s",
                f"the unchanged model, {fewer['steps']} steps: {fewer['psnr_db']:.1f} dB to the left one",
            ),
        ],
        [
            ([enlarge(picture, 2) for picture in (dense, merged, third)], ""),
            ([enlarge(picture.crop(square), factor) for picture in (dense, merged, third)], where),
        ],
    )
    info = PngInfo()
    info.add_text(KEY, json.dumps(drawn_with(conditions)))
    drawn.save(PICTURE, pnginfo=info)
    blocks = {
        "caption": CAPTION.format(
            prompt=conditions["options"]["prompt"].capitalize(), speedup=float(speedup)
        ),
    }
    for page in PAGES:
        text, docs = page.read_text(encoding="utf-8"), "" if page.parent == PICTURE.parent else "docs/"
        blocks["printed"] = printed(run, page.parent != PICTURE.parent)
        rewritten = BLOCK.sub(lambda found: found[1] + blocks[found[2]] + found[3], text)
        page.write_text(rewritten.replace("{docs}", docs), encoding="utf-8")
    print(PICTURE)


def most_different(dense: Image.Image, *others: Image.Image) -> tuple[int, int, int, int]:
    """Return the square of SIDE pixels in which the other pictures differ most from the dense one."""
    lost = sum(np.asarray(ImageChops.difference(dense, other), float).sum(axis=2) for other in others)
    places = itertools.product(*(range(0, side - SIDE + 1, SIDE // 4) for side in dense.size))
    left, top = max(
        places, key=lambda place: lost[place[1] : place[1] + SIDE, place[0] : place[0] + SIDE].sum()
    )
    return left, top, left + SIDE, top + SIDE


def printed(run: dict, short: bool) -> str:
    """Return what the handle printed after the run, and how far its figures can be trusted."""
    (psnr,) = run["quality"]["psnr_db"]
    lines = run["summary"].splitlines()
    if short:
        lines = [*(line for line in lines if not line.startswith(("  merging:", "  cache "))), "  …"]
    note = (
        f"*Its true closeness is {psnr:.1f} dB. Estimates are rough: on the bundled models, 9 of 10 were within 7 dB "
        "of the truth; on [a small FLUX]({docs}methods/estimate.md), only half.*"
    )
    return "\n".join(("```text", *lines, "```", "", note, ""))


def drawn_with(conditions: dict) -> dict:
    """Return the conditions of a run that its pictures depend on."""
    options = conditions["options"]
    return {
        **{name: options[name] for name in ("prompt", "model", "steps", "seed", "guidance")},
        "size": [conditions["width"], conditions["height"]],
        "config": conditions["config"],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
