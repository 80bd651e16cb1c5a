"""Token-wise reuse: a call on some tokens, where the others take residuals of their own from earlier steps.

Of a plan, the tokens that stay are computed on their own values. A token i that merges into token j gets

    γ · Δ_j + (1 − γ) · (C_i + t · T_i)

Δ_j is what the call added to token j. C_i is the cached residual of token i, and T_i is its change between
the last two dense steps. t is the time since the last dense step, in units of the distance between these
two. γ is ``blend``. The formula is that of ClusCa (arXiv 2509.10312, section 3); RAS (arXiv 2502.10389) has
γ = 0 and T = 0. Without extrapolation T is 0.

In the next step, C_i is what token i got in this one, minus t · T_i. Dense steps cache the residuals of all
tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from tokenmerge.config import MergeSettings
from tokenmerge.models.layout import Layout
from tokenmerge.models.parallel import Part
from tokenmerge.ops import Plan, unmerge_onto
from tokenmerge.runtime.merged_call import replace_image
from tokenmerge.runtime.reuse import Residual, updated


def cached_anew(
    before: Residual | None, residual: Residual, settings: MergeSettings, part: Part | None
) -> Residual:
    """What is cached on a dense step.

    Args:
        before: what was cached until then; None: nothing.
        residual: of the n tokens of the image, all of them computed.
        settings: that hold at the step.
        part: the part of the image that this process has; None: all of it.
    """
    return updated(before, residual, part) if settings.combine == "extrapolate" else residual


def refilled_result(
    layout: Layout,
    plan: Plan,
    result: Any,
    change: tuple[Tensor, Tensor] | None,
    before: Residual | None,
    settings: MergeSettings,
    distance: Tensor | None,
) -> tuple[Any, Residual]:
    """The result of a call for all tokens, made from the result for those that stay, and what is cached.

    Args:
        layout: of the call.
        plan: n tokens, of which m stay.
        result: one tensor or several, with m tokens of the image.
        change: (all tokens, those that stay), if each token gets what the call adds to it. None: it gets the
            result itself, and that is cached.
        before: what is cached. If it is None, or has another shape, tokens that are not computed are copies.
        settings: that hold at the step.
        distance: t above; None: nothing is extrapolated.
    """
    n, m = plan.inverse.shape[1], plan.keep.shape[1]
    single = isinstance(result, Tensor)
    results = [result] if single else list(result)
    latest: list[Tensor | None] = [None] * len(results)
    for i, value in enumerate(results):
        if value is None or not (single or i in layout.outputs):
            continue
        own = layout.image(value, m)
        if change is not None:
            own = own - layout.image(change[1], m)
        cached = None if before is None else before.latest[i]
        if cached is None or cached.shape != (*own.shape[:1], n, *own.shape[2:]):
            got = latest[i] = plan.unmerge(own)
        else:
            trend = None if before is None or distance is None else _trend(before, i, distance)
            got = unmerge_onto(plan, own, cached if trend is None else cached + trend, settings.blend)
            latest[i] = got if trend is None else got - trend
        image = got if change is None else layout.image(change[0], n) + got
        results[i] = replace_image(layout, value, m, partial(_instead, image))
    residual = Residual(single, tuple(latest))
    if before is not None and distance is not None:
        residual = Residual(single, tuple(latest), before.delta, before.agreement)
    return (results[0] if single else tuple(results)), residual


def _instead(image: Tensor, _: Tensor) -> Tensor:
    return image


def _trend(before: Residual, i: int, distance: Tensor) -> Tensor | None:
    """The extrapolated change of a residual since the last dense step; None if it is not extrapolated."""
    if before.delta is None or before.agreement is None:
        return None
    delta, agreement = before.delta[i], before.agreement[i]
    return None if delta is None or agreement is None else delta * (agreement * distance)
