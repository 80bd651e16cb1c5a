"""Settings whose cache between steps stays below a limit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from typing import Any

from tokenmerge.config import Correction, Rule, StepReuse, ToMeConfig
from tokenmerge.config.checks import as_number
from tokenmerge.errors import ConfigError, NothingToMergeError, shown
from tokenmerge.models.find import find_hosts
from tokenmerge.report.flops import weightless
from tokenmerge.report.prediction import default_or_given
from tokenmerge.report.steps import kept_bytes
from tokenmerge.runtime.patching.patch import hosts_that_merge

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?B)?\s*", re.IGNORECASE)


def bytes_of(text: object) -> int:
    """Return the bytes that a number, or a text such as ``"200MB"`` or ``"1.5 GB"``, stands for.

    Units are powers of 1000.

    >>> bytes_of("1.5 GB")
    1500000000

    Raises:
        ConfigError: the value is neither.
    """
    if (number := as_number(text)) is not None and number >= 0:
        return int(number)
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigError(
            f"max_cache: expected a size such as '200MB' or a number of bytes, got {shown(text)}"
        )
    return int(Decimal(found[1]) * _UNITS[(found[2] or "").upper()])


def in_words(size: int, rounding: Callable[[float], int] = round) -> str:
    """Format a number of bytes. ``rounding`` is applied to the number of shown units.

    >>> in_words(1_503_238_553), in_words(61_800_000), in_words(61_800_001, math.ceil)
    ('1.50 GB', '61.8 MB', '61.9 MB')
    """
    if size >= 1e9:
        return f"{rounding(size / 1e7) / 100:.2f} GB"
    return f"{rounding(size / 1e5) / 10:.1f} MB"


def within(pipe_or_model: object, config: ToMeConfig, limit: int) -> tuple[ToMeConfig, str]:
    """Leave out as much correction and step reuse as needed for a cache of ``limit`` bytes.

    Parts are left out in this order: the correction, which makes the picture less close; skipping a UNet's
    finest level, and then all step reuse, which saves less time; at last, cached features. The cache is
    counted at the model's default size for one picture with guidance.

    Returns:
        The settings, and what was left out, as text; empty if everything fits.

    Raises:
        ConfigError: even the settings without these parts cache more, or the model has no default size.
    """
    needed = counted_cache(pipe_or_model, config)
    if needed <= limit:
        return config, ""
    least = needed
    for fewer, what in _with_less(config):
        try:
            least = counted_cache(pipe_or_model, fewer)
        except NothingToMergeError as error:
            raise ConfigError(
                f"max_cache: expected at least {in_words(least, math.ceil)}, got "
                f"{in_words(limit, math.floor)}; with less, no step could skip anything, and at the model's "
                "default size nothing merges; raise it"
            ) from error
        if least <= limit:
            return fewer, f"{what}; with everything, the cache would take {in_words(needed, math.ceil)}"
    # Needed sizes are rounded up, so that they are accepted as limits. The refused limit is rounded down.
    raise ConfigError(
        f"max_cache: expected at least {in_words(least, math.ceil)}, which these settings cache between "
        f"steps without correction, step reuse and cached features ({in_words(needed, math.ceil)} with "
        f"them), got {in_words(limit, math.floor)}; raise it"
    )


def counted_cache(pipe_or_model: object, config: ToMeConfig) -> int:
    """Count the bytes cached between steps, in a generation of one picture at the model's default size.

    If the settings differ by guidance scale, it is the largest of the caches.
    """
    hosts = find_hosts(pipe_or_model)
    height, width = default_or_given(hosts, None, None)
    merging, _ = hosts_that_merge(hosts, config, (height, width))
    total = 0
    for host in merging:
        (copied,) = find_hosts(weightless(host.root, host.on_cpu))
        arguments = partial(copied.example, height, width, host.usual_batch)
        total += max(kept_bytes(copied, one, arguments) for one in config.variants())
    return total


def _with_less(config: ToMeConfig) -> Iterator[tuple[ToMeConfig, str]]:
    """Yield settings that cache less and less, each with what it leaves out."""
    if any(one.correction.on for one in config.variants()):
        config = _without(config, "correction", Correction())
        yield config, "no correction"
    if any(one.reuse.skips_finest for one in config.variants()):
        coarse = dataclasses.replace(
            config.reuse, shallow_every=1, shallow_from=0.0, shallow_until=1.0, shallow_steps=()
        )
        config = _without(config, "reuse", coarse, "reuse.shallow_")
        yield config, "no correction and every step runs the finest level"
    if any(one.reuse.on for one in config.variants()):
        config = _without(config, "reuse", StepReuse())
        yield config, "no correction and no step reuse"
    if config.cached_features:
        yield (
            dataclasses.replace(config, features="input"),
            "no correction, no step reuse and no cached features",
        )


def _without(config: ToMeConfig, part: str, value: Any, names: str = "") -> ToMeConfig:
    """Replace one part of the settings, at every guidance scale.

    Rules no longer change settings whose names start with ``names``; empty: none of the part.
    """

    def other(rule: Rule) -> Rule:
        changes = {n: own for n, own in rule.changes.items() if not n.startswith(names or f"{part}.")}
        return dataclasses.replace(rule, changes=changes)

    return dataclasses.replace(config, **{part: value, "rules": tuple(map(other, config.rules))})
