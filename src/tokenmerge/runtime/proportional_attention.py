"""Proportional attention: a merged token counts for as many keys as it stands for (arXiv 2210.09461)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.layout import Layout
from tokenmerge.ops import Plan

__all__ = ["ProportionalAttention"]


class ProportionalAttention(TorchFunctionMode):
    """While it lasts, fused attention adds the logarithm of each key's size to its logits.

    At the call of the fused kernel and not before, because hosts agree on nothing else: most of them take
    no mask, or take it in a form of their own.

    Only the first call counts: what an adapter computes behind it looks at other keys.

    Args:
        plan: what the image's keys stand for.
        layout: where the keys of text stand, which count once.
        block: whose attention it is. Its ``path`` is looked at for the message alone: torch.compile would
            make a graph for each path that is looked at before.

    Raises:
        UnsupportedModelError: on leaving it, if no call was one that attends to these keys.
    """

    def __init__(self, plan: Plan, layout: Layout, block: Any) -> None:
        super().__init__()
        self.logits = plan.sizes.log()
        self.layout = layout
        self.block = block
        self.waits = True

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not self.waits:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        key: Tensor = given["key"]
        text = key.shape[-2] - self.logits.shape[1]
        if text < 0 or key.shape[0] % len(self.logits):
            return function(**given)
        self.waits = False
        bias = F.pad(self.logits, (text, 0) if self.layout.text == "first" else (0, text)).to(key.dtype)
        # Hosts that fold heads into the batch repeat each image for its heads.
        bias = bias.repeat_interleave(key.shape[0] // len(bias), 0) if len(bias) != key.shape[0] else bias
        bias = bias.view(len(bias), *[1] * (key.ndim - 2), -1)
        mask = given.get("attn_mask")
        if mask is not None and mask.dtype == torch.bool:
            bias = torch.where(mask, bias, float("-inf"))
        elif mask is not None:
            bias = bias + mask
        return function(**{**given, "attn_mask": bias})

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self.waits and kind is None:
            raise UnsupportedModelError(
                f"{self.block.path}: proportional=True needs attention by PyTorch's "
                "scaled_dot_product_attention, over all images of a batch at once, and this one computes it "
                "in another way; take the default attention processor, or proportional=False"
            )
