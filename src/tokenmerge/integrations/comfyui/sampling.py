"""The state of one sampling and of one of its steps: settings, random draws, plans and residuals."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import GUIDED_PLANNERS, MergeSettings
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.ops import Plan, shared_features
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.planners import PLANNERS, num_removed
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.blocks.planning import importance_of_tokens
from tokenmerge.runtime.memory.caches import Residual, extrapolated, updated
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, ends_clean
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker, decide

# Key of this package's entry in ComfyUI's ``transformer_options``, and of its wrappers.
KEY = "tokenmerge"
_log = logging.getLogger(KEY)
Grid = tuple[int, int, int]
Tokens = tuple[Tensor | None, ...]  # of image and text


class Sampling:
    """State that outlives a step. Each sampling has its own, even on the same clone of a model.

    ``sigmas`` are the noise levels of the steps; empty: unknown. ``guidance`` is the scale of classifier-free
    guidance; None: unknown.
    """

    def __init__(
        self, settings: Settings, sigmas: Sequence[float] = (), guidance: float | None = None
    ) -> None:
        self.settings = self._asked = settings  # the default method chooses them in the first step
        self.steps = max(1, len(sigmas) - 1)
        self._sigmas, self._guidance = sigmas, guidance
        self._grid: Grid | None = None
        self._said: set[str] = set()
        self.generation = Generation(0)
        self.forget()

    def forget(self) -> None:
        """Drop everything that is cached."""
        self.tracker = StepTracker()
        self.decision = Decision()  # what the running call of the model runs and merges
        self.plans: dict[Hashable, Plan] = {}  # by block, made for the images of one prompt
        self.guidance_change: Tensor | None = None  # of the last step; None: unknown
        # What parts of the model added in the last step that ran them, by call in the step and part: of a
        # stage as a residual that can be extrapolated.
        self.residuals: dict[Hashable, Any] = {}
        self.runs = BlockRuns()

    def say(self, note: str) -> None:
        """Write a note to the log, once for the sampling."""
        if note not in self._said:
            _log.warning("Token Merging: %s", note)
        self._said.add(note)

    def begin_step(self, sigma: float, latent: Sequence[int]) -> int:
        """Return the index of the step at a noise level; a solver may evaluate the model between steps.

        The first step chooses the settings, for the token grid of its latents.
        """
        grid = self.settings.target.grid(latent)
        if self._grid != grid:
            self._grid, clean = grid, ends_clean(self._sigmas)
            self.settings = self._asked.for_sampling(grid, self.steps, self._guidance, clean)
        index = min(max(0, sum(sigma <= known for known in self._sigmas) - 1), self.steps - 1)
        if index < self.tracker.index:
            self.forget()  # the solver begins anew
        return index

    def in_call(self, part: Hashable) -> Hashable:
        """Return the key of a part of the model in the running call."""
        return self.tracker.call, part

    def of(self, part: Hashable) -> Any:
        """Return the residual of a part of the model, from the same call of an earlier step."""
        return self.residuals.get(self.in_call(part))

    def keep(self, part: Hashable, residual: Any) -> None:
        """Cache the residual of a part in the running call."""
        self.residuals[self.in_call(part)] = residual


class BlockRuns:
    """The blocks of transformers that one sampling skips in runs, by key; each call in a step has its own.

    In a step that skips a run, its first block adds the extrapolated sum of what the blocks of the run added
    in complete steps; the other blocks return their input. The sum does not include what a ControlNet adds
    between two blocks, since ComfyUI also adds it in steps that skip the blocks. Anything else between two
    blocks begins a new run.
    """

    def __init__(self) -> None:
        # By block, the residual of the run that begins with it, and the number of blocks in it. None: another
        # block begins the run.
        self._known: dict[Hashable, tuple[Residual | None, int]] = {}
        self._open()

    def _open(self) -> None:
        # Consecutive blocks of this call, each on the very tensors that the last one returned; what the last
        # one returned; and what all of them added, in float32, since half precision would lose some of it.
        # None: a block returned no text.
        self._blocks: list[Hashable] = []
        self._returned: Tokens = None, None
        self._added: Tokens = None, None

    def call(
        self,
        block: Hashable,
        distance: Tensor | None,
        arguments: dict[str, Any],
        run: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the result of a block, extrapolated by a distance; None: ``run`` computes it.

        The key of the ``block`` tells calls of the model in a step apart. ``run`` may change image and text.
        """
        image, text = arguments["img"], arguments.get("txt")
        if distance is not None and block in self._known:
            residual, _ = self._known[block]
            if residual is not None:
                image, changed = extrapolated(residual, (image, text), distance)
                text = text if changed is None else changed
            return {"img": image, "txt": text}
        # ComfyUI's blocks add to their input in place. The copies keep the input for the difference.
        copies = {name: arguments[name].clone() for name in ("img", "txt") if arguments.get(name) is not None}
        result = run({**arguments, **copies})
        new_image, new_text = result["img"], result.get("txt")
        last_image, last_text = self._returned
        if image is not last_image or not (text is last_text or new_text is None):
            self.finish()
        added: Tokens = (new_image - image).float(), None if new_text is None else (new_text - text).float()
        if self._blocks:
            sums = zip(self._added, added, strict=True)
            added = tuple(None if one is None or other is None else one.add_(other) for one, other in sums)
        self._blocks.append(block)
        self._returned, self._added = (new_image, new_text), added
        return result

    def finish(self) -> None:
        """Cache the residual of the blocks that have run, if there are any."""
        image, _ = self._returned
        if image is not None:
            first, *others = self._blocks
            added = (None if total is None else total.to(image.dtype) for total in self._added)
            before, blocks = self._known.get(first, (None, 0))
            before = before if blocks == len(self._blocks) else None
            self._known |= dict.fromkeys(others, (None, 0))
            self._known[first] = updated(before, tuple(added)), len(self._blocks)
        self._open()


class Step:
    """One evaluation of all prompts on one latent: ComfyUI's ``calc_cond_batch``.

    Args:
        sampling: the sampling that it belongs to.
        sigma: noise level.
        timestep: what the model is called with; random draws depend on it.
        latent: shape of the latents.
        whole: whether every prompt is for the whole picture, so that all of them get the same latents.
        replaced: ``"attn1"`` or ``"attn2"`` and ComfyUI's name and numbers of each block of a UNet in which
            another node replaces this layer; it stays dense.
    """

    def __init__(
        self,
        sampling: Sampling,
        sigma: float,
        timestep: Tensor,
        latent: Sequence[int],
        whole: bool,
        replaced: frozenset[Hashable],
    ) -> None:
        index = sampling.begin_step(sigma, latent)
        self.sampling, self.settings, self._replaced = sampling, sampling.settings, replaced
        self._step = DenoisingStep(index, sampling.steps, sampling.generation)
        # Of the running call: the tokens at level 1, and whether reference pictures stand beside them.
        self.grid, self.has_references = self.settings.target.grid(latent), False
        self.running: Running | None = None  # what the running block merges; None: it is dense
        self._seed = arithmetic().bits(timestep.float().max())
        self._whole = whole and self.settings.config.plans.guidance
        self._calls = -1
        self._config = self.settings.config.at_step(index, sampling.steps)
        self._plan_for = tuple(latent), self._config

    def begin_call(self, latent: Sequence[int], options: Mapping[str, Any] | None = None) -> None:
        """Decide what a call of the model runs and merges.

        ComfyUI may call it for each prompt, and for parts of the picture.
        """
        self._calls += 1
        self.grid, self.has_references = self.settings.target.grid(latent), False
        self.running = None
        sampling, config, options = self.sampling, self.settings.config, options or {}
        sampling.tracker.begin_call(self._step)
        if sampling.tracker.call == 0 and sampling.tracker.plans(config.plans.every, self._plan_for):
            sampling.plans.clear()
        # Residuals depend on the prompts, and on shape and place of the latents.
        window = getattr(options.get("context_window"), "index_list", ())
        shape = (*latent, *options.get("uuids", ()), *window)
        sampling.decision = decide(config, sampling.tracker, shape)

    def is_replaced(self, layer: str, block: tuple[Any, ...]) -> bool:
        """Return whether another node replaces a layer of a block, or all of its transformer."""
        return not self._replaced.isdisjoint(((layer, *block), (layer, *block[:2])))

    def at(self, level: int) -> MergeSettings:
        """Return the settings of a level."""
        return self._config.at_level(level)

    def merges(self, grid: Grid, level: int) -> bool:
        """Return whether tokens of a grid merge at a level, unless this is a correction step."""
        if level > self.settings.deepest_level or self.sampling.decision.merging is Merging.DENSE:
            return False
        return num_removed(grid, self.at(level)) > 0

    def plan(self, place: Hashable, features: Tensor, grid: Grid, level: int, prompts: int) -> Plan:
        """Return the plan of a block in which tokens merge; blocks of the same ``place`` share it.

        The features ``[b, n, c]`` of the grid have the images of each of the ``prompts`` in a row.
        """
        copies = prompts if self._whole and len(features) % prompts == 0 else 1
        key = place, len(features) // copies, grid, None if self._whole else self._calls
        plans = self.sampling.plans
        if key not in plans:
            alike = shared_features(features, copies) if copies > 1 else features
            plans[key] = self._planned(alike, grid, self.at(level))
        return plans[key] if copies == 1 else plans[key].repeated(copies)

    def _planned(self, features: Tensor, grid: Grid, settings: MergeSettings) -> Plan:
        planner, change, importance = settings.planner, self.sampling.guidance_change, None
        if planner in GUIDED_PLANNERS:
            importance = None if change is None else importance_of_tokens(change, grid)
            if importance is None or importance.shape != features.shape[:2]:
                planner, importance = "tome", None  # as before guidance has changed anything
        more = [] if importance is None else [importance.to(features.device)]
        r, seed = num_removed(grid, settings), self._seed.to(features.device)
        return PLANNERS[planner](features, grid, r, settings, seed, *more)


@dataclasses.dataclass(eq=False)
class Running:
    """What the running block merges."""

    plan: Plan | None  # None: this is a correction, and the block runs dense
    settings: MergeSettings  # of its level
    text_first: bool = True  # whether text comes before the image if they share a sequence
    block: tuple[Any, ...] = ()  # ComfyUI's name and numbers for a block of a UNet
    # Name of the running layer, if its tokens are merged or would be; None otherwise.
    merged: str | None = None
    # Whether the next attention weighs each key by the number of tokens that it stands for.
    weighs: bool = False

    def bias(self, keys: Tensor, tokens: int) -> Tensor | None:
        """``[b, 1, tokens]`` bias for the logits of ``tokens`` keys; None: these are not the merged keys.

        Each layer gets it once, since an adapter may attend to other keys after the block's own attention.
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


def step_in(options: Any) -> Step | None:
    """Return the running step, from ComfyUI's ``transformer_options``; None: nothing merges."""
    step = (options or {}).get(KEY)
    return step if isinstance(step, Step) else None


def running_in(options: Any) -> tuple[Any, Running | None]:
    """Return the running step, and what the running block merges; None: it is dense."""
    step = step_in(options)
    return step, None if step is None else step.running


def prompts_in(options: dict[str, Any]) -> int:
    """Return the number of prompts in the running batch."""
    return len(options.get("cond_or_uncond") or [0])
