"""A made-up trial, without drawing."""

from __future__ import annotations

from typing import Any

from PIL import Image

from tokenmerge_tools.method_spec import MethodSpec
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.play.trials import Fewer, Trial


def trial(
    method: str = "tome",
    ratio: float = 0.5,
    speedup: float = 2.0,
    seconds: tuple[float, float] = (2, 1),
    psnr: float = 30.0,
    groups_text: str = "groups",
    summary: str = "summary",
    fewer: Fewer | None = None,
    **changes: Any,
) -> Trial:
    picture = Image.new("RGB", (4, 4))
    amount = {"speedup": speedup} if method == "auto" else {"ratio": ratio}
    options = GenerateOptions(
        **{
            "prompt": "a red apple",
            "merging": MethodSpec(method, amount),
            **changes,
        }
    )
    return Trial(options, picture, picture, picture, groups_text, *seconds, psnr, summary, fewer=fewer)
