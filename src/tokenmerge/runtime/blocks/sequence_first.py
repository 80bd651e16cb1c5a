"""Calls of blocks and layers with tokens whose first axis is the sequence, and whose second one the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.runtime.blocks.lazy_tokens import LazyTokens


class SwappedTokens(LazyTokens):
    """Tokens between two blocks, with the sequence as their first axis and the batch as their second one."""

    base: LazyTokens  # the same tokens with the batch as their first axis

    @classmethod
    def of(cls, base: LazyTokens) -> SwappedTokens:
        """Return tokens that are made when somebody reads them or the next block takes their base."""
        batch, tokens, channels = base.shape
        swapped = cls.like(torch.empty(tokens, batch, channels, device="meta"), base)
        swapped.base = base
        return swapped

    def make(self) -> Tensor:
        """Return the tokens of the base, with the first two axes in each other's place."""
        return self.base.read().transpose(0, 1)


def batch_first(layout: Layout, call: HostCall, run: Callable[[HostCall], Any]) -> Any:
    """Return the result of a call, which ``run`` returns for a call with the batch as the first axis."""
    tokens = layout.tokens or call.names[0]

    def method(*args: Any, **kwargs: Any) -> Any:
        inner_call = HostCall(call.function, call.names, args, kwargs)
        return _swapped(inner_call.replaced(tokens, _swapped(inner_call.argument(tokens))).result())

    changed = HostCall(method, call.names, call.args, call.kwargs)
    return _swapped(run(changed.replaced(tokens, _swapped(call.argument(tokens)))))


def _swapped(value: Tensor) -> Tensor:
    """Return tokens with their first two axes in each other's place."""
    if isinstance(value, SwappedTokens):
        return value.base
    return SwappedTokens.of(value) if isinstance(value, LazyTokens) else value.transpose(0, 1)
