"""The state of one sampling: settings, random draws, plans and residuals."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import GUIDED_PLANNERS, MergeSettings
from tokenmerge.integrations.comfyui.models import Key
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.models.base import GridShape, Layout
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.ops.matching import guided_features, shared_features
from tokenmerge.ops.partition import num_tokens
from tokenmerge.ops.plan import Plan
from tokenmerge.planners import PLANNERS
from tokenmerge.planners.importance import importance_of_tokens
from tokenmerge.planners.sequences import num_removed
from tokenmerge.plans import Schedule
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.stack import merges_in_stacks
from tokenmerge.runtime.steps.calls import Given, Shape, detail_of, noise_in_detail
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, ends_clean, needs_sync
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker, decide

# Key of a step that merges in ComfyUI's ``transformer_options``, and of this package's wrappers.
KEY = "tokenmerge"
_log = logging.getLogger(KEY)
Options = Mapping[str, Any]  # ComfyUI's ``transformer_options``


class Sampling:
    """The state of one sampling, of its running step and of the running call of the model.

    Each sampling has its own, even on one clone of a model. ``sigmas`` are the noise levels of its steps, or
    an empty sequence if they are unknown. ``guidance`` is the scale of guidance, or None if it is unknown.
    ``adds_noise`` says whether the sampler adds new noise.
    """

    def __init__(
        self,
        settings: Settings,
        sigmas: Sequence[float] = (),
        guidance: float | None = None,
        adds_noise: bool = False,
    ) -> None:
        self._asked = settings
        self.settings = settings  # the default method chooses them in the first step
        self.steps = max(1, len(sigmas) - 1)
        self._sigmas = sigmas
        self._guidance = guidance
        self._schedule = Schedule(ends_clean(sigmas), adds_noise)
        self._grid: GridShape | None = None
        self._said: set[str] = set()
        self._generation = Generation(0)
        self.forget()

    def forget(self) -> None:
        """Drop everything that is cached."""
        self.tracker = StepTracker()
        self.decision = Decision()  # what the running call of the model runs and merges
        self.plans: dict[Hashable, Plan] = {}  # by block, made for the images of one prompt
        self.guidance_change: Tensor | None = None  # in the last step, or None if it is unknown
        # What parts of the model added in the last step that ran them, by call in the step and part. That of
        # a stage is a residual that can be extrapolated.
        self.residuals: dict[tuple[int, Hashable], Any] = {}
        self.ran: set[str] = set()  # parts of the model that the running call has run, "deep" and "finest"
        self.running: Running | None = None  # what the running block merges, or None if it is dense
        # Of transformers: the running stack, and the blocks that steps skip together, see the file
        # transformer.
        self.stack: Any = None
        self.block_run: Any = None

    def say(self, note: str) -> None:
        """Write a note to the log, once for the sampling."""
        if note not in self._said:
            _log.warning("Token Merging: %s", note)
        self._said.add(note)

    def begin_step(self, sigma: float, timestep: Tensor, latent: Sequence[int], whole: bool) -> None:
        """Begin an evaluation of all prompts on latents of one shape: ComfyUI's ``calc_cond_batch``.

        A scheduler may evaluate the model between steps. The first step chooses the settings, for the token
        grid of its latents. Random draws depend on the ``timestep`` that the model is called with. ``whole``
        says whether every prompt is for the whole image, so that all of them get the same latents.
        """
        grid = self.settings.target.grid(latent)
        if self._grid != grid:
            self._grid = grid
            self.settings = self._asked.for_sampling(grid, self.steps, self._guidance, self._schedule)
        index = min(max(0, sum(sigma <= known for known in self._sigmas) - 1), self.steps - 1)
        if index < self.tracker.index:
            self.forget()  # the scheduler begins anew
        self._step = DenoisingStep(index, self.steps, self._generation)
        self._config = self.settings.config.at_step(index, self.steps)
        stale = self.tracker.begin_step(self._step)
        self.tracker.forget(stale)
        self.residuals = {key: kept for key, kept in self.residuals.items() if key[0] not in stale}
        self._noise_level = sigma
        self._plan_for = tuple(latent), self._config
        self._seed = arithmetic().bits(timestep.float().max())
        self._whole = whole and self._config.merge_sharing.guidance
        self._calls = -1

    def begin_call(self, latent: Sequence[int], options: Options, sample: Tensor | None = None) -> None:
        """Decide what a call of the model runs and merges.

        ComfyUI may call it for each prompt, and other nodes for tiles of the image. A call goes on with
        what is cached for its prompt and its ``sample``, where that is known.
        """
        self._calls += 1
        # The grid of the tokens at level 1, and whether reference images stand beside them in this call.
        self.grid = self.settings.target.grid(latent)
        self.has_references = False
        # A call before may have been interrupted.
        self.running = None
        self.stack = None
        self.block_run = None
        # The prompts in the batch: 0 is what ComfyUI guides towards, and 1 what it guides away from.
        self._prompts = list(options.get("cond_or_uncond") or [0])
        self._replaced = options.get("patches_replace", {})
        self.ran = set()
        is_first = not self.tracker.numbers.made
        # Residuals depend on the prompts, and on shape and place of the latents.
        window = getattr(options.get("context_window"), "index_list", ())
        shape = (*latent, *options.get("uuids", ()), *window)
        self._recognise(shape, sample)
        if is_first and self.tracker.plans(self._config.merge_sharing.every, self._plan_for):
            self.plans.clear()
        self.decision = decide(self.settings.config, self.tracker, shape)

    def _recognise(self, shape: Shape, sample: Tensor | None) -> None:
        """Find out which call of the step before a call continues, and say so if its sample fits none.

        On a device, comparing samples waits for it, so that they are compared where a step has tiles.
        """
        numbers = self.tracker.numbers
        given = Given(shape)
        misfits = numbers.misfits
        if sample is not None:
            compares = not needs_sync(sample) or numbers.has_tiles
            detail = detail_of(sample) if compares else None
            # How much noise a sampler adds is unknown. At most all noise of the sample is new.
            noise = noise_in_detail(sample, self._noise_level) if self._schedule.adds_noise else 0.0
            given = Given(shape, noise=noise, sample=weakref.ref(sample), detail=detail)
        self.tracker.begin_call(given)
        if numbers.misfits > misfits and (
            self.settings.config.reuse.on or self.settings.config.correction.on
        ):
            self.say(
                "the model is called with a sample that does not follow from one of the step before, as a "
                "tile does that moves; such calls reuse nothing, which saves less time"
            )

    def end_call(self, result: Any = None) -> None:
        """Note what a call returned, and what it ran of the parts that some steps skip."""
        if isinstance(result, Tensor):
            self.tracker.numbers.note_result(self.tracker.call, result)
        target = self.settings.target
        skippable = {"deep"} if target.cut is not None or not target.is_unet else set()
        if target.is_unet and self.settings.config.reuse.skips_finest:
            skippable.add("finest")
        if not self.tracker.note_runs(self.ran | ({"deep", "finest"} - skippable)):
            self.say(
                "another node left out what should have run in a step, as a second cache does; take one off"
            )

    def of(self, part: Hashable) -> Any:
        """Return the residual of a part of the model, from the same call of an earlier step."""
        return self.residuals.get((self.tracker.call, part))

    def of_kind(self, kind: str) -> list[Any]:
        """Return the residuals of all parts whose name begins with ``kind``, from the same call."""
        found = []
        for (call, part), residual in self.residuals.items():
            if call == self.tracker.call and isinstance(part, tuple) and part[0] == kind:
                found.append(residual)
        return found

    def keep(self, part: Hashable, residual: Any) -> None:
        """Cache the residual of a part in the running call."""
        self.residuals[self.tracker.call, part] = residual

    def is_replaced(self, layer: str, block: Key) -> bool:
        """Return whether another node replaces a layer of a UNet's block, or all of its transformer.

        Such a layer, ``"attn1"`` or ``"attn2"``, stays dense.
        """
        replaced = self._replaced.get(layer, {})
        return block in replaced or block[:2] in replaced

    def settings_in(self, grid: GridShape, level: int) -> MergeSettings | None:
        """Return the settings by which blocks with this grid of tokens merge, or None if they are dense."""
        settings = self._config.at_level(level)
        if level > self.settings.deepest_level or self.decision.merging is Merging.DENSE:
            return None
        return settings if num_removed(grid, settings) else None

    def in_stacks(self, settings: MergeSettings) -> bool:
        """Return whether blocks with these settings merge once for a stack."""
        return merges_in_stacks(self._config.merge_sharing.blocks, settings)

    def merge_in(
        self,
        block: Key,
        group: Hashable,
        tokens: Tensor,
        layout: Layout,
        grid: GridShape,
        level: int,
        are_added: bool = False,
    ) -> Running | None:
        """Return what a block merges on a grid, or None if it is dense.

        Planners compare the ``tokens``, or what was added to them. Blocks of the same ``group`` may share
        their plan.
        """
        settings = self.settings_in(grid, level)
        if settings is None:
            return None
        running = Running(None, settings, block, layout.text == "first")
        if self.decision.merging is Merging.MEASURES:
            return running
        # The images of each prompt stand in a row.
        copies = len(self._prompts) if self._whole and len(tokens) % len(self._prompts) == 0 else 1
        place = group if self._config.merge_sharing.blocks else block
        key = place, len(tokens) // copies, grid, None if self._whole else self._calls
        if key not in self.plans:
            features = layout.image(tokens, num_tokens(grid))
            if copies > 1:
                features = self._of_all_prompts(features, are_added)
            self.plans[key] = self._plan(features, grid, settings)
        running.plan = self.plans[key] if copies == 1 else self.plans[key].repeated(copies)
        return running

    def _of_all_prompts(self, features: Tensor, are_added: bool) -> Tensor:
        """Return what planners compare of a batch: what guidance makes of what was added, if it is known.

        Of other features, the mean similarity in the images of all prompts counts.
        """
        scale = self._guidance
        if not are_added or scale is None or scale <= 1 or sorted(self._prompts) != [0, 1]:
            return shared_features(features, len(self._prompts))
        if self._prompts[0] == 0:  # the guided prompt comes first
            features = torch.cat(features.chunk(2)[::-1])
        return guided_features(features, 2, scale)

    def _plan(self, features: Tensor, grid: GridShape, settings: MergeSettings) -> Plan:
        planner = settings.planner
        more = []
        change = self.guidance_change
        if planner in GUIDED_PLANNERS:
            importance = None if change is None else importance_of_tokens(change, grid)
            if importance is not None and importance.shape == features.shape[:2]:
                more = [importance.to(features.device)]
            else:
                planner = "tome"  # as before guidance has changed anything
        r = num_removed(grid, settings)
        seed = self._seed.to(features.device)
        return PLANNERS[planner](features, grid, r, settings, seed, *more)


@dataclasses.dataclass(eq=False)
class Running:
    """What the running block merges. Without a plan, it runs dense for a correction."""

    plan: Plan | None
    settings: MergeSettings  # of its level
    block: Key
    text_first: bool  # whether text comes before the image if they share a sequence
    # Name of the running layer if its tokens are merged or would be, or None.
    merged: str | None = None
    # Whether the next attention weighs each key by the number of tokens that it stands for.
    weighs: bool = False

    def bias(self, keys: Tensor, tokens: int) -> Tensor | None:
        """Return the bias ``[b, 1, tokens]`` for the logits of ``tokens`` keys.

        The result is None if these are not the merged keys. Each layer gets it once, since an adapter may
        attend to other keys after the block's own attention.
        """
        if self.plan is None or not self.weighs:
            return None
        images, m = self.plan.sizes.shape
        text = tokens - m
        if text < 0 or len(keys) != images:
            return None
        self.weighs = False
        beside = (text, 0) if self.text_first else (0, text)
        return F.pad(self.plan.sizes.log(), beside).to(keys.dtype).unsqueeze(1)


def sampling_in(options: Options | None) -> Sampling | None:
    """Return the running sampling, or None if nothing merges in this step."""
    return (options or {}).get(KEY)


def running_in(options: Options | None) -> tuple[Any, Running | None]:
    """Return the running sampling, and what the running block merges, or None if it is dense."""
    sampling = sampling_in(options)
    return sampling, None if sampling is None else sampling.running
