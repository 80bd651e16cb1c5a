"""Settings whose cache between steps stays below a limit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from tokenmerge.config import Correction, StepReuse, ToMeConfig
from tokenmerge.config.checks import as_number
from tokenmerge.errors import ConfigError, NothingToMergeError, shown
from tokenmerge.models.find import find_hosts
from tokenmerge.report.flops import kept_bytes, weightless
from tokenmerge.report.prediction import default_or_given
from tokenmerge.runtime.memory.state import Kept
from tokenmerge.runtime.patching.patch import hosts_that_merge

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?B)?\s*", re.IGNORECASE)


def bytes_of(text: object) -> int:
    """Return the number of bytes that a number, or a text such as ``"200MB"``, stands for.

    >>> bytes_of("1.5 GB")
    1500000000
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
    """Return a number of bytes as text. ``rounding`` is applied to the number of shown units.

    >>> in_words(1_503_238_553), in_words(61_800_000), in_words(61_800_001, math.ceil)
    ('1.50 GB', '61.8 MB', '61.9 MB')
    """
    if size >= 1e9:
        return f"{rounding(size / 1e7) / 100:.2f} GB"
    return f"{rounding(size / 1e5) / 10:.1f} MB"


Change = Callable[[ToMeConfig], ToMeConfig]


def _with_finest_level(config: ToMeConfig) -> ToMeConfig:
    reuse = dataclasses.replace(config.reuse, shallow_every=1, full_steps=(), shallow_steps=())
    return dataclasses.replace(config, correction=Correction(), reuse=reuse)


_WITHOUT_REUSE: dict[str, Any] = {"correction": Correction(), "reuse": StepReuse()}
_WITHOUT_CACHE: dict[str, Any] = {**_WITHOUT_REUSE, "features": "input"}
# What is left out, the least harmful first.
_LESS: Mapping[str, Change] = {
    "no correction": partial(dataclasses.replace, correction=Correction()),
    "no correction and every step runs the finest level": _with_finest_level,
    "no correction and no step reuse": partial(dataclasses.replace, **_WITHOUT_REUSE),
    "no correction, no step reuse and no cached features": partial(dataclasses.replace, **_WITHOUT_CACHE),
}


def change_within(pipe_or_model: object, configs: Sequence[ToMeConfig], limit: int) -> tuple[Change, str]:
    """Find out what has to be left out, so that the cache of the default method fits into a limit in bytes.

    It returns a function that changes settings of any of its generations, such as ``configs``, and what that
    leaves out, as text; empty if everything fits. A limit that is too low for any saving is an error.
    """
    needed = counted_cache(pipe_or_model, configs)
    if needed <= limit:
        return lambda config: config, ""
    least = needed
    for what, change in _LESS.items():
        changed = list(map(change, configs))
        with contextlib.suppress(NothingToMergeError):  # where nothing merges, the cache gets no smaller
            if any(own.merges or own.reuse.on for own in changed):
                least = counted_cache(pipe_or_model, changed)
        if least <= limit:
            return change, f"{what}; with everything, the cache would take {in_words(needed, math.ceil)}"
    # Needed sizes are rounded up, so that they are accepted as limits. The refused limit is rounded down.
    raise ConfigError(
        f"max_cache: expected at least {in_words(least, math.ceil)}, got {in_words(limit, math.floor)}; with "
        "less, no step could skip anything, and at the model's default size nothing would merge; raise it"
    )


def counted_cache(pipe_or_model: object, configs: Sequence[ToMeConfig]) -> int:
    """Return the most bytes that one picture of the default size caches with any of some settings."""
    hosts = find_hosts(pipe_or_model)
    size = default_or_given(hosts, None, None)
    totals = dict.fromkeys(configs, 0)
    for config in totals:
        for host in hosts_that_merge(hosts, config, size)[0]:
            (copied,) = find_hosts(weightless(host.root, host.on_cpu))
            arguments = partial(copied.example, *size, host.usual_batch)
            totals[config] += kept_bytes(copied, config, arguments, Kept())
    return max(totals.values(), default=0)
