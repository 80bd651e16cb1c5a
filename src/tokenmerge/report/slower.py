"""Which blocks of a report take longer merged than dense, by timings on the device."""

from __future__ import annotations

from collections.abc import Callable

from tokenmerge.planners.calibration import SIDES
from tokenmerge.report.prediction import Report

_MOST_TIMED = SIDES[-1] ** 2


def slower_than_dense(report: Report, fewest_tokens: Callable[[], int]) -> str | None:
    """Say where merging saves operations but takes longer than dense; None: nowhere.

    Only blocks that merge attention are compared. Whole blocks and MLPs save more than attention does, and
    were not timed.

    Args:
        report: the counted operations.
        fewest_tokens: returns the fewest tokens for which merged attention is faster on the device. It may
            run measurements, so it is called only if the report has grids small enough to be in doubt.
    """
    attention = [
        row for row in report.rows if "attn1" in row.merged and row.merged_tokens < row.tokens <= _MOST_TIMED
    ]
    if not attention or min(row.tokens for row in attention) >= (fewest := fewest_tokens()):
        return None
    slow = [row for row in attention if row.tokens < fewest]
    blocks = sum(row.blocks for row in slow)
    tokens = " and ".join(str(tokens) for tokens in sorted({row.tokens for row in slow}))
    what = f"{blocks} block{'s merge' if blocks > 1 else ' merges'} attention on {tokens} tokens"
    if fewest > _MOST_TIMED:
        return f"{what}; merged attention was timed on this device, and was faster on none of the grids"
    return (
        f"{what}, where it takes longer than dense: on this device it was faster from {fewest} tokens on; "
        f"min_tokens={fewest} leaves smaller grids dense"
    )
