"""What a patch does, in a few lines, and what each step of a run did, as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmerge.config import ToMeConfig
from tokenmerge.config.checks import MOST_STEPS
from tokenmerge.config.origin import RATIO, is_default
from tokenmerge.models.base import Host
from tokenmerge.models.placement import dtype_of
from tokenmerge.models.undescribed import skipped_parts
from tokenmerge.report.notes import legend
from tokenmerge.report.prediction import Report, saved
from tokenmerge.runtime.memory.run_log import RunLog, StepRow
from tokenmerge.text_table import Tabled, TextTable

# The lowest speed-up by the clock that is told, as a share of that by operations. It is that of the lowest
# median at 2× by operations, which is 1.7× for SD 1.5 at 768 px on an H100 (benchmarks/gpu_h100*.jsonl, in a
# table of docs/gpu.md).
_LEAST_BY_THE_CLOCK = 0.85
_WORTH_TELLING = 1.05  # the lowest speed-up by operations of which one decimal shows more than 1.0×
CLOSENESS = "closeness to dense"  # the heading of what is known of it


@dataclasses.dataclass(frozen=True)
class Conditions:
    """Facts for the summary, besides settings, counts and the last run."""

    models: tuple[str, ...]  # classes of the models that merge
    method: str  # name of the settings, or empty
    denoiser: Host  # the model that the counts are about
    # Pixels per side of a latent position, or None if sizes are given in latents.
    scale: int | None = None
    pictures: int | None = None  # number of images that a call of the denoiser draws, or None if unknown
    guidance: float | None = None  # scale of classifier-free guidance, 1 for none, or None if unknown
    merging_pays: bool = False  # whether merging saves time here; if not, the default method does not merge
    forecast: str = ""  # how close an image probably is, before a run, or an empty string if unknown
    gone: str = ""  # why the models no longer merge, or an empty string if they do
    remarks: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further lines, by their headings


def summary(
    config: ToMeConfig, conditions: Conditions, report: Report | None, run: RunLog | None
) -> list[str]:
    """Return the lines of the summary: what the run gained and how close it is, and then what was done.

    ``report`` has the counts at the size and steps of the last run, or at the default ones before it. It is
    None if they could not be counted.
    """
    lines = [f"tokenmerge in {' + '.join(conditions.models)}: {_asked_for(config, conditions)}"]
    if conditions.gone:
        lines.append(f"  {conditions.gone}")
    remarks = [f"  {heading}: {text}" for heading, text in conditions.remarks.items() if text]
    if run is not None:
        ran = run.kinds.total()
        setting = _setting(conditions, run, run.all_steps, ran + run.filled if ran else None)
        took = f", {run.seconds:.1f} s of denoising" if run.steps else ""
        lines.append(f"  last run: {setting}{took}")
    elif conditions.gone:
        return lines
    if run is None and report is not None:
        example = f"with the pipeline's defaults ({_setting(conditions, report, report.steps)})"
        if is_default(conditions.method):  # other sizes and steps have other plans
            lines.append(f"  no run yet; {example}: {_expected_gain(conditions, report)}")
            if conditions.denoiser.unmerged:
                return [*lines, *remarks, *_without_merging(conditions.denoiser)]
            return [*lines, "  for your size: print(patch.report(height=…, width=…, steps=…))", *remarks]
        lines.append(f"  no run yet; {example}:")
    if report is not None:
        lines.append(f"  counted by operations: {report.speedup:.2f}× ({_saved_share(conditions, report)})")
    lines += remarks
    if report is not None and report.step_signs:
        lines.append(f"  plan: {report.step_signs}")
        lines += [f"        {line}" for line in legend(report.step_signs)]
    elif config.reuse.on:
        lines.append(f"  step reuse: 1 of {config.reuse.every:g} steps is full; the others skip parts")
    elif is_default(conditions.method):
        lines.append("  plan: every step is full: it runs the whole model")
    if report is not None:
        dtype = str(dtype_of(conditions.denoiser.root)).removeprefix("torch.")
        kept = f"{in_words(report.kept_bytes)} ({dtype})" if report.kept_bytes else "none"
        if conditions.denoiser.unmerged:
            lines += _without_merging(conditions.denoiser)
        else:
            lines.append(f"  merging: {_merging(config, conditions, report)}")
        lines.append(f"  cache between steps: {kept}")
    return lines


def _without_merging(denoiser: Host) -> list[str]:
    """Return the lines on a model in which no token merges: what steps skip, and why nothing merges."""
    return [f"  skipped: {skipped_parts(denoiser)}", f"  merging: none in {denoiser.unmerged}"]


def _expected_gain(conditions: Conditions, report: Report) -> str:
    """Return what the default method gains in a run by default, before the first run."""
    gain = f"{report.speedup:.2f}× by operations"
    if "min_psnr" in conditions.method:
        gain = f"at most {gain}"
    if report.kept_bytes > 0:
        gain += f", {in_words(report.kept_bytes)} cached"
    if conditions.forecast:
        gain += f"; {CLOSENESS}: {conditions.forecast}"
    return gain


def _saved_share(conditions: Conditions, report: Report) -> str:
    """Return the share of the operations that is saved, and what to expect by the clock."""
    share = f"{saved(report.flops_dense, report.flops)} of the operations saved"
    if report.speedup < _WORTH_TELLING:
        return share
    if not is_default(conditions.method):
        return f"{share}; expect less by the clock"
    least = _LEAST_BY_THE_CLOCK * report.speedup
    return f"{share}; expect {least:.1f} to {report.speedup:.1f}× by the clock"


def _asked_for(config: ToMeConfig, conditions: Conditions) -> str:
    if conditions.method == RATIO:
        return f"ratio {config.ratio:g}, merging alone"
    if is_default(conditions.method):
        return f"the default method, {conditions.method}"
    return f"{conditions.method}, ratio {config.ratio:g}" if conditions.method else str(config)


def _merging(config: ToMeConfig, conditions: Conditions, report: Report) -> str:
    rows = [row for row in report.rows if row.merged_tokens < row.tokens]
    if report.flops == report.flops_dense and (is_default(conditions.method) or not config.merges):
        return "none"
    if not rows and is_default(conditions.method):
        if conditions.merging_pays:
            return "none; step reuse alone changes the image less"
        tokens = math.prod(conditions.denoiser.grid_at(report.height, report.width, report.frames))
        return f"none; on {tokens} tokens it saves too little time"
    if not rows:
        return "no block merges at this size; patch.report() says why"
    most = max(rows, key=lambda row: row.tokens)
    merged = ", ".join(dict.fromkeys(row.layers for row in rows))
    of_all = f"{len(rows)} of {len(conditions.denoiser.blocks)} transformer blocks"
    parts = "" if merged == "whole block" else f"{merged} of "
    what = f"{most.tokens} → {most.merged_tokens} tokens in {parts}{of_all}"
    if len({phase.ratio for phase in config.phases() if phase.merges}) > 1:
        what += ", in the step that merges most"
    if report.step_signs or not config.correction.on:  # the plan says which steps correct
        return what
    if config.correction.every > MOST_STEPS:
        return f"{what}; the first step merges nothing and corrects the others"
    return f"{what}; 1 of {config.correction.every} full steps merges nothing and corrects the others"


def _setting(conditions: Conditions, of: Report | RunLog, steps: int | None, done: int | None = None) -> str:
    """Return the size, the steps and the guidance of a run. ``done`` steps ran, or all if it is None."""
    words = []
    if of.height and of.width:
        if conditions.scale:
            words.append(f"{of.width * conditions.scale} × {of.height * conditions.scale} px")
        else:
            words.append(f"{of.width} × {of.height} latents")
    if steps is not None:
        number = _number_of_steps(steps)
        words.append((number if done in (None, steps) else f"{done} of {number}") + _filling(of))
    if conditions.guidance is not None:
        guided = conditions.guidance > 1
        words.append(f"guidance {conditions.guidance:g}" if guided else "no classifier-free guidance")
    if conditions.pictures is None:
        words.append(f"a batch of {of.batch} in each call")
    elif conditions.pictures > 1:
        words.append(f"{conditions.pictures} images at once")
    return ", ".join(words)


def _filling(of: Report | RunLog) -> str:
    """Return what filled a cache for other steps of a run, as the end of a phrase, or an empty string."""
    if not isinstance(of, RunLog):
        return ""
    if of.filled:
        return f", of which {of.filled} {_fill(of.filled)} a cache"
    calls = "call" if of.fills == 1 else "calls"
    return f" and {of.fills} {calls} that {_fill(of.fills)} a cache" if of.fills else ""


def _fill(number: int) -> str:
    return "fills" if number == 1 else "fill"


def _number_of_steps(steps: int) -> str:
    return "1 step" if steps == 1 else f"{steps} steps"


def in_words(size: int) -> str:
    """Return a number of bytes as text.

    >>> in_words(1_503_238_553), in_words(61_800_001)
    ('1.50 GB', '61.8 MB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@dataclasses.dataclass(frozen=True, repr=False)
class RunSteps(Tabled, Sequence[StepRow]):
    """The denoising steps of a run: what ran and merged, and how long it took.

    It is a sequence of the rows. ``print`` shows them as a table.
    """

    rows: tuple[StepRow, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain values, for records."""
        return [dataclasses.asdict(row) for row in self.rows]

    def _table(self) -> TextTable:
        rows = self.rows
        plan = "".join(row.sign for row in rows)
        tokens = ["" if row.tokens is None else f"{row.tokens} → {row.merged_tokens}" for row in rows]
        times = [str(row.merging_calls) for row in rows]
        steps_are_alike = len(set(zip(tokens, times, strict=True))) == 1
        seconds = sum(row.seconds for row in rows)
        title = f"{_number_of_steps(len(rows))}, {seconds:.2f} s in the model"
        if steps_are_alike and tokens[0]:
            title += f"; in each, {times[0]} calls of blocks merge {tokens[0]} tokens"

        columns = {"step": [str(row.step) for row in rows]}
        columns["plan" if plan else "kind"] = [row.sign or row.step_kind for row in rows]
        notes = legend(plan)
        if not steps_are_alike:
            columns["tokens"] = tokens
            columns["times"] = times
            notes.append("tokens: of the largest block; times: blocks that merged")
        columns["seconds"] = [f"{row.seconds:.3f}" for row in rows]
        return TextTable(title, [tuple(columns), *zip(*columns.values(), strict=True)], notes)
