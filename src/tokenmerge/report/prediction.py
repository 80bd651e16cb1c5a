"""Counts the tokens and FLOPs of each block at one size, dense and merged, by running a copy."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

from torch import nn

from tokenmerge.calibration import SIDES
from tokenmerge.config import Correction, ToMeConfig
from tokenmerge.config.checks import check_counts
from tokenmerge.errors import ConfigError, TokenMergingError, reason_of, short_repr
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge.plans.generation import plan_generation
from tokenmerge.report.flops import (
    StepCounts,
    count_flops,
    count_steps,
    kept_bytes,
    merging_most,
    patched,
    weightless,
)
from tokenmerge.report.notes import (
    legend,
    merged_parts,
    notes_on_blocks,
    notes_on_steps,
    paths_that_merge,
    signs_of,
)
from tokenmerge.runtime.memory.state import LeftAlone, RecordedPlan
from tokenmerge.runtime.patching.patch import check_host, hosts_that_merge
from tokenmerge.runtime.steps.pipeline import latent_scale
from tokenmerge.text_table import Row, Tabled, TextTable, given_or_default
from tokenmerge.warn import warn_renamed

# All columns of the table of a report, of which it shows those with something to say.
_COLUMNS = ("block", "level", "grid", "tokens", "merged", "GFLOPs", "saved")


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Tabled):
    """The operations of one call of a model, dense and merged.

    FLOPs are those of matrix products, convolutions and attention. A multiply-add counts as two. The time
    saved also depends on the machine.

    Attributes:
        model: class of the model, or several classes joined by ``+`` if ControlNets merge too.
        height: height of the sample (for latent diffusion, of the latents), or 0 if the call of the model is
            not described. Then operations are those of the weights for one token.
        width: width of the sample, or 0.
        batch: batch size of the call. Classifier-free guidance makes it 2 for one image.
        rows: one row for each block that merges.
        flops_dense: operations of the whole model without merging.
        flops_merged: operations with merging, in the step that merges most.
        notes: which blocks stay dense and why, and what changes over the denoising steps.
        estimated: lines on how close the image probably is, with headings, or an empty string if there is
            no estimate.
        kept_bytes: bytes cached between steps: corrections, residuals and plans.
        steps: number of steps that ``flops_mean`` is averaged over.
        flops_mean: operations with merging, averaged over these steps and over calls beside them that filled
            a cache, or None if all steps are alike or no number of steps is given.
        flops_of_steps: operations of each of these steps, or an empty tuple where ``flops_mean`` is None.
        step_signs: one sign for each of these steps, such as ``"MMssMM"``, or an empty string where
            ``flops_mean`` is None.
        scale: pixels per position of the sample along a side, or None if it is unknown.
        frames: frames of the token grid of a video, or None for an image, and if the batch holds the frames.
        flops_merging: operations without merging of the layers and blocks that merge. Merging can save time
            in these alone.
    """

    model: str
    height: int
    width: int
    batch: int
    rows: tuple[Row, ...]
    flops_dense: int
    flops_merged: int
    notes: tuple[str, ...]
    estimated: str = ""
    kept_bytes: int = 0
    steps: int | None = None
    flops_mean: int | None = None
    flops_of_steps: tuple[int, ...] = ()
    step_signs: str = ""
    scale: int | None = None
    frames: int | None = None
    flops_merging: int = 0

    @property
    def speedup(self) -> float:
        """Dense operations divided by those with merging, in the mean over the steps if that is known."""
        return self.flops_dense / self.flops

    @property
    def flops(self) -> int:
        """Operations with merging, in the mean over the steps if that is known."""
        return self.flops_merged if self.flops_mean is None else self.flops_mean

    def joined_rows(self) -> Iterator[Row]:
        """Yield the rows, with equal consecutive blocks of one list in one row, such as ``….blocks.0-9``."""
        for _, group in groupby(
            self.rows, lambda row: dataclasses.replace(row, path=row.path.rpartition(".")[0])
        ):
            rows = list(group)
            last = "" if len(rows) == 1 else f"-{rows[-1].path.rpartition('.')[2]}"
            yield dataclasses.replace(
                rows[0],
                path=f"{rows[0].path}{last}",
                flops_dense=sum(row.flops_dense for row in rows),
                flops_merged=sum(row.flops_merged for row in rows),
                blocks=len(rows),
            )

    @property
    def plan(self) -> str:
        """The former name of :attr:`step_signs`."""
        warn_renamed("Report.plan", "Report.step_signs")
        return self.step_signs

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for records."""
        return dataclasses.asdict(self)

    def _table(self) -> TextTable:
        header = ("block" if self.rows else "", *_COLUMNS[1:])
        lines = [self._line(row) for row in self.joined_rows()]
        if self.rows:
            dense = sum(row.flops_dense for row in self.rows)
            merged = sum(row.flops_merged for row in self.rows)
            others = gflops(self.flops_dense - dense, self.flops_merged - merged)
            lines.append(("all other layers, in steps that run them", "", "", "", "", *others))
        for name, flops in self._totals().items():
            lines.append((name, "", "", "", "", *gflops(self.flops_dense, flops)))

        levels_differ = any(row.level > 1 for row in self.rows)
        shown = ["block"]
        if levels_differ:
            shown.append("level")
        if self.rows:
            shown += ["grid", "tokens", "merged"]
        shown += ["GFLOPs", "saved"]
        columns = [_COLUMNS.index(name) for name in shown]
        cells = [tuple(line[column] for column in columns) for line in (header, *lines)]

        notes = [*self.notes]
        if self.rows:
            share = 100 * self.flops_merging / self.flops_dense
            notes.append(f"what merges has {share:.1f} % of the operations of the unchanged model")
        if levels_differ or any("level" in note for note in self.notes):
            notes.append("level: 1 has the most tokens; at 4, a grid is a quarter as wide")
        counted = f"GFLOPs: of one call of the model, on a batch of {self.batch}"
        if self.batch % 2 == 0:
            counted += " (with guidance, one image is two samples)"
        if self.height:
            notes.append(counted)
        return TextTable(self._title(), cells, notes)

    def _line(self, row: Row) -> tuple[str, ...]:
        """Return the cells of a block in the table."""
        grids = [" × ".join(map(str, grid)) for grid in (row.grid, *row.references)]
        path = f"{row.model}: {row.path}" if " + " in self.model else row.path
        operations = gflops(row.flops_dense, row.flops_merged)
        tokens = f"{row.tokens} → {row.merged_tokens}"
        return path, str(row.level), " + ".join(grids), tokens, row.layers, *operations

    def _totals(self) -> dict[str, int]:
        """Return the operations of the whole model with merging, by the heading of a row of the table."""
        if self.flops_mean is None:
            return {"whole model": self.flops_merged}
        totals = {}
        for sign in dict.fromkeys(self.step_signs):
            flops = [
                one for one, step in zip(self.flops_of_steps, self.step_signs, strict=True) if step == sign
            ]
            heading = f"one {sign} step"
            if len(set(flops)) > 1:
                heading += ", in the mean"
            totals[heading] = round(sum(flops) / len(flops))
        totals[f"mean over {self.steps} steps"] = self.flops_mean
        return totals

    def _title(self) -> str:
        """Return the lines above the table."""
        size = f"{self.width} × {self.height} latents"
        if self.scale:
            size = f"{self.width * self.scale} × {self.height * self.scale} px ({size})"
        if self.frames is not None:
            size += f", {self.frames} frame{'s' if self.frames > 1 else ''} of tokens"
        if self.steps:
            size += f", {self.steps} steps"
        share = f"{saved(self.flops_dense, self.flops)} of the operations saved"
        if not self.height:
            size = f"{self.steps} steps" if self.steps else "one call"
        lines = [f"{self.model}: {size}", f"counted by operations: {self.speedup:.2f}× ({share})"]
        if self.estimated:
            lines.append(self.estimated)
        if self.step_signs:
            lines.append(f"plan: {self.step_signs}")
            lines += [f"      {line}" for line in legend(self.step_signs)]
        return "\n".join(lines)


def saved(dense: int, merged: int) -> str:
    """Format the share of operations saved in percent.

    >>> saved(200, 150)
    '25.0 %'
    """
    return f"{100 * (1 - merged / dense):.1f} %"


def gflops(dense: int, merged: int) -> tuple[str, str]:
    """Format operations in units of 10⁹, and the share of them that is saved.

    >>> gflops(2 * 10**9, 10**9)
    ('2.00 → 1.00', '50.0 %')
    """
    return f"{dense / 1e9:.2f} → {merged / 1e9:.2f}", saved(dense, merged)


def predict(
    pipe_or_model: object,
    config: ToMeConfig,
    height: int | None = None,
    width: int | None = None,
    batch: int = 2,
    steps: int | None = None,
    references: Sequence[tuple[int, int]] = (),
    dense: Mapping[nn.Module, Collection[str]] | None = None,
    frames: int | None = None,
) -> Report:
    """Count what merging saves, by running a copy of the model on the meta device.

    The model itself is neither called nor changed. It may be patched, or on the meta device.

    Args:
        pipe_or_model: what :func:`tokenmerge.apply_token_merging` takes.
        config: what to merge and how much.
        height: height of the sample (for latent diffusion, of the latents), ≥ 1, or None for the default
            size.
        width: width of the sample, ≥ 1.
        batch: batch size of the call, ≥ 1.
        steps: number of denoising steps to average operations over, ≥ 1, for settings that change over the
            steps. Counting takes up to half a second for each step. If it is None, operations are not
            averaged.
        references: (height, width) of each reference image in the sequence, in the unit of the sample.
        dense: paths of the blocks and layers that do not merge although the settings say so, by model.
        frames: frames of the token grid of a video, ≥ 1, or None for those that the model was made for.

    Raises:
        NothingToMergeError: no token would merge at this size.
        UnsupportedModelError: the object neither is nor contains a supported model.
        ConfigError: no size is given and the model has no default size, a number is out of range, or the
            model takes no reference images.
    """
    check_counts(height=height, width=width, batch=batch, steps=steps, frames=frames)
    hosts = find_hosts(pipe_or_model)
    _check_references(hosts, references)
    height, width = given_or_default(hosts, height, width)
    merging, left_dense = hosts_that_merge(hosts, config, (height, width, frames))
    steps = steps if config.follows_steps else None
    classes = [type(host.root).__name__ for host in merging]
    labels = [
        name if classes.count(name) == 1 else f"{name} {classes[:i].count(name) + 1}"
        for i, name in enumerate(classes)
    ]
    try:
        reports = [
            _predict_host(host, name, config, (height, width, batch), frames, steps, references, dense or {})
            for host, name in zip(merging, labels, strict=True)
        ]
    except TokenMergingError:
        raise
    except Exception as error:  # whatever a model raises for a sample of this size
        raise ConfigError(
            f"height, width: operations of {_names(hosts)} cannot be counted for a sample of {height} × "
            f"{width} ({reason_of(error)}); pass the height and width that it is called with"
        ) from error
    rows = tuple(chain.from_iterable(report.rows for report in reports))
    kept = sum(report.kept_bytes for report in reports)
    is_unet = bool(merging[0].deep_stages)
    # If nothing merges, there is nothing to correct.
    described = config if rows else dataclasses.replace(config, correction=Correction())
    notes = [
        *chain.from_iterable(report.notes for report in reports),
        *map(str, left_dense),
        *notes_on_steps(described, steps),
    ]
    if kept:
        notes.append(f"cache between steps: {kept / 1e6:.1f} MB")
    return dataclasses.replace(
        reports[0],
        model=" + ".join(labels),
        rows=rows,
        flops_dense=sum(report.flops_dense for report in reports),
        flops_merged=sum(report.flops_merged for report in reports),
        flops_merging=sum(report.flops_merging for report in reports),
        notes=tuple(notes),
        kept_bytes=kept,
        flops_mean=sum(report.flops for report in reports) if steps else None,
        flops_of_steps=tuple(map(sum, zip(*(report.flops_of_steps for report in reports), strict=True))),
        scale=latent_scale(pipe_or_model),
        step_signs=signs_of(plan_generation(described, steps), bool(rows), is_unet) if steps else "",
    )


def with_filling(report: Report, steps: int, calls: float) -> Report:
    """Return a report that also counts what fills a cache for the steps in it, which runs whole.

    Args:
        report: the operations of the steps that read the cache.
        steps: number of steps before these that fill it, ≥ 0.
        calls: number of calls beside all steps that fill it, ≥ 0, in units of the calls of a step.
    """
    if not report.flops_of_steps or not (steps or calls):
        return report
    dense = report.flops_dense
    of_steps = (*[dense] * steps, *report.flops_of_steps)
    note = "what fills a cache for other steps runs whole, and is counted"
    return dataclasses.replace(
        report,
        steps=len(of_steps),
        flops_of_steps=of_steps,
        flops_mean=round((sum(of_steps) + calls * dense) / (len(of_steps) + calls)),
        step_signs="D" * steps + report.step_signs,
        notes=(*report.notes, note),
    )


def check_merging(hosts: Sequence[Host], config: ToMeConfig, size: tuple[int, int]) -> None:
    """Refuse settings that do not fit one of the models, or that merge and skip nothing at this size."""
    for host in hosts:
        check_host(host, config, size)


def hardly_faster(report: Report, fewest_tokens: Callable[[], int]) -> str | None:
    """Return a note that says where merging saves operations but hardly any time, or None if it is nowhere.

    Only blocks that merge attention are compared. Whole blocks and MLPs save more than attention does.
    ``fewest_tokens`` returns from how many tokens on merged attention pays on the device. It may run
    measurements, so it is called only if the report has grids small enough to be in doubt.
    """
    most = SIDES[-1] ** 2
    attention = [
        row for row in report.rows if "attn1" in row.merged and row.merged_tokens < row.tokens <= most
    ]
    if not attention:
        return None
    fewest = fewest_tokens()
    if min(row.tokens for row in attention) >= fewest:
        return None
    slow = [row for row in attention if row.tokens < fewest]
    blocks = sum(row.blocks for row in slow)
    tokens = " and ".join(str(tokens) for tokens in sorted({row.tokens for row in slow}))
    what = f"{blocks} block{'s merge' if blocks > 1 else ' merges'} attention on {tokens} tokens"
    if fewest > most:
        return f"{what}; merged attention was timed on this device, and saved hardly any time on all grids"
    instead = (
        f"on this device it pays from {fewest} tokens on; min_tokens={fewest} leaves smaller grids dense"
    )
    return f"{what}, where it saves hardly any time: {instead}"


def _names(hosts: Sequence[Host]) -> str:
    return ", ".join(type(host.root).__name__ for host in hosts)


def _check_references(hosts: Sequence[Host], references: Sequence[tuple[int, int]]) -> None:
    for size in references:
        if len(size) != 2 or not all(isinstance(side, int) and side >= 1 for side in size):
            raise ConfigError(f"references: expected (height, width), integers ≥ 1, got {short_repr(size)}")
    if references and not any(host.takes_references for host in hosts):
        raise ConfigError(
            f"references: {_names(hosts)} takes no reference images in the sequence of the sample, got "
            f"{short_repr(list(references))}; leave it out"
        )


def _predict_host(
    host: Host,
    name: str,
    config: ToMeConfig,
    size: tuple[int, int, int],
    frames: int | None,
    steps: int | None,
    references: Sequence[tuple[int, int]],
    dense_paths: Mapping[nn.Module, Collection[str]],
) -> Report:
    left_alone = LeftAlone(dense=frozenset(dense_paths.get(host.root, ())))
    whole = type(host.root).__name__
    try:
        plain = weightless(host.root, host.on_cpu)
        if host.without_values is not None:
            host.without_values(plain)
    except Exception as error:  # of weights that another library keeps in its own way
        raise ConfigError(
            f"operations of {whole} cannot be counted, since it cannot be copied without its weights "
            f"({reason_of(error)}); generating works as before. Count them with the same model loaded in "
            "full precision"
        ) from error
    (copied,) = find_hosts(plain)
    more = [tuple(references)] if host.takes_references else []
    example = copied.example(*size, *more, frames=frames)
    arguments = partial(copy.deepcopy, example)  # a model may change what it gets
    dense = count_flops(copied.root, arguments())
    # Keep step reuse, because step reuse alone is allowed if no token merges.
    most = merging_most(config)
    sharing = dataclasses.replace(config.merge_sharing, every=1)
    counted_config = dataclasses.replace(
        most, merge_sharing=sharing, correction=Correction(), reuse=config.reuse
    )
    recorded: dict[str, RecordedPlan] = {}
    merged = dense
    if most.merges:
        with patched(copied, counted_config, left_alone) as state:
            state.record = recorded
            state.pipeline.set_step(0, 1)  # for planners that read the previous step
            merged = count_flops(copied.root, arguments())

    rows = []
    merging = 0  # operations of what merges
    for block in copied.blocks:
        if block.path in recorded:
            merging += sum(dense.get(f"{whole}.{path}", 0) for path in paths_that_merge(block, most))
            plan = recorded[block.path]
            grid, *others = (grid if grid[0] > 1 else grid[1:] for grid in (plan.grid, *plan.references))
            rows.append(
                Row(
                    model=name,
                    path=block.path,
                    level=block.level,
                    grid=grid,
                    tokens=sum(map(math.prod, (grid, *others))),
                    merged_tokens=plan.plan.keep.shape[1],
                    merged=merged_parts(block, most),
                    flops_dense=dense[f"{whole}.{block.path}"],
                    flops_merged=merged[f"{whole}.{block.path}"],
                    references=tuple(others),
                )
            )
    free = [block for block in copied.blocks if block.path not in left_alone.dense]
    if steps:
        counts = count_steps(copied, config, steps, arguments, left_alone)
    else:
        counts = StepCounts((), kept_bytes(copied, config, arguments, left_alone))
    return Report(
        name,
        *size,
        tuple(rows),
        dense[whole],
        merged[whole],
        notes=(*notes_on_blocks(free, rows, config), *host.limits),
        kept_bytes=counts.cached,
        steps=steps,
        flops_mean=round(statistics.mean(counts.flops)) if steps else None,
        flops_of_steps=counts.flops,
        frames=host.grid_at(*size[:2], frames)[0] if host.patch_frames else None,
        flops_merging=merging,
    )
