"""Draws docs/demo.png, and writes its caption and what the run printed, from what ``make demo`` drew.

    make docs/demo.png

The picture's metadata say which settings drew it, so that a test finds a stale one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tokenmerge_tools.sheets import enlarge, sheet

PICTURE = Path(__file__).with_name("demo.png")
KEY = "drawn with"
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
    fewer = run["quality"]["fewer_steps"]
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
        [([enlarge(picture, 2) for picture in (dense, merged, third)], "")],
    )
    info = PngInfo()
    info.add_text(KEY, json.dumps(drawn_with(conditions)))
    drawn.save(PICTURE, pnginfo=info)
    blocks = {
        "caption": CAPTION.format(
            prompt=conditions["options"]["prompt"].capitalize(), speedup=float(speedup)
        ),
        "printed": printed(run),
    }
    for page in PAGES:
        text, docs = page.read_text(encoding="utf-8"), "" if page.parent == PICTURE.parent else "docs/"
        rewritten = BLOCK.sub(lambda found: found[1] + blocks[found[2]] + found[3], text)
        page.write_text(rewritten.replace("{docs}", docs), encoding="utf-8")
    print(PICTURE)


def printed(run: dict) -> str:
    """Return what the handle printed after the run, and how far its figures can be trusted."""
    (psnr,) = run["quality"]["psnr_db"]
    note = (
        f"*Its true closeness is {psnr:.1f} dB. Estimates are rough: 9 of 10 were within 7 dB of the truth on the "
        "bundled models, and half of them [on a small FLUX]({docs}methods/estimate.md).*"
    )
    return "\n".join(("```text", run["summary"], "```", "", note, ""))


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
