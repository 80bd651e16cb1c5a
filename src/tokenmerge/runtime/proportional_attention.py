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


class ProportionalAttention(TorchFunctionMode):
    """While this context lasts, fused attention adds the logarithm of each key's size to its logits.

    This happens at the call of PyTorch's fused kernel, because hosts have nothing else in common: most of
    them take no mask, or take it in a form of their own. Only the first call counts, since an adapter may
    attend to other keys after it.

    Args:
        plan: its ``sizes`` say how many tokens each key of the image stands for.
        layout: where the keys of text are, which count once.
        block: whose attention it is. Its ``path`` is read for the error message alone: torch.compile makes a
            graph for each path that is read before.

    Raises:
        UnsupportedModelError: on leaving the context, if no call attended to these keys.
    """

    def __init__(self, plan: Plan, layout: Layout, block: Any) -> None:
        super().__init__()
        self.logits = plan.sizes.log()
        self.layout = layout
        self.block = block
        self.is_pending = True

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not self.is_pending:
            return function(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        key: Tensor = given["key"]
        text = key.shape[-2] - self.logits.shape[1]
        if text < 0 or key.shape[0] % len(self.logits):
            return function(**given)
        self.is_pending = False
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
        if self.is_pending and kind is None:
            raise UnsupportedModelError(
                f"{self.block.path}: proportional=True needs attention by PyTorch's "
                "scaled_dot_product_attention, over all images of a batch at once, and this one computes it "
                "in another way; take the default attention processor, or proportional=False"
            )
