"""Correction: blocks and layers add back what merging loses, as a correction step has measured it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.models.base import Layout
from tokenmerge.models.call import HostCall
from tokenmerge.ops import Plan
from tokenmerge.runtime.blocks.merged_call import Combine, add_lost, of_image
from tokenmerge.runtime.memory.caches import BlockMerge, Call
from tokenmerge.runtime.memory.reuse import Residual, residual_of


def corrected(
    residuals: dict[Call, Residual],
    number: Call,
    running: BlockMerge,
    layout: Layout,
    combine: Combine,
    call: HostCall,
    merged: Callable[[Plan], Any],
    added_to: tuple[Any, Any],
) -> Any:
    """Return the result of a block or layer: exact where it is measured what merging loses, else corrected.

    Its new residual takes the place of that of the same ``number`` in ``residuals``. ``merged`` returns the
    result on merged tokens for a plan, and ``added_to`` is what image and text of the result are added to.
    """
    before, plan = residuals.get(number), running.plan
    if plan is None:
        result = call.result()
    elif before is None:
        return merged(plan)
    else:
        result = add_lost(layout, plan, merged(plan), before.latest, combine)
    image, text = added_to
    alone = isinstance(result, Tensor)
    bases = [image if alone or i in layout.outputs else text for i in range(1 if alone else len(result))]
    residuals[number] = of_image(layout, residual_of(result, bases), running.tokens)
    return result
