"""The verbs: apply, remove, and apply for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from tokenmerge.config import ToMeConfig
from tokenmerge.errors import ConfigError
from tokenmerge.models import find_hosts
from tokenmerge.patch import hosts_that_merge, new_run, patch_host, restore, run_of
from tokenmerge.report import Report, predict
from tokenmerge.runtime import RecordedPlan, Run

__all__ = ["Patch", "apply_token_merging", "remove_token_merging", "token_merging"]


class Patch:
    """What :func:`apply_token_merging` did to a model, and the way to undo it."""

    def __init__(self, model: object, config: ToMeConfig, runs: dict[nn.Module, Run], recorded: Run) -> None:
        self._model = model
        self._config = config
        self._runs = runs
        self._recorded = recorded

    @property
    def report(self) -> Report:
        """What merging does to each block at the size that the model was made for, and what it saves.

        For another size: ``tokenmerge.report.predict(model, config, height, width)``.
        """
        return predict(self._model, self._config)

    def remove(self) -> None:
        """Restore the models; one that has been patched anew or restored since then stays as it is."""
        for root, run in self._runs.items():
            if run_of(root) is run:
                restore(root)

    @contextlib.contextmanager
    def record(self) -> Iterator[dict[str, RecordedPlan]]:
        """While the context lasts, keep the latest plan of every block that merges, by the block's path.

        The blocks are those of the denoiser, or of the first ControlNet where no denoiser is patched.
        """
        run = self._recorded
        before, plans = run.record, dict[str, RecordedPlan]()
        run.record = plans
        try:
            yield plans
        finally:
            run.record = before


def apply_token_merging(pipe_or_model: object, config: ToMeConfig) -> Patch:
    """Merge tokens in a diffusion model from its next call on, in place.

    Args:
        pipe_or_model: a diffusers pipeline (its ControlNets are patched too), a diffusers model such as
            ``pipe.unet``, or a CompVis-style model. One that is patched already gets the new settings.
        config: what to merge and how much.

    Returns:
        A handle: ``print(patch.report)`` says what happens where, ``patch.remove()`` undoes it.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
        NothingToMergeError: with these settings no token of it would merge. Only a ControlNet may stay
            dense, beside a denoiser that merges; the report names it.
        ConfigError: ``config`` is not a configuration.

        Whatever is raised, the model is as it was before.
    """
    if not isinstance(config, ToMeConfig):
        raise ConfigError(f"config: expected a ToMeConfig such as ToMeConfig(ratio=0.5), got {config!r}")
    hosts = find_hosts(pipe_or_model)
    merging, _ = hosts_that_merge(hosts, config, size=None)
    for host in hosts:
        restore(host.root)
    runs = {host.root: new_run(host, config) for host in merging}
    for host in merging:
        patch_host(host, runs[host.root])
    denoiser = next((host for host in merging if not host.controlnet), merging[0])
    return Patch(pipe_or_model, config, runs, runs[denoiser.root])


def remove_token_merging(pipe_or_model: object) -> None:
    """Restore a model exactly as it was; does nothing to one that is not patched.

    Raises:
        UnsupportedModelError: it is not, and does not contain, a model that tokens can be merged in.
    """
    for host in find_hosts(pipe_or_model):
        restore(host.root)


@contextlib.contextmanager
def token_merging(pipe_or_model: object, config: ToMeConfig) -> Iterator[Patch]:
    """Merge tokens while the context lasts; then put back what was there, also after an exception.

    Args:
        pipe_or_model: as for :func:`apply_token_merging`.
        config: what to merge and how much.

    Raises:
        UnsupportedModelError, NothingToMergeError, ConfigError: as :func:`apply_token_merging`.
    """
    before = [(host, run_of(host.root)) for host in find_hosts(pipe_or_model)]
    patch = apply_token_merging(pipe_or_model, config)
    try:
        yield patch
    finally:
        for host, run in before:
            restore(host.root)
            if run is not None:
                patch_host(host, run)
