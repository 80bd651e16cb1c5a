"""The verbs: apply, remove, and apply for a while. A configuration's type says for which kind of model."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar, overload

from torch import nn

from tokenmerge.auto import choose
from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.models.base import Host
from tokenmerge.models.find import find_hosts
from tokenmerge.models.layout import Grid
from tokenmerge.report import Report, predict
from tokenmerge.runtime.patch import hosts_that_merge, new_run, patch_host, restore, run_of
from tokenmerge.runtime.pipeline import Pipeline
from tokenmerge.runtime.state import RecordedPlan, Run
from tokenmerge.runtime.step_tracker import Moment
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import find_encoders
from tokenmerge.vit.patch import checked_encoders, new_vit_run, patch_encoder
from tokenmerge.vit.report import ViTReport, predict_vit
from tokenmerge.vit.runtime import RecordedTokens

__all__ = ["Patch", "apply_token_merging", "remove_token_merging", "token_merging"]

AnyReport = TypeVar("AnyReport")
AnyRecord = TypeVar("AnyRecord")


class Patch(Generic[AnyReport, AnyRecord]):
    """What :func:`apply_token_merging` did to a model, and the way to undo it."""

    def __init__(self, predict: Callable[[], AnyReport], runs: dict[nn.Module, Any], recorded: Any) -> None:
        self._predict = predict
        self._runs = runs
        self._recorded = recorded

    @property
    def report(self) -> AnyReport:
        """What merging does to each block at the size that the model was made for, and what it saves.

        For another size: ``tokenmerge.report.predict(model, config, height, width)``, and for a vision
        transformer ``tokenmerge.vit.report.predict_vit``.
        """
        return self._predict()

    def remove(self) -> None:
        """Restore the models; one that has been patched anew or restored since then stays as it is."""
        for root, run in self._runs.items():
            if run_of(root) is run:
                restore(root)

    def at_step(self, index: int, steps: int) -> None:
        """Say which denoising step comes next, in a loop that is not a diffusers pipeline's.

        Only settings that follow the steps need it; ``index`` 0 begins a generation, and so does one that
        is neither the last one again nor the next. From then on a pipeline's own scheduler is not asked any
        more.

        Args:
            index: of the step, 0 ≤ index < steps.
            steps: number of steps of the generation.

        Raises:
            ConfigError: these are no such numbers.
        """
        if not (isinstance(index, int) and isinstance(steps, int) and 0 <= index < steps):
            raise ConfigError(f"index, steps: expected integers, 0 ≤ index < steps, got {index!r}, {steps!r}")
        for run in self._runs.values():
            told = run.pipeline.told
            begins = told is None or index == 0 or index - told.index not in (0, 1)
            generation = object() if begins else told.generation
            run.pipeline.told = Moment(generation, index, steps)

    def at_size(self, height: int, width: int) -> None:
        """Say which size of picture comes next, for a model that is compiled before its first call.

        FLUX.1, FLUX.2 and what is built like them are told by the values of ``img_ids`` where their tokens
        are, and values are unknown while ``torch.compile`` makes a graph of the whole model. Call this before
        the model is called with a new size; no graph is made anew for it if the model is compiled with
        ``dynamic=True``. Called as it is, or by compiled blocks, such a model reads the values, and takes
        this size only where they are not the rows and columns of one picture. All other models read their
        grid from the shape of the sample, and this changes nothing for them.

        A compiled model cannot notice that two sizes have equally many tokens, such as 64 × 128 and
        128 × 64.

        Args:
            height: of the latents, as for :func:`tokenmerge.report.predict`, and not of the picture: 128
                for a picture of FLUX.1 that is 1024 pixels high. A multiple of the model's patch, 2 there.
            width: of the latents.

        Raises:
            ConfigError: these are no such numbers, or the handle is that of a vision transformer.
        """
        runs = [run for run in self._runs.values() if isinstance(run, Run)]
        if not runs:
            raise ConfigError(
                "at_size: a vision transformer reads its grid from its input; leave the call out"
            )
        for run in runs:
            for name, side in (("height", height), ("width", width)):
                if isinstance(side, bool) or not isinstance(side, int) or side < 1 or side % run.patch:
                    raise ConfigError(
                        f"{name}: expected a height and width of the latents, integers ≥ 1 and multiples of "
                        f"{run.patch}, got {side!r}"
                    )
        for run in runs:
            run.given_grid = Grid(given=True)
            run.given_grid.shape = 1, height // run.patch, width // run.patch

    @contextlib.contextmanager
    def record(self) -> Iterator[dict[str, AnyRecord]]:
        """While the context lasts, keep what each block that merges did at last, by the block's path.

        The blocks are those of the denoiser, or of the first ControlNet where no denoiser is patched; each
        leaves its plan. Layers of a vision transformer leave what the tokens behind them stand for.
        """
        run = self._recorded
        before, latest = run.record, dict[str, AnyRecord]()
        run.record = latest
        try:
            yield latest
        finally:
            run.record = before


@overload
def apply_token_merging(
    pipe_or_model: object, config: ToMeConfig | float = 0.5
) -> Patch[Report, RecordedPlan]: ...
@overload
def apply_token_merging(pipe_or_model: object, config: ViTConfig) -> Patch[ViTReport, RecordedTokens]: ...
def apply_token_merging(
    pipe_or_model: object, config: ToMeConfig | ViTConfig | float = 0.5
) -> Patch[Any, Any]:
    """Merge tokens in a diffusion model or a vision transformer from its next call on, in place.

    Args:
        pipe_or_model: for a ToMeConfig a diffusers pipeline (its ControlNets are patched too), a diffusers
            model such as ``pipe.unet``, or a CompVis-style model; for a ViTConfig a ViT, DeiT, CLIP or
            DINOv2 model of transformers, a ``VisionTransformer`` of timm, or a pipeline with one in it. One
            that is patched already gets the new settings.
        config: what to merge and how much; or the ratio of tokens removed alone, and all else is chosen by
            :func:`tokenmerge.auto.choose`.

    Returns:
        A handle: ``print(patch.report)`` says what happens where, ``patch.remove()`` undoes it.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
        NothingToMergeError: with these settings no token of it would merge. Only a ControlNet may stay
            dense, beside a denoiser that merges; the report names it.
        ConfigError: ``config`` is not a configuration, or does not fit the model.

        Whatever is raised, the model is as it was before.
    """
    if isinstance(config, ViTConfig):
        return _merge_in_encoders(pipe_or_model, config)
    if isinstance(config, numbers.Real) and not isinstance(config, bool):
        _hosts(pipe_or_model)  # raises the error that says what a vision transformer takes
        config = choose(pipe_or_model, float(config))
    if not isinstance(config, ToMeConfig):
        raise ConfigError(
            "config: expected a ratio such as 0.5, a ToMeConfig such as ToMeConfig(ratio=0.5), or a "
            f"ViTConfig such as ViTConfig(r=8), got {config!r}"
        )
    return _merge_in_hosts(pipe_or_model, config)


def _merge_in_hosts(model: object, config: ToMeConfig) -> Patch[Report, RecordedPlan]:
    hosts = _hosts(model)
    merging, _ = hosts_that_merge(hosts, config, size=None)
    for host in hosts:
        restore(host.root)
    runs = {host.root: new_run(host, config) for host in merging}
    pipeline = Pipeline(None if isinstance(model, nn.Module) else model)
    pipeline.runs += runs.values()
    for run in runs.values():
        run.pipeline = pipeline
    for host in merging:
        patch_host(host, runs[host.root])
    denoiser = next((host for host in merging if not host.controlnet), merging[0])
    return Patch(partial(predict, model, config), runs, runs[denoiser.root])


def _merge_in_encoders(model: object, config: ViTConfig) -> Patch[ViTReport, RecordedTokens]:
    encoders = checked_encoders(model, config)
    runs = {encoder.model: new_vit_run(encoder, config) for encoder in encoders}
    for encoder in encoders:
        restore(encoder.model)
        patch_encoder(encoder, runs[encoder.model])
    return Patch(partial(predict_vit, model, config), runs, runs[encoders[0].model])


def _hosts(model: object) -> tuple[Host, ...]:
    try:
        return find_hosts(model)
    except UnsupportedModelError as error:
        if not (encoders := find_encoders(model)):
            raise
        name = type(encoders[0].model).__name__
        raise UnsupportedModelError(
            f"no diffusion model to merge tokens in: found the vision transformer {name}, which takes a "
            "ViTConfig such as ViTConfig(r=8) instead of a ToMeConfig"
        ) from error


def remove_token_merging(pipe_or_model: object) -> None:
    """Restore a model exactly as it was; does nothing to one that is not patched.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
    """
    patchable = _patchable(pipe_or_model)
    if not patchable:
        find_hosts(pipe_or_model)  # raises the error that says what there is to pass
    for root, _ in patchable:
        restore(root)


@overload
def token_merging(
    pipe_or_model: object, config: ToMeConfig | float = 0.5
) -> contextlib.AbstractContextManager[Patch[Report, RecordedPlan]]: ...
@overload
def token_merging(
    pipe_or_model: object, config: ViTConfig
) -> contextlib.AbstractContextManager[Patch[ViTReport, RecordedTokens]]: ...
@contextlib.contextmanager
def token_merging(pipe_or_model: object, config: Any = 0.5) -> Iterator[Patch[Any, Any]]:
    """Merge tokens while the context lasts; then put back what was there, also after an exception.

    Args:
        pipe_or_model: as for :func:`apply_token_merging`.
        config: what to merge and how much.

    Raises:
        UnsupportedModelError, NothingToMergeError, ConfigError: as :func:`apply_token_merging`.
    """
    before = [(root, patch, run_of(root)) for root, patch in _patchable(pipe_or_model)]
    handle = apply_token_merging(pipe_or_model, config)
    try:
        yield handle
    finally:
        for root, patch, run in before:
            restore(root)
            if run is not None:
                patch(run)


def _patchable(model: object) -> list[tuple[nn.Module, Callable[[Any], None]]]:
    """Every part of a model that either kind of merging can patch, and how to patch it; may be none."""
    found: list[tuple[nn.Module, Callable[[Any], None]]] = []
    with contextlib.suppress(UnsupportedModelError):
        found += [(host.root, partial(patch_host, host)) for host in find_hosts(model)]
    with contextlib.suppress(UnsupportedModelError):
        found += [(encoder.model, partial(patch_encoder, encoder)) for encoder in find_encoders(model)]
    return found
