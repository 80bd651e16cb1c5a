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
from tokenmerge.report import Report, predict
from tokenmerge.runtime.patch import hosts_that_merge, new_state, patch_host, restore, state_of
from tokenmerge.runtime.pipeline import Pipeline
from tokenmerge.runtime.state import ModelState, RecordedPlan
from tokenmerge.vit.config import ViTConfig
from tokenmerge.vit.hosts import find_encoders
from tokenmerge.vit.patch import checked_encoders, new_vit_state, patch_encoder
from tokenmerge.vit.report import ViTReport, predict_vit
from tokenmerge.vit.runtime import RecordedTokens

__all__ = ["Patch", "apply_token_merging", "remove_token_merging", "token_merging"]

AnyReport = TypeVar("AnyReport")
AnyRecord = TypeVar("AnyRecord")


class Patch(Generic[AnyReport, AnyRecord]):
    """What :func:`apply_token_merging` did to a model, and the way to undo it."""

    def __init__(self, predict: Callable[[], AnyReport], states: dict[nn.Module, Any], recorded: Any) -> None:
        self._predict = predict
        self._states = states
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
        for root, state in self._states.items():
            if state_of(root) is state:
                restore(root)

    def at_step(self, index: int, steps: int) -> None:
        """Set the denoising step that comes next, in a loop that is not a diffusers pipeline's.

        Only settings that follow the steps need it. An ``index`` of 0 begins a generation, and so does one
        that is neither the last index nor the next. It counts for the calls of this thread, and from then on
        no scheduler is asked in it.

        Args:
            index: of the step, 0 ≤ index < steps.
            steps: number of steps of the generation.

        Raises:
            ConfigError: these are no such numbers.
        """
        if not (isinstance(index, int) and isinstance(steps, int) and 0 <= index < steps):
            raise ConfigError(f"index, steps: expected integers, 0 ≤ index < steps, got {index!r}, {steps!r}")
        for pipeline in {state.pipeline for state in self._states.values()}:
            pipeline.set_step(index, steps)

    def at_size(self, height: int, width: int) -> None:
        """Set the size of the pictures that come next, for a model that is compiled before its first call.

        FLUX.1, FLUX.2 and models like them get the places of their tokens as the values of ``img_ids``, and
        values are unknown while ``torch.compile`` makes a graph of the whole model. Call this before the
        model is called with a new size. If the model is compiled with ``dynamic=True``, a new size needs no
        new graph. Without a graph of the whole model, such a model reads the values, and takes this size only
        where they are not the rows and columns of one picture. All other models read their grid from the
        shape of the sample, and this changes nothing for them.

        A compiled model cannot notice that two sizes have equally many tokens, such as 64 × 128 and
        128 × 64.

        Args:
            height: of the latents, as for :func:`tokenmerge.report.predict`, and not of the picture: 128
                for a picture of FLUX.1 that is 1024 pixels high. A multiple of the model's patch, 2 there.
            width: of the latents.

        Raises:
            ConfigError: these are no such numbers, or the handle is that of a vision transformer.
        """
        states = [state for state in self._states.values() if isinstance(state, ModelState)]
        if not states:
            raise ConfigError(
                "at_size: a vision transformer reads its grid from its input; leave the call out"
            )
        for state in states:
            state.set_size(height, width)

    @contextlib.contextmanager
    def record(self) -> Iterator[dict[str, AnyRecord]]:
        """While the context lasts, keep what each block that merges did at last, by the block's path.

        The blocks are those of the denoiser, or of the first ControlNet where no denoiser is patched; each
        leaves its plan. Layers of a vision transformer leave what the tokens behind them stand for.
        """
        with self._recorded.recording() as latest:
            yield latest


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
    pipeline = Pipeline(None if isinstance(model, nn.Module) else model)
    states = {host.root: new_state(host, config, pipeline) for host in merging}
    for host in merging:
        patch_host(host, states[host.root])
    denoiser = next((host for host in merging if not host.controlnet), merging[0])
    return Patch(partial(predict, model, config), states, states[denoiser.root])


def _merge_in_encoders(model: object, config: ViTConfig) -> Patch[ViTReport, RecordedTokens]:
    encoders = checked_encoders(model, config)
    states = {encoder.model: new_vit_state(encoder, config) for encoder in encoders}
    for encoder in encoders:
        restore(encoder.model)
        patch_encoder(encoder, states[encoder.model])
    return Patch(partial(predict_vit, model, config), states, states[encoders[0].model])


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
    before = [(root, patch, state_of(root)) for root, patch in _patchable(pipe_or_model)]
    handle = apply_token_merging(pipe_or_model, config)
    try:
        yield handle
    finally:
        for root, patch, state in before:
            restore(root)
            if state is not None:
                patch(state)


def _patchable(model: object) -> list[tuple[nn.Module, Callable[[Any], None]]]:
    """Every part of a model that either kind of merging can patch, and how to patch it; may be none."""
    found: list[tuple[nn.Module, Callable[[Any], None]]] = []
    with contextlib.suppress(UnsupportedModelError):
        found += [(host.root, partial(patch_host, host)) for host in find_hosts(model)]
    with contextlib.suppress(UnsupportedModelError):
        found += [(encoder.model, partial(patch_encoder, encoder)) for encoder in find_encoders(model)]
    return found
