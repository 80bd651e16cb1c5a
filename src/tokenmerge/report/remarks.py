"""Remarks on a generation: how close its image is, what the default method missed, and what to do."""

from __future__ import annotations

from tokenmerge.plans import Estimate, RunFacts
from tokenmerge.plans.few_steps import can_be_as_close
from tokenmerge.plans.learned import margin_of
from tokenmerge.plans.method import Method
from tokenmerge.report.closeness import Closeness
from tokenmerge.report.prediction import Report
from tokenmerge.report.summary import CLOSENESS
from tokenmerge.runtime.memory.run_log import RunLog

_FAR = 30  # dB to the dense image, below which many details differ, as in ``plans.estimate``


def misfits_of(run: RunLog | None) -> str:
    """Return how many calls of the last run could use nothing that was cached, or an empty string."""
    if run is None or not run.misfits:
        return ""
    plural = "s" if run.misfits > 1 else ""
    return f"{run.misfits} call{plural} reused nothing, whose sample follows from none of the step before"


def forecast_of(method: Method, facts: RunFacts) -> str:
    """Return how close an image is expected to be before the run, or an empty string if it is unknown."""
    return str(method.expected(facts)) if facts.follows_steps else ""


def estimate_in_report(method: Method, facts: RunFacts, closeness: Closeness | None, report: Report) -> str:
    """Return the lines of a report on closeness. ``closeness`` is that of the last run, or None before it."""
    estimate = None
    if closeness is None:
        near = method.expected(facts)
        scale = "" if facts.guidance is None else f", guidance {facts.guidance:g}"
        text = f"{CLOSENESS}, before a run{scale}: {near}"
    elif closeness.estimate is not None:
        estimate = closeness.estimate
        text = f"{CLOSENESS}, from the last run: {estimate}"
    else:
        text = f"no estimate: {closeness.why_none}" if closeness.why_none else ""
    if method.min_psnr is not None and not method.is_dense(facts):
        text += f"\nmin_psnr {method.min_psnr:g}: {_tolerated(method, facts, estimate, report)}"
    return text


def remarks_on(
    method: Method,
    facts: RunFacts,
    report: Report | None,
    run: RunLog | None,
    estimate: Estimate | None,
    is_left_alone: bool,
) -> dict[str, str]:
    """Return what the default method added or did not reach, by heading.

    A model that ``is_left_alone`` runs on all tokens, since other code looks into it. The remark on that code
    takes the place of the warning.
    """
    if not facts.follows_steps:
        return {}
    remarks = {}
    if not is_left_alone:
        # A run has an estimate of its own.
        remarks["warning"] = method.shortfall(facts, closeness=run is None)
    if method.min_psnr is not None and report is not None and not method.is_dense(facts):
        remarks[f"min_psnr {method.min_psnr:g}"] = _tolerated(method, facts, estimate, report)
    if estimate is None:
        return remarks
    fewer = 0 if report is None else _steps_as_long(report, facts.steps)
    merges = run is not None and run.config.merges
    if 1 < fewer < facts.steps and can_be_as_close(facts, merges):
        same = f"{fewer} steps of the unchanged model take as long"
        remarks["few steps"] = f"{same}, and can be as close; compare both"
    elif estimate.psnr < _FAR:
        remarks["for a closer image"] = "a lower speedup, or more steps"
    return remarks


def _steps_as_long(report: Report, steps: int) -> int:
    """Return how many steps of the unchanged model have as many operations as all steps of a generation."""
    of_steps = report.flops_of_steps
    return round(sum(of_steps) / report.flops_dense if of_steps else steps / report.speedup)


def _tolerated(method: Method, facts: RunFacts, estimate: Estimate | None, report: Report) -> str:
    """Return what the tolerance of the default method adds to a run, or what it cost in the last one."""
    assert method.min_psnr is not None
    wanted = method.min_psnr
    learned = method.learned(facts)
    aim = f"{wanted + margin_of(learned):.3g} dB, to be safe"
    if learned is not None:
        return f"the fastest plan whose estimate before a run is at least {aim}"
    if estimate is None:
        adds = f"adds full steps until its estimate is {aim}, which costs speed"
        if method.settings(facts) == method.settings_without_tolerance(facts):
            return f"a run {adds}"
        return f"a run begins slower than speedup={method.speedup:g}, and {adds}"
    reached = "above" if estimate.psnr >= wanted else "below"
    told = f"the estimate is {reached} {wanted:g} dB; the plan aims at {aim}."
    # Steps that fill a cache run whole in any plan.
    filled = max(len(report.flops_of_steps) - facts.steps, 0)
    planned = method.plan(facts).speedup
    ran = f"{report.speedup:.2f}×"
    due = f"{(filled + facts.steps) / (filled + facts.steps / planned):.2f}×"
    if ran == due:
        return f"{told} No step was added"
    lower = "a lower speedup without min_psnr can be faster"
    return f"{told} This cost speed: {ran} in place of {due}; {lower}"
