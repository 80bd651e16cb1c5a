"""`auto` under strong guidance, with the settings for much attention and with those for little.

`auto` merges more tokens of a UNet under strong guidance if self-attention is a large part of its work, as in
`emoji-unet`. If it is a small part, as in Stable Diffusion 1.5, `auto` merges fewer tokens and skips more
steps. For each ratio, `emoji-unet` draws with both kinds of settings. A line shows the closeness to the dense
pictures, the difference between the two, and the speed-up that is counted on Stable Diffusion 1.5.

    python benchmarks/little_attention.py --out benchmarks/little_attention_cpu.jsonl
"""

from __future__ import annotations

import sys

import closeness
import diffusers
import torch
from torch import nn

from tokenmerge import ToMeConfig, token_merging
from tokenmerge.auto import with_skipped_stages
from tokenmerge.models.find import find_hosts
from tokenmerge.models.unet_stages import work_of
from tokenmerge.report import counted_speedup
from tokenmerge_tools.bench.geometry import GEOMETRIES

RATIOS = (0.25, 0.4, 0.5, 0.6, 0.75)
SIDE = 64  # of the latents: 512 × 512 pixels
MUCH, LITTLE = "much attention", "little attention"


def stable_diffusion() -> nn.Module:
    """The UNet of Stable Diffusion 1.5, without weights."""
    geometry = GEOMETRIES["sd15"]
    with torch.device("meta"):
        return getattr(diffusers, geometry.denoiser)(**geometry.config).to(torch.bfloat16).eval()


def settings(model: nn.Module, ratio: float, guidance: float) -> ToMeConfig:
    """What `auto` chooses for a UNet at a guidance scale."""
    work = work_of(find_hosts(model)[0])
    plain = ToMeConfig(ratio=ratio, max_downsample=8, planner="tiled", proportional=True)
    return with_skipped_stages(plain, work).at_guidance(guidance)


def main() -> None:
    parser = closeness.parser(__doc__)
    parser.set_defaults(size=[256], guidance=7.5, prompts=6)
    options = parser.parse_args()
    pipe, other = closeness.load(), stable_diffusion()
    for size in options.size:
        dense = closeness.draw(pipe, size, options)
        for ratio in RATIOS:
            options.ratio = ratio
            configs = {
                MUCH: settings(pipe.unet, ratio, options.guidance),
                LITTLE: settings(other, ratio, options.guidance),
            }
            found, counted = {}, {}
            for name, config in configs.items():
                with token_merging(pipe, config):
                    found[name] = closeness.psnr(closeness.draw(pipe, size, options), dense)
                counted[name] = counted_speedup(other, config, SIDE, SIDE, steps=options.steps)
                print(f"ratio {ratio:g}: {name}", file=sys.stderr, flush=True)
            closeness.record(size, options, found)
            closeness.show(size, options, found, MUCH)
            print(*(f"{name}: {value:.2f}× counted on SD 1.5" for name, value in counted.items()), sep="\n")


if __name__ == "__main__":
    main()
