"""Draws docs/demo.png, and writes what README and the quickstart print, from what ``make demo`` drew.

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

from tokenmerge_tools.sheets import sample_sheet

PICTURE = Path(__file__).with_name("demo.png")
KEY = "drawn with"
PAGES = (Path(__file__).parent.parent / "README.md", Path(__file__).with_name("quickstart.md"))
BLOCK = re.compile(r"(<!-- printed: .*?-->\n).*?(<!-- end -->)", flags=re.DOTALL)


def main(folder: Path) -> None:
    """Draw the pair from a folder of ``tokenmerge generate``."""
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    conditions, (psnr,) = run["conditions"], run["quality"]["psnr_db"]
    report = run["report"]
    counted = report["flops_dense"] / report["flops_mean"]
    speedup = conditions["options"]["merging"].get("speedup", 2)
    pair = sample_sheet(
        [
            ("dense", f"the unchanged model, {report['steps']} steps"),
            (f"speedup={speedup:g}", f"{counted:.1f} times fewer operations, {psnr:.1f} dB to dense"),
        ],
        [([Image.open(folder / f"{name}-00.png") for name in ("dense", "merged")], "")],
    )
    info = PngInfo()
    info.add_text(KEY, json.dumps(drawn_with(conditions)))
    pair.save(PICTURE, pnginfo=info)
    # The seconds are those of this machine, and the estimate follows its rounding.
    lines = run["summary"].splitlines()
    lines = [line for line in lines if not line.startswith(("  last run", "  estimated"))]
    printed = "\n".join(("```text", *lines, "```", ""))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(lambda found: found[1] + printed + found[2], text), encoding="utf-8")
    print(PICTURE)


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
