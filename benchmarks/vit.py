"""Images per second of ViT-B/16 at 224 × 224, dense and with r tokens merged in each of its 12 layers.

The weights are random, because times do not depend on them. Rounds are interleaved, so that changes in the
machine's speed affect all variants alike. Each line shows the median of the rounds, their quartiles, the
median of the speed-ups over dense in the same round, and the speed-up expected from the FLOPs.

    python benchmarks/vit.py --r 8 13 16 --batch 8 --rounds 9
    python benchmarks/vit.py --device cuda --dtype bfloat16 --batch 64
"""

from __future__ import annotations

import functools
import statistics
from contextlib import nullcontext

import torch
import turns
from transformers import ViTConfig as HostConfig
from transformers import ViTModel

from tokenmerge import ViTConfig, token_merging
from tokenmerge.vit.report import predict_vit


@torch.inference_mode()
def measure(vit: ViTModel, pictures: torch.Tensor, numbers: list[int], rounds: int) -> dict[int, list[float]]:
    """Return the seconds per call for each r. For r = 0, the model is dense and not patched."""

    def call(r: int) -> float:
        with token_merging(vit, ViTConfig(r=r)) if r else nullcontext():
            vit(pictures)  # the first call with other layers is not representative
            return turns.seconds(lambda: vit(pictures), vit.device)

    return turns.in_turns({r: functools.partial(call, r) for r in numbers}, rounds, "r")


def main() -> None:
    parser = turns.parser(__doc__, rounds=9)
    parser.add_argument("--r", type=int, nargs="+", default=[8, 13, 16], help="default: 8 13 16")
    parser.add_argument("--batch", type=int, default=8, help="images per call (default: 8)")
    options = parser.parse_args()

    torch.manual_seed(0)
    vit = ViTModel(HostConfig()).eval().to(options.device, getattr(torch, options.dtype))
    pictures = torch.randn(options.batch, 3, 224, 224, device=vit.device, dtype=vit.dtype)
    times = measure(vit, pictures, [0, *options.r], options.rounds)
    turns.record(options, times, model="ViT-B/16", batch=options.batch)

    print(
        f"\nViT-B/16, batch {options.batch}, {options.dtype}, {options.device}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print(f"{'r':<8}{'pictures/s':>12}{'quartiles':>18}{'speed-up':>11}{'by FLOPs':>11}")
    for r, values in times.items():
        low, median, high = (options.batch / t for t in reversed(statistics.quantiles(values, n=4)))
        ratio = statistics.median(a / b for a, b in zip(times[0], values, strict=True))
        report = predict_vit(vit, ViTConfig(r=r))
        print(
            f"{r or 'dense':<8}{median:>12.2f}{f'{low:.2f} to {high:.2f}':>18}{ratio:>10.2f}x"
            f"{report.flops_dense / report.flops_merged:>10.2f}x"
        )


if __name__ == "__main__":
    main()
