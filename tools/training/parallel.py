"""Data parallelism: several processes, each with a share of every batch, take the same steps.

Two processes of one thread use a CPU with two cores much better than one process of two threads, which wait
for each other at every operation. torchrun starts them; without it there is one process and nothing to do.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn


def start() -> tuple[int, int]:
    """Join the other processes; return this one's rank and how many there are."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    return int(os.environ.get("RANK", "0")), world


def average_gradients(model: nn.Module, world: int) -> None:
    """Replace every gradient by its mean over the processes."""
    if world == 1:
        return
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    pieces = (flat / world).split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))
