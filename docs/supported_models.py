"""Write docs/supported-models.md and its tables from the families' own records and the checks that each passes.

python docs/supported_models.py                  # runs the checks of every family, some minutes
python docs/supported_models.py -k "Krea2"       # runs those of some, and keeps the numbers of the others
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import diffusers
import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "supported-models.md"
FOLDER = ROOT / "docs" / "models"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

HEAD = """\
# Supported models

These diffusion models work. [Vision transformers](vision-transformers.md) have a page of their own.

| kind | for example | class by class |
|---|---|---|
| UNets | Stable Diffusion 1.x and 2.x, SDXL, their ControlNets, AnimateDiff, Stable Video Diffusion, and CompVis-style checkpoints | [UNets](models/unets.md) |
| transformers for images | SD3 and 3.5, FLUX.1 and .2, Qwen-Image and 2.1, Krea 2, HiDream, Ideogram 4, ERNIE-Image, PixArt, Lumina, Z-Image, Chroma, AuraFlow, Sana, and their ControlNets | [images](models/pictures.md) |
| transformers for [video](video.md) | Wan, HunyuanVideo, CogVideoX, Mochi, LTX and LTX-2, Cosmos, Kandinsky 5, SANA-Video | [video](models/video.md) |
| transformers that edit images, with [reference images](reference-pictures.md) | FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit and Layered, JoyImage-Edit, LongCat-Image-Edit, FIBO Edit | [images](models/pictures.md) |

In some classes no token merges, and [step reuse alone](#step-reuse-alone) speeds them up. A few run dense, with the reason. [Choosing settings](choosing-settings.md) says which other tools merging works with, and [adding a model](adding-a-model.md)
says how to add one.

The tables have these columns:

- **merging**: the parts of a transformer block that can run on merged tokens. Each part can merge on its own
  (`scope="layers"`, chosen by `merge_attn`, `merge_crossattn`, `merge_mlp`). *Whole block* means that all parts can merge
  at once (`scope="block"`). *Keys* means that keys and values of attention can merge alone (`scope="keys"`). *Image by image*
  means that attention is called for one image of a batch after the other, since the position tables have no batch axis.
- **step reuse**: what some steps of the default method skip. *Blocks* means all transformer blocks, *stages* the deep stages of
  a UNet and its finest level.
- **tested with**: the version of diffusers, and how many tests pass on tiny random models of its classes. With ratio 0 the
  output is bit-equal. If tokens are only reordered, it is equal up to rounding, so every position, mask and condition follows
  its token. Nothing stays after removal. Any size and batch works, and so do copies, pickles and gradients.

`python docs/supported_models.py` writes these pages from `src/tokenmerge/models/families/` and from a run of `tests/models/`.
"""

GROUPS = {
    "unets": "# UNets that merge",
    "pictures": "# Transformers for images that merge",
    "video": "# Transformers for video that merge",
}
ABOVE = "[Supported models](../supported-models.md) says what the columns mean.\n"
REFUSED = """
## Step reuse alone

No token merges in these. A `ratio=` is refused with the reason; `speedup=` on the pipeline skips what the third column says. A
*list of blocks* is skipped as a whole, and what it adds is extrapolated. With *whole output*, the output of the model is. A call that
fills a cache of keys always runs. All are found by their class, whatever the pipeline calls them. Beside a model that merges, as in a
pipeline with a prior and a UNet, they stay dense: give the prior's own pipeline to speed it up.

| class | why no token merges | step reuse | tested with |
|---|---|---|---|
"""


def families() -> list[tuple[str, str, list[str]]]:
    """(title, what it says, keys of its tiny models) for each file of a family."""
    from tests.models.tiny import FAMILIES

    from tokenmerge.models.find import FAMILIES as RECORDS
    from tokenmerge.models.find import knows

    built = {key: family.build() for key, family in FAMILIES.items()}
    found = []
    for record in RECORDS:
        text = " ".join((record.__doc__ or "").split())
        title, _, about = text.rstrip(".").partition(": ")
        keys = [key for key, model in built.items() if knows(record, model)]
        found.append((title, about, keys))
    return found


def row(key: str, checks: tuple[int, int] | None, release: str) -> str:
    """One line of a table; ``checks`` is None where they have not been counted yet."""
    from tests.models.tiny import FAMILIES

    from tokenmerge.models.base import KINDS
    from tokenmerge.models.find import find_hosts

    model = FAMILIES[key].build()
    hosts = find_hosts(model)
    blocks = [block for host in hosts for block in host.blocks]
    kinds = {layer.kind for block in blocks for layer in block.layers}
    merges = [name for kind, name in KINDS.items() if kind in kinds]
    merges += ["whole block"] if any(block.block_layout for block in blocks) else []
    merges += ["keys"] if any(layer.keys for block in blocks for layer in block.layers) else []
    merges += [] if all(block.batched for block in blocks) else ["image by image"]
    limits = dict.fromkeys(
        [reason for block in blocks for reason in block.dense.values()]
        + [limit for host in hosts for limit in host.limits]
    )
    skips = "stages" if any(host.stages for host in hosts) else "blocks"
    skips = skips if any(host.can_skip for host in hosts) else "none"
    tested = release if checks is None else f"{release}: {checks[0]} of {checks[1]}"
    return f"| `{key}` | {', '.join(merges)} | {skips} | {tested} | {'; '.join(limits)} |"


def row_alone(name: str, release: str) -> str:
    """One line of the table of classes in which no token merges."""
    from tokenmerge.models.undescribed import SKIPPING
    from tokenmerge.models.unsupported import REASONS

    skipping = SKIPPING[name]
    skips = f"none: {skipping.dense}" if skipping.dense else skipping.way
    return f"| `{name}` | {REASONS[name]} | {skips} | {release} |"


def known_checks() -> dict[str, tuple[int, int]]:
    """Return the numbers of checks that the pages have, by the key of a tiny model."""
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    found = re.findall(r"^\| `([^`]+)` .*?(\d+) of (\d+) \|", text, re.MULTILINE)
    return {key: (int(passed), int(number)) for key, passed, number in found}


def group_of(keys: list[str]) -> str:
    """Return the page of a family, by its tiny models."""
    from tests.models import videos
    from tests.models.tiny import FAMILIES

    if set(keys) & set(videos.FAMILIES):
        return "video"
    roots = [type(FAMILIES[key].build()).__name__ for key in keys]
    return "pictures" if any("Transformer" in name or "DiT" in name for name in roots) else "unets"


def pages(checks: dict[str, tuple[int, int]], release: str) -> dict[Path, str]:
    """Return the text of each page, with the checks of each tiny model, under a release of diffusers."""
    from tokenmerge.models.unsupported import REASONS

    parts = {group: [title, "", ABOVE] for group, title in GROUPS.items()}
    for title, about, keys in families():
        own = parts[group_of(keys)]
        own.append(f"\n## {title}\n")
        if about:
            own.append(f"{about[0].upper()}{about[1:]}.\n")
        if keys:
            own += ["| model | merging | step reuse | tested with | limits |", "|---|---|---|---|---|"]
            own += [row(key, checks.get(key), release) for key in keys]
        else:
            own.append(
                "No class of diffusers: [tests/test_api.py](../../tests/test_api.py) checks it on a UNet of the same "
                "structure."
            )
    refused = "\n".join(row_alone(name, release) for name in sorted(REASONS))
    made = {FOLDER / f"{group}.md": "\n".join(own) + "\n" for group, own in parts.items()}
    return {PAGE: HEAD + REFUSED + refused + "\n", **made}


class Outcomes:
    """A plugin of pytest that counts passed and all checks by the family in the test's name."""

    def __init__(self) -> None:
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count one test."""
        from tests.models.tiny import FAMILIES

        if report.when != "call" or report.skipped:
            return
        for key in FAMILIES:
            if re.search(rf"[\[-]{re.escape(key)}[\]-]", report.nodeid):
                self.counts[key][0] += report.passed
                self.counts[key][1] += 1


def main() -> None:
    """Run the checks and write the page."""
    outcomes = Outcomes()
    arguments = sys.argv[1:] or ["--numprocesses", "auto"]
    # This script has imported diffusers, and with it plugins of pytest.
    quiet = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = pytest.main([*quiet, *arguments, str(ROOT / "tests" / "models")], plugins=[outcomes])
    FOLDER.mkdir(exist_ok=True)
    counts = known_checks() | {key: (a, b) for key, (a, b) in outcomes.counts.items()}
    for path, text in pages(counts, f"diffusers {diffusers.__version__}").items():
        path.write_text(text, encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
