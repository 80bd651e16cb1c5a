"""Merging above a similarity threshold, after CA-ToMe (arXiv 2501.00946)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.ops import Plan, make_plan, most_similar, num_tokens, strided_partition
from tokenmerge.planners.tome import num_removed

__all__ = ["plan_threshold"]


@torch.no_grad()
def plan_threshold(features: Tensor, grid: Sequence[int], config: MergeSettings, step: Tensor) -> Plan | None:
    """As :func:`tokenmerge.planners.tome.plan_tome`, with means of tokens above ``config.threshold`` alone.

    The paper merges every token whose similarity to its destination reaches the threshold, and no other, so
    that shapes depend on the picture and every block waits for the device. Here ``config.ratio`` says how
    many tokens go, whatever the picture. Of these, one below the threshold is dropped instead of merged: it
    changes neither the mean of its destination nor that one's size, and gets its destination's result, which
    the block adds to what the token was. Where all edges reach the threshold this is ToMe; where none does,
    destinations are kept as they are. A threshold that most tokens do not reach asks for a lower ratio.

    Args:
        features: ``[b, n, c]``: the block's input.
        grid: (frames, rows, columns) of its n tokens; each frame is planned on its own.
        config: ratio, threshold, strides and the seed of the partition.
        step: integer tensor of no dimensions that changes from one denoising step to the next.

    Returns:
        The plan, or None where no token would be removed.
    """
    frames, part, cell = grid[0], tuple(grid[1:]), (config.sy, config.sx)
    r = num_removed(grid, config) // frames
    if r == 0:
        return None
    features = features.reshape(-1, num_tokens(part), features.shape[-1])
    draw = (config.seed, step) if config.use_rand else None
    src, dst = strided_partition(part, cell, draw=draw, device=features.device)
    similarity, nearest = most_similar(features, src, dst)
    order = similarity.argsort(dim=1, descending=True)
    counts = (similarity >= config.threshold).to(torch.float32)
    return make_plan(src, dst, order, nearest, r, counts).joined(frames)
