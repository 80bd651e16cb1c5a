"""What a patch does, in a few lines."""

from __future__ import annotations

import dataclasses

from tokenmerge.config import ToMeConfig
from tokenmerge.report.cache_limit import in_words
from tokenmerge.report.prediction import Report, saved
from tokenmerge.runtime.run_log import RunLog, in_kinds


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Facts for the summary, besides settings, counts and the last run.

    Attributes:
        models: classes of the models that merge.
        method: name of the settings; empty: they have none.
        blocks: number of transformer blocks of the denoiser.
        dtype: dtype of its weights.
        scale: pixels per side of a latent position; None: sizes are given in latents.
        slower: text about blocks that take longer merged than dense; None: none are known.
        watched: text about other people's code that looks into the model; empty: there is none.
    """

    models: tuple[str, ...]
    method: str
    blocks: int
    dtype: str
    scale: int | None = None
    slower: str | None = None
    watched: str = ""


def summary(
    config: ToMeConfig, conditions: Conditions, report: Report | None, run: RunLog | None
) -> list[str]:
    """The lines of the summary.

    Args:
        config: the settings.
        conditions: further facts.
        report: the counts at the size and steps of the last run, or the default ones; None: unknown.
        run: what happened in the last run; None: there was none.
    """
    models = " + ".join(conditions.models)
    named = f"{conditions.method}, ratio {config.ratio:g}" if conditions.method else str(config)
    lines = [f"Token merging in {models}: {named}"]
    if report is not None:
        lines.append(f"  merging: {_merging(config, conditions, report)}")
    if config.reuse.on:
        lines.append(f"  step reuse: {_reuse(config, report)}")
    if report is not None:
        lines += [f"  {_counted(conditions, report)}", f"  {_kept(conditions, report)}"]
    if conditions.slower is not None:
        lines.append(f"  slower than dense: {conditions.slower}")
    if conditions.watched:
        lines.append(f"  left alone: {conditions.watched}")
    if run is not None:
        lines.append(f"  last run: {_happened(run)}")
    return lines


def _merging(config: ToMeConfig, conditions: Conditions, report: Report) -> str:
    rows = [row for row in report.rows if row.merged_tokens < row.tokens]
    if not rows:
        return "no block merges at this size; patch.report() says why"
    most = max(rows, key=lambda row: row.tokens)
    merged = ", ".join(dict.fromkeys(row.merged for row in rows))
    where = f"{merged} of {len(rows)} of {conditions.blocks} blocks"
    what = f"{most.tokens} → {most.merged_tokens} tokens in {where}"
    if not config.correction.on:
        return what
    return f"{what}; 1 of {config.correction.every} full steps is dense and corrects the others"


def _reuse(config: ToMeConfig, report: Report | None) -> str:
    others = "the others skip parts of the model and extrapolate their outputs"
    if report is None or report.steps is None:
        return f"1 of {config.reuse.every:g} steps is full; {others}"
    # Steps outside the merging part of the generation skip nothing. Neither does its first one, nor its
    # second one if the second step of a whole generation is full.
    merging = [i for i in range(report.steps) if config.schedule.merges(i, report.steps)]
    runs = config.reuse.steps_of(report.steps).full
    full = report.steps - len(set(merging[2 if 1 in runs else 1 :]) - set(runs))
    if full == report.steps:
        return f"all {full} steps are full, as there are too few to skip any"
    return f"{full} of {report.steps} steps are full; {others}"


def _counted(conditions: Conditions, report: Report) -> str:
    scale, unit = (conditions.scale, "px") if conditions.scale else (1, "latents")
    size = f"{report.width * scale} × {report.height * scale} {unit}, batch {report.batch}"
    if report.steps is not None:
        size += f", {report.steps} steps"
    mean = report.flops_merged if report.flops_mean is None else report.flops_mean
    share = saved(report.flops_dense, mean)
    return f"counted at {size}: {share} of the operations saved ({report.flops_dense / mean:.2f}×)"


def _kept(conditions: Conditions, report: Report) -> str:
    if not report.kept_bytes:
        return "cache between steps: none"
    return f"cache between steps: {in_words(report.kept_bytes)} ({conditions.dtype})"


def _happened(run: RunLog) -> str:
    kinds = run.kinds
    if not kinds:
        steps = "" if run.steps is None else f"{run.steps} steps, "
        return f"{steps}{run.tokens} tokens at the finest level"
    done = kinds.total()
    steps = f"{done} steps" if done == run.steps else f"{done} of {run.steps} steps"
    return f"{steps} in {run.seconds:.1f} s ({in_kinds(kinds)}), {run.tokens} tokens at the finest level"
