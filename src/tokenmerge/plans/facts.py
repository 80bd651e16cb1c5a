"""What a generation plan is made from: the facts about one generation, frozen when it begins."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tokenmerge.models.base import Host
from tokenmerge.models.work import Work, work_of

ModelClass = Literal["unet", "transformer", "other"]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about one generation. They hold from its first step to its last.

    Attributes:
        model: class of the model: a UNet whose deep stages can be skipped, a transformer whose blocks can run
            on merged tokens as a whole, or another one, which gets the most careful row of the policy.
        work: how the work of a dense call is shared.
        grid: frames, rows and columns of the finest token grid at this size.
        steps: number of denoising steps.
        guidance: scale of classifier-free guidance; None: unknown, which counts as strong.
        ends_clean: whether almost no noise is left before the last step, which then changes little.
        follows_steps: whether the denoising step is known, so that settings can change over the steps.
        can_skip: whether step reuse can skip parts of the model here.
        whole_blocks: whether all blocks can merge as a whole here.
        layers: whether attention can merge alone here.
        proportional: whether attention can count a merged token as often as the tokens it stands for.
        number_bytes: bytes of one number in all samples of a call: 4 in bfloat16 with guidance. The policy
            limits what corrections may cache, see :func:`tokenmerge.plans.correction_bytes`.
        fewest_tokens: on token grids with fewer tokens than this, merging saves hardly any time.
    """

    model: ModelClass
    work: Work
    grid: tuple[int, int, int]
    steps: int
    guidance: float | None = None
    ends_clean: bool = False
    follows_steps: bool = True
    can_skip: bool = True
    whole_blocks: bool = False
    layers: bool = True
    proportional: bool = True
    number_bytes: int = 4
    fewest_tokens: int = 0

    def tokens(self, level: int) -> int:
        """Return the number of tokens of the grid at a resolution level."""
        frames, rows, columns = self.grid
        return frames * -(-rows // level) * -(-columns // level)


def facts_of(host: Host, grid: tuple[int, int, int], steps: int, **more: Any) -> Facts:
    """Return the facts about a generation with a model of :mod:`tokenmerge.models`.

    Args:
        host: the denoiser.
        grid: frames, rows and columns of its finest token grid.
        steps: number of denoising steps.
        more: other fields of :class:`Facts`.
    """
    whole = all(block.block_layout is not None for block in host.blocks)
    attends = any(layer.kind == "attn1" for block in host.blocks for layer in block.layers)
    facts = {"can_skip": host.can_skip, "whole_blocks": whole, "layers": attends, **more}
    model: ModelClass = "other"
    if host.deep_stages:
        model = "unet"
    elif whole and all(block.level == 1 for block in host.blocks):
        model = "transformer"
    return Facts(model, work_of(host), grid, steps, **facts)
