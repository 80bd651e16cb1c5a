"""The state of one sampling and of one of its steps: settings, random draws, plans and residuals."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from tokenmerge.config import GUIDED_PLANNERS, MergeSettings
from tokenmerge.integrations.comfyui.reuse import BlockRuns
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.ops import Plan, shared_features
from tokenmerge.ops.arithmetic import arithmetic
from tokenmerge.planners import PLANNERS, num_removed
from tokenmerge.plans.generation import Merging
from tokenmerge.runtime.memory.reuse import Residual
from tokenmerge.runtime.steps.guidance import importance_of_tokens
from tokenmerge.runtime.steps.scheduler import DenoisingStep, Generation, ends_clean
from tokenmerge.runtime.steps.step_tracker import Decision, StepTracker, decide

# Key of this package's entry in ComfyUI's ``transformer_options``, and of its wrappers.
KEY = "tokenmerge"
_log = logging.getLogger(KEY)
Grid = tuple[int, int, int]


class Sampling:
    """State that outlives a step. Each sampling has its own, even on the same clone of a model.

    Args:
        settings: settings of the model.
        sigmas: noise levels of the steps; empty: unknown.
        guidance: scale of classifier-free guidance; None: unknown.
    """

    def __init__(
        self, settings: Settings, sigmas: Sequence[float] = (), guidance: float | None = None
    ) -> None:
        self.settings = self._asked = settings  # the default method chooses them in the first step
        self.steps = max(1, len(sigmas) - 1)
        self._sigmas, self._guidance = sigmas, guidance
        self._grid: Grid | None = None
        self._said: set[str] = set()
        self._generation = Generation(0)
        self.forget()

    def forget(self) -> None:
        """Drop everything that is cached."""
        self._tracker = StepTracker()
        self.decision = Decision()  # what the running call of the model runs and merges
        self.plans: dict[Hashable, Plan] = {}  # by block, made for the images of one prompt
        self.guidance_change: Tensor | None = None  # of the last step; None: unknown
        # What parts of the model added in the last step that ran them, by call in the step and part.
        self.residuals: dict[Hashable, Residual] = {}
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
        if self._grid is None or (self._grid != grid and self._asked.default is not None):
            self._grid = grid
            clean = ends_clean(self._sigmas)
            self.settings = self._asked.for_sampling(grid, self.steps, self._guidance, clean)
        index = min(max(0, sum(sigma <= known for known in self._sigmas) - 1), self.steps - 1)
        if index < self._tracker.index:
            self.forget()  # the solver begins anew
        return index

    def begin_call(self, index: int, plan_for: object, same: tuple[object, ...]) -> None:
        """Decide what a call of the model runs and merges in a step.

        Plans of another purpose than ``plan_for`` are dropped, and so are those that are too old. ``same`` is
        what residuals depend on: prompts, and shape and place of the latents. Those of a call with another
        value are not reused.
        """
        config, tracker = self.settings.config, self._tracker
        tracker.begin_call(DenoisingStep(index, self.steps, self._generation))
        if tracker.call == 0 and tracker.plans(config.plans.every, plan_for):
            self.plans.clear()
        self.decision = decide(config, tracker, same)

    def in_call(self, part: Hashable) -> Hashable:
        """Return the key of a part of the model in the running call."""
        return self._tracker.call, part

    def of(self, part: Hashable) -> Residual | None:
        """Return the residual of a part of the model, from the same call of an earlier step."""
        return self.residuals.get(self.in_call(part))

    def keep(self, part: Hashable, residual: Residual) -> None:
        """Cache the residual of a part in the running call."""
        self.residuals[self.in_call(part)] = residual


class Step:
    """One evaluation of all prompts on one latent: ComfyUI's ``calc_cond_batch``.

    Args:
        sampling: the sampling that it belongs to.
        sigma: noise level.
        timestep: the timestep that the model is called with; random draws depend on it.
        latent: shape of the latents.
        whole: whether every prompt is for the whole picture, so that all prompts get the same latents.
        replaced: (``"attn1"`` or ``"attn2"``, ComfyUI's name and numbers of a block) of the layers of a UNet
            that another node replaces; they stay dense.
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
        self._index = sampling.begin_step(sigma, latent)
        self.sampling, self.settings, self._replaced = sampling, sampling.settings, replaced
        # Of the running call: the tokens at level 1, and whether reference pictures stand beside them.
        self.grid, self.has_references = self.settings.target.grid(latent), False
        self.running: Running | None = None  # what the running block merges; None: it is dense
        self._seed = arithmetic().bits(timestep.float().max())
        self._whole = whole and self.settings.config.plans.guidance
        self._calls = -1
        self._config = self.settings.config.at_step(self._index, sampling.steps)
        self._plan_for = tuple(latent), self._config

    def begin_call(self, latent: Sequence[int], options: Mapping[str, Any] | None = None) -> None:
        """Prepare a call of the model. ComfyUI may call it for each prompt, and for parts of the picture."""
        self._calls += 1
        self.grid, self.has_references = self.settings.target.grid(latent), False
        self.running = None
        options = options or {}
        window = getattr(options.get("context_window"), "index_list", ())
        same = (*latent, *options.get("uuids", ()), *window)
        self.sampling.begin_call(self._index, self._plan_for, same)

    def is_replaced(self, layer: str, block: tuple[Any, ...]) -> bool:
        """Return whether another node replaces a layer of a block, or all of its transformer."""
        return not self._replaced.isdisjoint(((layer, *block), (layer, *block[:2])))

    def at(self, level: int) -> MergeSettings:
        """Return the settings of a level in this step."""
        return self._config.at_level(level)

    def merges(self, grid: Grid, level: int) -> bool:
        """Return whether tokens of a grid merge at a level in this step, unless it is a correction step."""
        settings = self.at(level)
        within = level <= self.settings.deepest_level
        dense = self.sampling.decision.merging is Merging.DENSE
        return within and not dense and bool(settings.ratio) and num_removed(grid, settings) > 0

    def plan(self, place: Hashable, features: Tensor, grid: Grid, level: int, prompts: int) -> Plan:
        """Return the plan of a block in which tokens merge.

        Args:
            place: key of the block, or of the blocks that share a plan.
            features: ``[b, n, c]``, with the images of each prompt in a row.
            grid: (frames, rows, columns) of the n tokens.
            level: level of the block.
            prompts: number of prompts in the batch.
        """
        copies = prompts if self._whole and len(features) % prompts == 0 else 1
        images = len(features) // copies
        key = (place, images, grid, None if self._whole else self._calls)
        plans = self.sampling.plans
        if key not in plans:
            alike = shared_features(features, copies) if copies > 1 else features
            plans[key] = self._planned(alike, grid, self.at(level))
        return plans[key] if copies == 1 else plans[key].repeated(copies)

    def _planned(self, features: Tensor, grid: Grid, settings: MergeSettings) -> Plan:
        seed, name, more = self._seed.to(features.device), settings.planner, []
        if name in GUIDED_PLANNERS:
            change = self.sampling.guidance_change
            importance = None if change is None else importance_of_tokens(change, grid)
            if importance is None or importance.shape != features.shape[:2]:
                name = "tome"  # as in the first step, before guidance has changed anything
            else:
                more = [importance.to(features.device)]
        return PLANNERS[name](features, grid, num_removed(grid, settings), settings, seed, *more)


@dataclasses.dataclass(eq=False)
class Running:
    """What the running block merges."""

    plan: Plan | None  # which tokens merge; None: this is a correction, and the block runs dense
    settings: MergeSettings  # settings of its level
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
        sizes = self.plan.sizes
        text = tokens - sizes.shape[1]
        if text < 0 or len(keys) != len(sizes):
            return None
        self.weighs = False
        beside = (text, 0) if self.text_first else (0, text)
        return F.pad(sizes.log(), beside).to(keys.dtype).unsqueeze(1)


def step_in(options: Any) -> Step | None:
    """Return the running step, from ComfyUI's ``transformer_options``; None: nothing merges."""
    step = (options or {}).get(KEY)
    return step if isinstance(step, Step) else None


def prompts_in(options: dict[str, Any]) -> int:
    """Return the number of prompts in the running batch."""
    return len(options.get("cond_or_uncond") or [0])
