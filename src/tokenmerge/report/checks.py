"""Checks of settings against models, before anything is patched."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmerge.config import ToMeConfig
from tokenmerge.models.base import Host
from tokenmerge.runtime.blocks.planning import merges_tokens as merges_in
from tokenmerge.runtime.patching.patch import check_host, stages_of


def check_merging(hosts: Sequence[Host], config: ToMeConfig, size: tuple[int, int]) -> None:
    """Check that settings would merge tokens, or skip steps, in each model.

    Args:
        hosts: the models, from :func:`tokenmerge.models.find.find_hosts`.
        config: the settings.
        size: height and width of the sample.

    Raises:
        ConfigError, UnsupportedModelError: the settings do not fit a model.
        NothingToMergeError: nothing would merge at this size.
    """
    for host in hosts:
        check_host(host, config, size)


def merges_tokens(hosts: Sequence[Host], config: ToMeConfig, size: tuple[int, int]) -> bool:
    """Return whether any token merges in a sample of this height and width."""
    rows, columns = size
    grids = ((host, (host.frames, -(-rows // host.patch), -(-columns // host.patch))) for host in hosts)
    return config.ratio > 0 and any(merges_in(stages_of(host, config), grid) for host, grid in grids)
