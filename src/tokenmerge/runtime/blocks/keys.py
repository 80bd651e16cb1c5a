"""The scope "keys": all tokens attend to merged keys and values."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokenmerge.errors import UnsupportedModelError
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.blocks.merged_call import Combine, following
from tokenmerge.runtime.memory.state import LayerState


def keyed_call(attention: nn.Module, call: HostCall, state: LayerState, plan: Plan, combine: Combine) -> Any:
    """Return the result of self-attention in which all tokens attend to merged ones.

    Raises:
        UnsupportedModelError: keys, values and queries are projected by one layer.
    """
    if getattr(attention, "fused_projections", False):
        raise UnsupportedModelError(
            f"{state.path}: scope='keys' needs keys and values projected apart from the queries, and "
            "they are fused; call unfuse_qkv_projections(), or take scope='layers'"
        )
    assert state.keys is not None
    merged = combine(plan, state.layout.tokens_of(call))
    return following(call, state.layout, plan).replaced(state.keys, merged).result()
