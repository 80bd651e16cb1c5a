"""Write docs/supported-models.md from the families' own records, and the checks that each of them passes.

python docs/supported_models.py          # runs the checks of every family, some minutes
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "supported-models.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

HEAD = """\
# Supported models

These diffusion models work. [Vision transformers](vision-transformers.md) have a page of their own.

| family | classes |
|---|---|
| Stable Diffusion 1.x, 2.x, SDXL and models derived from them (inpainting, LCM, GLIGEN, IP-Adapter …) | `UNet2DConditionModel` |
| their ControlNets: one, several, Union | `ControlNetModel`, `MultiControlNetModel`, `ControlNetUnionModel` |
| CompVis and Stability AI repositories | `model.model.diffusion_model` |
| UNets of AnimateDiff, SparseCtrl, Stable Video Diffusion, I2VGen-XL, ModelScope, AudioLDM 2, ControlNet-XS | `UNetMotionModel`, `UNetSpatioTemporalConditionModel` … |
| diffusion transformers of pictures: SD3 and 3.5, FLUX.1 and .2, Chroma, Qwen-Image, Lumina 2, Z-Image, AuraFlow, CogView3+ and 4, PixArt, Hunyuan-DiT, DiT, Sana … and their ControlNets | `SD3Transformer2DModel`, `FluxTransformer2DModel` … |
| diffusion transformers of [video](video.md): Wan, HunyuanVideo, CogVideoX, Mochi, LTX, Latte, Cosmos, Kandinsky 5 … | `WanTransformer3DModel`, `HunyuanVideoTransformer3DModel` … |
| diffusion transformers that edit pictures, with [reference pictures](choosing-settings.md#reference-pictures) in the sequence: FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit and Layered, JoyImage-Edit, LongCat-Image-Edit, FIBO Edit | `FluxTransformer2DModel`, `JoyImageEditTransformer3DModel` … |

If nothing would merge in a model, you get an error. Some classes are [refused by name](#refused-by-name), with the reason.
[Choosing settings](choosing-settings.md) says which other tools merging works with, and [adding a model](adding-a-model.md)
says how to add one.

The tables below have these columns:

- **merges**: the parts of a transformer block that can run on merged tokens. Each part can merge on its own
  (`scope="layers"`, chosen by `merge_attn`, `merge_crossattn`, `merge_mlp`). *Whole block* means that all parts can merge
  at once (`scope="block"`). *Keys* means that keys and values of attention can merge alone (`scope="keys"`).
- **plan**: *shared by the batch* means that all images of a batch merge alike, since the position tables of the model have no
  batch axis. The picture that such a model makes from a seed depends on the other pictures of its batch. In all other models it
  does not.
- **checks**: how many tests pass, on tiny random models of diffusers' own classes. With ratio 0 the output is bit-equal. With
  tokens reordered and none removed it is equal up to rounding, so every position, mask and condition follows its token. Attention
  receives fewer tokens. Nothing stays after removal. Any size and batch works, and so do copies, pickles and gradients.

`python docs/supported_models.py` writes this page from `src/tokenmerge/models/families/` and from a run of `tests/models/`.
"""

REFUSED = """
## Refused by name

`apply_token_merging` raises `UnsupportedModelError` for these, with the reason:

| class | why |
|---|---|
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


def row(key: str, checks: dict[str, tuple[int, int]] | None) -> str:
    """One line of a table."""
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
    plan = "per image" if all(block.batched for block in blocks) else "shared by the batch"
    limits = dict.fromkeys(
        [reason for block in blocks for reason in block.dense.values()]
        + [limit for host in hosts for limit in host.limits]
    )
    passed = "" if checks is None else "{} of {}".format(*checks[key])
    return f"| `{key}` | {', '.join(merges)} | {plan} | {passed} | {'; '.join(limits)} |"


def page(checks: dict[str, tuple[int, int]] | None) -> str:
    """Return the whole page; without ``checks`` their column is empty."""
    from tokenmerge.models.unsupported import REASONS

    parts = [HEAD]
    for title, about, keys in families():
        parts.append(f"\n## {title}\n")
        if about:
            parts.append(f"{about[0].upper()}{about[1:]}.\n")
        if keys:
            parts += ["| model | merges | plan | checks | limits |", "|---|---|---|---|---|"]
            parts += [row(key, checks) for key in keys]
        else:
            parts.append(
                "No class of diffusers: [tests/test_api.py](../tests/test_api.py) checks it on a UNet of the same structure."
            )
    refused = "\n".join(f"| `{model}` | {reason} |" for model, reason in sorted(REASONS.items()))
    return "\n".join(parts) + "\n" + REFUSED + refused + "\n"


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
    status = pytest.main(["-q", "--numprocesses", "auto", str(ROOT / "tests" / "models")], plugins=[outcomes])
    PAGE.write_text(page({key: (a, b) for key, (a, b) in outcomes.counts.items()}), encoding="utf-8")
    sys.exit(status)


if __name__ == "__main__":
    main()
