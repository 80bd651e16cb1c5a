"""Dense, tomesd, tokenmerge and the oracle at the same scope: self-attention of the top level, ratio 0.5.

The model is a UNet with the geometry of Stable Diffusion 1.5 and random weights, called with a batch of 2 as
in classifier-free guidance. The oracle runs self-attention on the first n − r tokens and merges nothing: no
method that merges around self-attention can be faster. "one plan" uses tiled matching, with one plan for all
down blocks and one for all up blocks. Rounds are interleaved, so that changes in the machine's speed affect
all variants alike. Each line shows the median of the rounds and their quartiles.

    python benchmarks/same_scope.py --size 512 768 --rounds 7
    python benchmarks/same_scope.py --device cuda --dtype float16 --size 512 768 1024
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tomesd
import torch
import turns
from diffusers import UNet2DConditionModel

import tokenmerge
from tokenmerge import MergeSharing

RATIO = 0.5


@contextmanager
def tomesd_patch(unet: UNet2DConditionModel) -> Iterator[None]:
    tomesd.apply_patch(unet, ratio=RATIO)
    try:
        yield
    finally:
        tomesd.remove_patch(unet)


@contextmanager
def oracle(unet: UNet2DConditionModel) -> Iterator[None]:
    top = [
        m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock" and m.attn1.query_dim == 320
    ]

    def on_fewer_tokens(forward: Callable) -> Callable:
        def call(x: torch.Tensor, **kwargs: object) -> torch.Tensor:
            m = x.shape[1] - int(x.shape[1] * RATIO)
            return torch.cat([forward(x[:, :m], **kwargs), x[:, m:]], dim=1)

        return call

    for block in top:
        block.attn1.forward = on_fewer_tokens(block.attn1.forward)
    try:
        yield
    finally:
        for block in top:
            del block.attn1.forward


def with_settings(**settings: Any) -> Callable[[UNet2DConditionModel], AbstractContextManager]:
    return lambda unet: tokenmerge.token_merging(unet, tokenmerge.ToMeConfig(ratio=RATIO, **settings))


VARIANTS: dict[str, Callable] = {
    "dense": lambda unet: nullcontext(),
    "oracle": oracle,
    "tokenmerge": with_settings(),
    "one plan": with_settings(planner="tiled", merge_sharing=MergeSharing(blocks=True)),
    "tomesd": tomesd_patch,
}


@torch.inference_mode()
def measure(unet: UNet2DConditionModel, size: int, rounds: int) -> dict[str, list[float]]:
    like = {"device": unet.device, "dtype": unet.dtype}
    sample = torch.randn(2, 4, size // 8, size // 8, **like)
    text = torch.randn(2, 77, 768, **like)

    def call(variant: Callable) -> float:
        with variant(unet):
            return turns.seconds(lambda: unet(sample, 500, text), unet.device)

    calls = {name: functools.partial(call, variant) for name, variant in VARIANTS.items()}
    return turns.in_turns(calls, rounds, f"{size} × {size}")


def main() -> None:
    parser = turns.parser(__doc__, rounds=7)
    parser.add_argument("--size", type=int, nargs="+", default=[512, 768], help="pixels (default: 512 768)")
    options = parser.parse_args()

    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).eval()
    unet.to(options.device, getattr(torch, options.dtype))
    for size in options.size:
        times = measure(unet, size, options.rounds)
        turns.record(options, times, size=size, batch=2, ratio=RATIO)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f"\n{size} × {size}, batch 2, {options.dtype}, {options.device}, ", end="")
        print(f"{torch.get_num_threads()} threads")
        print(f"{'variant':<12}{'median s':>10}{'quartiles s':>20}{'speed-up':>10}{'over oracle':>13}")
        for name, values in times.items():
            low, _, high = statistics.quantiles(values, n=4)
            over = statistics.median(a / b for a, b in zip(values, times["oracle"], strict=True)) - 1
            print(
                f"{name:<12}{medians[name]:>10.3f}{f'{low:.3f} to {high:.3f}':>20}"
                f"{medians['dense'] / medians[name]:>9.2f}x{100 * over:>11.1f} %"
            )


if __name__ == "__main__":
    main()
