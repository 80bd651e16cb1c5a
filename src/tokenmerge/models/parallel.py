"""diffusers' context parallelism: each device gets a part of a model's sequence of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.base import is_a


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The part of each sequence that a process has."""

    index: int  # its place among the parts, 0 ≤ index < parts
    parts: int  # their number, one for each device
    group: Any  # the group of the processes that have these parts

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes; each has to call this."""
        import torch.distributed

        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total


def part_of(root: nn.Module) -> Part | None:
    """Return the part of the tokens of the blocks that this process has; None: all of them.

    Tensor parallelism splits weights and leaves all tokens to each process.

    Raises:
        UnsupportedModelError: diffusers does not say how the tokens of this class are split.
    """
    config = getattr(getattr(root, "_parallel_config", None), "context_parallel_config", None)
    if config is None:
        return None
    if getattr(root, "_cp_plan", None) is None:
        raise UnsupportedModelError(
            f"tokens cannot be merged in {type(root).__name__} under context parallelism: its class has no "
            "_cp_plan, which says where its tokens are split between devices; load the model again without "
            "enable_parallelism()"
        )
    import torch.distributed

    group = config._flattened_mesh.get_group()
    return Part(torch.distributed.get_rank(group), config._flattened_mesh.size(), group)


def splits_tokens(module: nn.Module) -> bool:
    """Return whether a hook of diffusers at this module gives it a part of its tokens."""
    hooks = getattr(module.__dict__.get("_diffusers_hook"), "hooks", {})
    return any(
        is_a(hook, "ContextParallelSplitHook") and "hidden_states" in hook.metadata for hook in hooks.values()
    )
