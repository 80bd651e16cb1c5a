"""Which features tell best what to merge: a block's input, its low frequencies, or the keys of its attention.

Tokens merge around self-attention of the top level of `emoji-unet`, by global matching, with proportional
attention and nothing that makes up for what merging loses. A line shows the closeness to the dense pictures
of the same seeds, the mean over the prompts, and by how much it differs from that with the block's input: the
mean and the standard error of the differences, prompt by prompt.

    python benchmarks/features.py --size 128 256 --ratio 0.5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import closeness
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmerge import PlanSharing, ToMeConfig, token_merging
from tokenmerge.planners import PLANNERS

Features = Callable[[Tensor, tuple[int, int, int], nn.Module], Tensor]


def block_input(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    return x


def low_frequencies(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    """The mean of each token and its neighbours, 3 × 3."""
    picture = x.transpose(1, 2).unflatten(2, grid[1:])
    means = F.avg_pool2d(picture, 3, stride=1, padding=1, count_include_pad=False)
    return means.flatten(2).transpose(1, 2)


def keys(x: Tensor, grid: tuple[int, int, int], block: nn.Module) -> Tensor:
    """As ToMe for vision transformers has them (arXiv 2210.09461); here the heads side by side."""
    return block.attn1.to_k(block.norm1(x))


FEATURES: dict[str, Features] = {"block input": block_input, "low frequencies": low_frequencies, "keys": keys}


@contextmanager
def compared_by(features: Features, unet: nn.Module) -> Iterator[None]:
    """Let the planner `tome` compare tokens by these features."""
    running: list[nn.Module] = []
    hooks = [
        block.register_forward_pre_hook(lambda block, args: running.append(block))
        for block in unet.modules()
        if isinstance(block, BasicTransformerBlock)
    ]
    plan = PLANNERS["tome"]

    def planner(x: Tensor, grid: tuple[int, int, int], config: ToMeConfig, step: Tensor) -> object:
        return plan(features(x, grid, running[-1]), grid, config, step)

    try:
        with mock.patch.dict(PLANNERS, {"tome": planner}):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    options = closeness.parser(__doc__).parse_args()
    pipe = closeness.load()
    # Keys and smoothed tokens are of one prompt; so each half of guidance has a plan of its own.
    config = ToMeConfig(ratio=options.ratio, proportional=True, plans=PlanSharing(guidance=False))
    for size in options.size:
        dense, found = closeness.draw(pipe, size, options), {}
        for name, features in FEATURES.items():
            with token_merging(pipe, config), compared_by(features, pipe.unet):
                found[name] = closeness.psnr(closeness.draw(pipe, size, options), dense)
        closeness.record(size, options, found)
        closeness.show(size, options, found, base="block input")


if __name__ == "__main__":
    main()
