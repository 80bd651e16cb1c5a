"""The handle that ``apply_token_merging`` returns for a diffusion model."""

from __future__ import annotations

import contextlib
import dataclasses
import html
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from tokenmerge.calibration import TimedMerging, fewest_tokens
from tokenmerge.config import ToMeConfig, to_metadata
from tokenmerge.config.checks import check_counts, integer, number, optional
from tokenmerge.errors import ConfigError, nearest_of, short_repr, why
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge.models.placement import device_of, dtype_of, narrowest_attention
from tokenmerge.plans import Estimate, RunFacts, fewest_at
from tokenmerge.plans.choose import merging_pays
from tokenmerge.plans.generation import StepKind, plan_generation
from tokenmerge.plans.method import Method
from tokenmerge.report.by_weights import count_by_weights
from tokenmerge.report.closeness import Closeness, closeness_of
from tokenmerge.report.notes import KIND_OF_SIGN, signs_of
from tokenmerge.report.prediction import Report, hardly_faster, predict, with_filling
from tokenmerge.report.remarks import estimate_in_report, forecast_of, misfits_of, remarks_on
from tokenmerge.report.summary import CLOSENESS, Conditions, RunSteps, summary
from tokenmerge.runtime.memory.run_log import RunLog, StepRecorder, observations_of
from tokenmerge.runtime.memory.state import ModelState, RecordedPlan
from tokenmerge.runtime.patching.patch import changing, restore, state_of
from tokenmerge.runtime.patching.unfused import why_tokens_count_once
from tokenmerge.runtime.steps.pipeline import (
    PerThread,
    default_guidance,
    default_steps,
    guidance_copies,
    is_guided,
    latent_frames,
    latent_scale,
)

__all__ = ["Handle", "Patch", "RecordedPlan"]

AnyReport = TypeVar("AnyReport")
AnyRecord = TypeVar("AnyRecord")
Given = int | None  # an argument, or None if it is left out
_OF_REPORT = ("height", "width", "steps", "guidance", "batch", "frames", "references")


class Handle(Generic[AnyReport, AnyRecord]):
    """What any handle on a patched model does: it reports what merging does, and removes the patch."""

    def __init__(self, model: object, states: Mapping[nn.Module, Any], state: Any) -> None:
        self._model = model
        self._states = states
        self._state = state  # of the model that the handle reports on

    @property
    def config(self) -> Any:
        """The settings."""
        return self._state.config

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"

    def report(
        self, height: int | None = None, width: int | None = None, *, batch: int | None = None
    ) -> AnyReport:
        """Count what merging does, and what it saves."""
        raise NotImplementedError

    def _refuse_unknown(self, unknown: Mapping[str, object], names: Collection[str]) -> None:
        """Refuse arguments of :meth:`report` that are none of these names."""
        for name, value in unknown.items():
            takes = f"patch.report takes {', '.join(names)}, got {name}={short_repr(value)}"
            raise TypeError(f"{name}: {takes}{nearest_of(name, names)}")

    def remove(self) -> None:
        """Restore the models. One that was restored or patched again in the meantime stays as it is.

        Raises:
            ModelInUseError: another thread runs one of them; all stay as they are.
        """
        mine = [root for root, state in self._states.items() if state_of(root) is state]
        with changing(mine):
            for root in mine:
                restore(root)

    @contextlib.contextmanager
    def record(self) -> Iterator[dict[str, AnyRecord]]:
        """Within the context, record the last plan of each merging block of the denoiser, by its path.

        For a layer of a vision transformer, the record says which input tokens its output tokens stand for.
        """
        before = self._state.record
        latest: dict[str, AnyRecord] = {}
        self._state.record = latest
        try:
            yield latest
        finally:
            self._state.record = before


class Patch(Handle[Report, RecordedPlan]):
    """A handle on a patched diffusion model, which reports what merging does and removes the patch.

    In a loop of your own, it is told the steps and the size. It reports on the ``denoiser`` among the models.
    """

    def __init__(self, model: object, states: Mapping[nn.Module, ModelState], denoiser: Host) -> None:
        super().__init__(model, states, states[denoiser.root])
        self._denoiser = denoiser
        self._default: Method | None = self._state.default
        # The latest report of each thread: what it is for, the report, and a note on its speed.
        self._counted: PerThread[list[tuple[tuple[object, ...], Report, str | None]]] = PerThread(list)

    @property
    def config(self) -> ToMeConfig:
        """The settings. With the default method, they are those of the last generation, or of one by default.

        The last generation is that of the thread that reads this property, or the latest one of any thread if
        this thread has run none. So it is in :meth:`report`, :meth:`metadata`, :attr:`estimate` and
        :attr:`steps`, and where the handle is printed.
        """
        return self._state.config if self._default is None else self._in_force

    def metadata(self) -> str:
        """Return the settings as one line for the parameters of an image.

        The line is ``Token merging: speedup=2, {…}``. :func:`tokenmerge.config.read_metadata` reads it, to
        apply the same settings again on any machine.
        """
        return to_metadata(self.config, self._state.method)

    def record_steps(self, on: bool = True) -> None:
        """Record what each denoising step does from now on, for :attr:`steps`.

        Blocks that were compiled separately are compiled again. :meth:`remove` ends the recording.

        Args:
            on: whether to record. False drops the steps that were recorded.

        Raises:
            ConfigError: the patch was removed.
            ModelInUseError: another thread runs the model.
        """
        state: ModelState = self._state
        if state_of(self._denoiser.root) is not state:
            gone = "this patch was removed, or another one took its place"
            raise ConfigError(f"record_steps: {gone}; apply token merging again, and use its handle")
        with changing([self._denoiser.root]):
            state.recorder = StepRecorder() if on else None

    @property
    def steps(self) -> RunSteps:
        """The steps of the last generation that :meth:`record_steps` recorded; ``print`` shows a table.

        It may still be running. Reading this property waits for the device.

        Raises:
            ConfigError: nothing was recorded.
        """
        recorder = self._state.recorder
        if recorder is None:
            raise ConfigError("steps: nothing was recorded; call patch.record_steps() before generating")
        if recorder.last is None:
            raise ConfigError(
                "steps: no step was recorded yet; generate first. In a loop of your own, call "
                "patch.at_step(i, steps) before each step. If the model is compiled, compile only its blocks"
            )
        rows = recorder.last.rows()
        signs = self._signs_of_last_run(merges=any(row.merging_calls for row in rows))
        # The last run may be one of another thread, whose plan has other steps.
        for row in rows:
            kind = KIND_OF_SIGN.get(signs.get(row.step, ""), StepKind.FULL)
            if kind.value != row.step_kind:
                return RunSteps(tuple(dataclasses.replace(row, sign="") for row in rows))
        return RunSteps(tuple(dataclasses.replace(row, sign=signs.get(row.step, "")) for row in rows))

    def _signs_of_last_run(self, merges: bool) -> dict[int, str]:
        """Return the sign of each step in the plan of the last run, by the index of the step."""
        run = self._state.last_run
        if run is None or not run.steps:
            return {}
        plan = plan_generation(run.config, run.steps)
        signs = signs_of(plan, merges, is_unet=bool(self._denoiser.deep_stages))
        return dict(enumerate(signs, run.filled))

    def at_step(self, index: int, steps: int) -> None:
        """Set the next denoising step, in a loop of your own that does not use a diffusers pipeline.

        Only settings that change over the steps need this call. A new generation begins when ``index`` is 0,
        or is neither the last index nor the one after it. The step holds for calls in this thread, and
        overrides the scheduler there from then on.

        Args:
            index: index of the step, 0 ≤ index < steps.
            steps: number of steps of the generation.

        Raises:
            ConfigError: the values are not integers in this range.
        """
        if not (isinstance(index, int) and isinstance(steps, int) and 0 <= index < steps):
            raise ConfigError(
                f"index, steps: expected integers, 0 ≤ index < steps, got {short_repr(index)}, "
                f"{short_repr(steps)}"
            )
        check_counts(steps=steps)  # refuses numbers that are too large to plan for
        for pipeline in {state.pipeline for state in self._states.values()}:
            pipeline.set_step(index, steps)

    def at_size(self, height: int, width: int) -> None:
        """Set the size of the next images, for a model that is compiled before its first call.

        FLUX and similar models get the positions of their tokens as values of ``img_ids``, which are unknown
        while ``torch.compile`` traces the whole model into one graph. Call this before the first call with a
        new size, which needs no new graph with ``dynamic=True``. A model that is not one graph uses this
        size only if the values are not the rows and columns of one image. Other models ignore it. A
        compiled model cannot tell apart 512 × 1024 and 1024 × 512 pixels.

        Args:
            height: height of the image, in the unit of :meth:`report`. In latents, it must be a multiple of
                the model's patch size, which is 2 for FLUX.
            width: width of the image, in the same unit.

        Raises:
            ConfigError: the values are not such numbers.
        """
        for state in self._states.values():
            state.set_size(*_in_latents(self._model, "height, width", height, width))

    def report(
        self,
        height: int | None = None,
        width: int | None = None,
        steps: int | None = None,
        *,
        guidance: float | None = None,
        batch: int | None = None,
        references: Sequence[tuple[int, int]] | None = None,
        frames: int | None = None,
        **unknown: object,
    ) -> Report:
        """Count what merging does to each block, and what it saves.

        Arguments left out are those of the last run. Before the first run, they are the model's default size,
        the batch of one image, and the default number of steps of the pipeline.

        Operations are counted, not timed. A note names blocks whose merged attention would hardly be faster
        than dense attention, by timings on a GPU that are made once.

        Args:
            height: height of the image in pixels, as in a call of the pipeline. For a model without its
                pipeline, and where the scale of the VAE is unknown, it is that of the latents.
            width: width of the image, in the unit of ``height``.
            steps: number of denoising steps to average operations over, ≥ 1.
            guidance: scale of classifier-free guidance, ≥ 0, on which the plan of the default method depends.
            batch: batch size of a call of the model, ≥ 1. Guidance usually makes it 2 for one image.
            references: (height, width) of each reference image that an editing model reads in the sequence
                of the sample, in the unit of ``height``. Before the first run, the default is none.
            frames: number of frames of a video, ≥ 1, as in a call of the pipeline. For a model without its
                pipeline, and where the scale of the VAE over time is unknown, it is that of the latents.
            unknown: arguments of other names, which are refused.

        Raises:
            ConfigError: a number is out of range, or the model has no default size and none is given.
            NothingToMergeError: no token would merge at this size.
            TypeError: there is no argument of a name that was given.
        """
        self._refuse_unknown(unknown, _OF_REPORT)
        run = self._state.last_run
        height, width = _in_latents(self._model, "height, width", height, width)
        if references is not None:
            references = [_in_latents(self._model, "references", *size) for size in references]
        if run is not None:
            if height is None and width is None and references is None:
                references = run.references
            height = run.height if height is None else height
            width = run.width if width is None else width
            batch = run.batch if batch is None else batch
            steps = run.all_steps if steps is None else steps
        frames = self._frames(frames)
        batch = self._denoiser.usual_batch if batch is None else batch
        steps = default_steps(self._model) if steps is None else steps
        check_counts(height=height, width=width, batch=batch, steps=steps)
        optional(number("a number ≥ 0, such as 7.5", lambda scale: scale >= 0))("guidance", guidance)
        filled = 0 if run is None else run.filled
        if filled and steps is not None:
            steps = max(steps - filled, 1)  # those of the plan
        config = self._settings_at(height, width, frames, steps, guidance)
        references = tuple(references or ())
        root = self._denoiser.root
        if config.proportional and why_tokens_count_once(self._state, root, self._model, config):
            config = dataclasses.replace(config, proportional=False)
        dense = {root: state.left_alone.dense for root, state in self._states.items()}
        cached = sum(state.cached_bytes for state in self._states.values())
        fills = None if run is None else (run.filled, run.fills, run.calls)
        counts = height, width, frames, batch, steps, guidance
        key = *counts, config, references, tuple(dense.values()), cached, fills
        counted = self._counted.value
        if not counted or counted[0][0] != key:
            if self._denoiser.unmerged:
                hosts = find_hosts(self._model)
                report = count_by_weights(hosts, config, batch, steps, cached)
            else:
                report = predict(self._model, config, height, width, batch, steps, references, dense, frames)
            slower = hardly_faster(report, partial(self._fewest_tokens, config.ratio))
            if slower is not None:
                report = dataclasses.replace(report, notes=(*report.notes, slower))
            if run is not None:
                report = with_filling(report, filled, run.fills / run.calls)
            counted[:] = [(key, report, slower)]
        report = counted[0][1]
        if self._default is None:
            return report
        facts = self._facts_at(height, width, steps, guidance, frames)
        closeness = self._closeness() if run is not None and config is run.config else None
        return dataclasses.replace(
            report, estimated=estimate_in_report(self._default, facts, closeness, report)
        )

    def _fewest_tokens(self, ratio: float) -> int:
        """Return the fewest tokens for which merged attention is faster, on the device of the denoiser."""
        root = self._denoiser.root
        attention = narrowest_attention(self._denoiser.blocks)
        if not self._in_force.merge_sharing.blocks:
            attention = attention[:2]  # each block has a plan of its own
        device = device_of(self._model, root)
        batch = self._denoiser.usual_batch
        merging = TimedMerging(device, dtype_of(root), "layers", False, batch, *attention)
        return fewest_at(fewest_tokens(merging), "layers", ratio)

    def __repr__(self) -> str:
        try:
            return self._shown()
        except Exception as error:  # a handle can always be printed, whatever the pipeline's own code does
            models = " + ".join(type(model).__name__ for model in self._states)
            return (
                f"tokenmerge in {models}: {self._state.method or self._in_force}\n  not shown: {why(error)}"
            )

    def _shown(self) -> str:
        """Return the lines that ``print`` shows of the handle."""
        report = None
        run = self._state.last_run
        default = self._default
        notes = {"left alone": self._state.left_alone.note, "not reused": misfits_of(run)}
        try:
            report = self.report()
            notes["hardly faster"] = self._counted.value[0][2] or ""
        except Exception as error:  # the rest can be told
            notes["not counted"] = why(error)
        pipe = self._model if getattr(self._model, "scheduler", None) is not None else None
        guidance = None if run is None else run.guidance
        if run is None:
            try:
                guidance = default_guidance(pipe)
            except Exception as error:
                notes["guidance"] = f"unknown: {why(error)}"
        facts = None
        if report is not None and default is not None:
            facts = self._facts_at(report.height, report.width, report.steps if run is None else run.steps)
        closeness = self._closeness()
        remarks = {"no estimate": closeness.why_none, CLOSENESS: str(closeness.estimate or "")}
        forecast = ""
        if default is not None and facts is not None:
            is_left_alone = bool(self._state.left_alone.note)
            remarks |= remarks_on(default, facts, report, run, closeness.estimate, is_left_alone)
            if run is None and report is not None and report.speedup > 1:
                forecast = forecast_of(default, facts)
        why_gone = {None: "removed: the model is as before", self._state: ""}
        conditions = Conditions(
            forecast=forecast,
            models=tuple(type(model).__name__ for model in self._states),
            method=self._state.method,
            denoiser=self._denoiser,
            scale=latent_scale(self._model),
            pictures=self._num_images(pipe),
            guidance=guidance,
            merging_pays=facts is not None and merging_pays(facts),
            gone=why_gone.get(state_of(self._denoiser.root), "replaced by a later call"),
            remarks={**remarks, **notes},
        )
        return "\n".join(summary(self._in_force, conditions, report, run))

    @property
    def _in_force(self) -> ToMeConfig:
        """The settings of the last run, or before the first run those of the next one as far as known."""
        run = self._state.last_run
        return self._state.left_alone.config if run is None else run.config

    @property
    def estimate(self) -> Estimate | None:
        """How close the image of the last generation probably is to the dense one of the same seed.

        It comes from what the plan expects and from how wrong the forecasts of step reuse would have been in
        the steps that knew the truth. Of a batch, the worst image counts. Reading it waits for the device.
        Its ``psnr`` is infinite where nothing was skipped or merged. It is None before the first generation,
        after one that was interrupted or whose latents were not finite, and where the settings are not those
        of the default method. ``print(patch)`` says why.
        """
        return self._closeness().estimate

    def _closeness(self) -> Closeness:
        """Return how close the image of the last generation is, as far as it is known."""
        return closeness_of(self._state.last_run, None if self._default is None else self._estimate_of)

    def _estimate_of(self, run: RunLog) -> Estimate | None:
        """Return the estimate of the last generation, or None if its errors are not finite."""
        assert self._default is not None
        facts = self._facts_at(run.height, run.width, run.steps)
        return self._default.estimate(facts, run.config, observations_of([run]))

    def _num_images(self, pipe: Any) -> int | None:
        """Return how many images a call draws, or None if it is unknown."""
        run = self._state.last_run
        if run is None:
            return 1
        if is_guided(pipe) is None:
            return None
        images, others = divmod(run.batch, guidance_copies(pipe) if self._denoiser.usual_batch > 1 else 1)
        return None if others else images

    def _frames(self, frames: Given) -> Given:
        """Return the frames of the token grid of a video, which are by default those of the last run."""
        run = self._state.last_run
        patch = self._denoiser.patch_frames
        if frames is None:
            return None if run is None or not patch else run.frames
        if not patch:
            made = "makes images, or holds the frames of a video in its batch"
            raise ConfigError(
                f"frames: {type(self._denoiser.root).__name__} {made}, got {short_repr(frames)}; leave it out"
            )
        integer(1)("frames", frames)
        return -(-latent_frames(self._model, frames) // patch)

    def _facts_at(
        self,
        height: Given,
        width: Given,
        steps: Given,
        guidance: float | None = None,
        frames: Given = None,
    ) -> RunFacts:
        """Return the facts of a generation.

        Its schedule is that of the last run. So are guidance and frames by default.
        """
        assert self._default is not None
        run = self._state.last_run
        if guidance is None:
            guidance = self._default.facts.guidance if run is None else run.guidance
        if frames is None and run is not None:
            frames = run.frames
        grid = None if height is None or width is None else self._denoiser.grid_at(height, width, frames)
        return self._default.facts_at(grid, steps, guidance, None if run is None else run.schedule)

    def _settings_at(
        self, height: Given, width: Given, frames: Given, steps: Given, guidance: float | None
    ) -> ToMeConfig:
        """Return the settings of a run with this size of the latents, number of steps and guidance."""
        run = self._state.last_run
        same = run is not None and (height, width, steps) == (run.height, run.width, run.steps)
        same = same and guidance in (None, run and run.guidance) and frames in (None, run and run.frames)
        if self._default is None or same or self._state.left_alone.note:
            return self._in_force
        return self._default.settings(self._facts_at(height, width, steps, guidance, frames))


def _in_latents(model: object, name: str, *sides: Any) -> tuple[Any, ...]:
    """Return sides of an image in latents. They are given in pixels if the pipeline tells the scale."""
    scale = latent_scale(model) or 1
    if scale > 1 and any(integer(scale)(name, side) % scale for side in sides if side is not None):
        raise ConfigError(f"{name}: expected multiples of {scale} pixels, got {', '.join(map(str, sides))}")
    return tuple(side and side // scale if scale > 1 else side for side in sides)
