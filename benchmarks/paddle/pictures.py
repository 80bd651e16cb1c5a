"""Draw with `emoji-unet` on Paddle, dense and merged: the figures and the images of docs/paddle.md.

Run in an environment with the extra `paddle`::

    python benchmarks/paddle/pictures.py

It writes benchmarks/paddle/pictures_cpu.jsonl and docs/paddle.png: in a row, dense first, as in the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from convert import pipeline
from PIL import Image

from tokenmerge import ToMeConfig
from tokenmerge.paddle import token_merging

ROOT = Path(__file__).parents[2]
PROMPT = "a grinning face on a light blue background"
SETTINGS = {"height": 256, "width": 256, "num_inference_steps": 10, "guidance_scale": 3.0}
OURS = {
    "tokenmerge, ratio 0.5": ToMeConfig(ratio=0.5, share_guidance=False),
    "tokenmerge, ratio 0.5, shared by guidance": ToMeConfig(ratio=0.5),
    "tokenmerge, ratio 0.5, proportional": ToMeConfig(ratio=0.5, proportional=True),
    "tokenmerge, keys alone, uniform": ToMeConfig(
        ratio=0.75, scope="keys", planner="uniform", combine="keep", use_rand=False
    ),
}


@contextmanager
def own(pipe: Any) -> Iterator[None]:
    """Merge with ppdiffusers' own ToMe at a ratio of 0.5 within the context."""
    paddle.seed(0)  # what it draws from
    pipe.apply_tome(ratio=0.5)
    yield
    pipe.remove_tome()


def main() -> None:
    pipe = pipeline()
    variants: dict[str, Any] = {"dense": nullcontext, "ppdiffusers, ratio 0.5": lambda: own(pipe)}
    for name, config in OURS.items():
        variants[name] = lambda config=config: token_merging(pipe, config)
    drawn = {}
    records = []
    for name, patched in variants.items():
        with patched():
            generator = paddle.Generator().manual_seed(0)
            drawn[name] = pipe(PROMPT, generator=generator, output_type="np", **SETTINGS).images[0]
        error = float(np.mean((drawn[name] - drawn["dense"]) ** 2))
        psnr = round(float(-10 * np.log10(error)), 1) if error else None
        records.append({"prompt": PROMPT, "variant": name, "psnr": psnr, "seed": 0, **SETTINGS})
        print(name, psnr, flush=True)
        Image.fromarray((np.concatenate(list(drawn.values()), axis=1) * 255).round().astype("uint8")).save(
            ROOT / "docs" / "paddle.png"
        )
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (Path(__file__).parent / "pictures_cpu.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
