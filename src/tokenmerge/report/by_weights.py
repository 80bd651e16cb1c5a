"""Counts what step reuse saves in a model whose call is not described, from its weights alone."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmerge.config import ToMeConfig
from tokenmerge.models.base import Host
from tokenmerge.models.undescribed import skipped_parts
from tokenmerge.models.work import work_of
from tokenmerge.plans.generation import StepKind, plan_generation
from tokenmerge.report.notes import signs_of
from tokenmerge.report.prediction import Report

_NOTE = (
    "the call of this model is not described: operations are those of its weights for one token, and "
    "attention is not counted"
)


def count_by_weights(
    hosts: Sequence[Host], config: ToMeConfig, batch: int, steps: int | None, cached: int
) -> Report:
    """Count what a generation runs of the weights of some models, of which none merges tokens.

    Without ``steps``, it counts one call that runs everything. ``cached`` are the bytes that the last run
    cached between steps.
    """
    shares = [share for host in hosts for share in work_of(host).shares]
    dense = round(sum(2 * share.amount.fixed for share in shares))
    least = round(sum(2 * share.amount.fixed for share in shares if share.part == "always"))
    plan = plan_generation(config, steps) if steps and config.reuse.on else ()
    of_steps = tuple(dense if step.kind is StepKind.FULL else least for step in plan)
    return Report(
        " + ".join(type(host.root).__name__ for host in hosts),
        height=0,
        width=0,
        batch=batch,
        rows=(),
        flops_dense=dense,
        flops_merged=dense,
        notes=(
            *dict.fromkeys(f"steps skip {skipped_parts(host)}" for host in hosts),
            *dict.fromkeys(f"no token merges in {host.unmerged}" for host in hosts),
            _NOTE,
        ),
        kept_bytes=cached,
        steps=steps if of_steps else None,
        flops_mean=round(sum(of_steps) / len(of_steps)) if of_steps else None,
        flops_of_steps=of_steps,
        step_signs=signs_of(plan, merges=False, is_unet=False),
    )
