"""Counts the operations that a model really runs, for models that decide at run time what to skip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    count: int = sdpa_flop_count(query, key, value)
    return count


# PyTorch 2.13 counts fused attention on every device but a CPU.
_ON_A_CPU = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}


class Counted:
    """The operations of all calls of a model within :func:`counting` so far, and the number of the calls."""

    flops: int = 0
    calls: int = 0


@contextlib.contextmanager
def counting(root: nn.Module) -> Iterator[Counted]:
    """Count the FLOPs of all calls of a model within the context, on its real inputs.

    Use it for a model that decides at run time what to skip, for example by a block cache. Other modules,
    such as a text encoder, are not counted. Neither are operations in the graphs of a compiled model.

    >>> with counting(nn.Linear(2, 3)) as counted:
    ...     pass
    >>> counted.flops
    0
    """
    counted = Counted()

    def begin(*_: Any) -> None:
        counted.calls += 1
        counted.flops -= counter.get_total_flops()

    def end(*_: Any) -> None:
        counted.flops += counter.get_total_flops()

    # The counter's module names are no help: a cache that contains the model changes them.
    with contextlib.ExitStack() as in_force:
        counter = in_force.enter_context(FlopCounterMode(display=False, custom_mapping=_ON_A_CPU))
        in_force.callback(root.register_forward_pre_hook(begin).remove)
        in_force.callback(root.register_forward_hook(end).remove)
        yield counted
