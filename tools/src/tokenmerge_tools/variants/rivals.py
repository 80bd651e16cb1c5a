"""The table of rivals, from the libraries and papers that users would take instead of this package."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tokenmerge.config import SETTINGS
from tokenmerge_tools.variants import caches, contexts, formulas
from tokenmerge_tools.variants.caches import cache_dit


@dataclasses.dataclass(frozen=True)
class VariantKind:
    """One kind of variant.

    ``apply`` makes a context manager from (model, configuration), which yields the patch of a method of this
    package. ``method`` is the method whose settings it has, if any, and ``takes`` names the settings that it
    accepts. ``is_faster`` says whether it is compared with fewer steps. ``package`` is what pip has to
    install.

    A variant without a method may have a ``number`` that makes it faster, by name and documented default,
    its ``ladder`` of values from weak to strong, and ``options``, each with an example value of its type.
    """

    apply: Callable[..., AbstractContextManager[Any]]
    method: str | None = None
    is_faster: bool = False
    package: str | None = None
    takes: Collection[str] = SETTINGS
    number: tuple[str, float] | None = None
    ladder: tuple[float, ...] = ()
    options: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    def missing(self) -> str | None:
        """Return the reason why it cannot run here, or None if it can."""
        name = self.package and self.package.partition("==")[0]
        if not name or importlib.util.find_spec(name.replace("-", "_")) is not None:
            return None
        return f"{name} is not installed; run: pip install {self.package}"


_rival = partial(VariantKind, is_faster=True)


def _cache(settings: Callable[..., Any], name: str, apply: str, **needs: Any) -> Callable[..., VariantKind]:
    return partial(_rival, partial(caches.of_diffusers, name, apply, settings, **needs))


_ONE = {"one_pass": True}
# The defaults are those of the library, or of the paper's code. An interval of 2 is the weakest of all.
RIVALS = {
    # With tome:merge_sharing.guidance=false, this package does the same as tomesd.
    "tomesd": VariantKind(
        contexts.tomesd, "tome", is_faster=True, package="tomesd==0.1.3", takes=contexts.TOMESD_SETTINGS
    ),
    "deepcache": _rival(
        caches.deepcache, package="DeepCache==0.1.1", number=("interval", 3), ladder=(2, 3, 4, 5, 7)
    ),
    "first-block-cache": _cache(caches.first_block, "first-block-cache", "apply_first_block_cache")(
        number=("threshold", 0.05), ladder=(0.015, 0.03, 0.05, 0.1, 0.2)
    ),
    "taylorseer": _cache(caches.taylorseer, "taylorseer", "apply_taylorseer_cache")(
        number=("interval", 5), ladder=(2, 3, 5, 7, 9)
    ),
    "magcache": _cache(caches.magcache, "magcache", "apply_mag_cache")(
        number=("threshold", 0.06), ladder=(0.015, 0.03, 0.06, 0.12, 0.24)
    ),
    "seacache": _cache(caches.seacache, "seacache", "apply_sea_cache")(
        number=("threshold", 0.25), ladder=(0.1, 0.15, 0.25, 0.4, 0.6)
    ),
    "fastercache": _cache(caches.fastercache, "fastercache", "apply_faster_cache", **_ONE)(
        number=("interval", 2), ladder=(2, 3, 4)
    ),
    "pyramid": _cache(
        caches.pyramid, "pyramid", "apply_pyramid_attention_broadcast", in_blocks=False, **_ONE
    )(number=("interval", 2), ladder=(2, 3, 4)),
    "cache-dit": _rival(
        cache_dit,
        package="cache-dit==1.5.3",
        number=("threshold", 0.08),
        ladder=(0.02, 0.04, 0.08, 0.16, 0.24),
        options={"taylor": 1.0, "forecast": "dmd", "mask": "fast"},
    ),
    "easycache": _rival(formulas.easycache, number=("threshold", 0.2), ladder=(0.05, 0.1, 0.2, 0.3, 0.5)),
    "dicache": _rival(formulas.dicache, number=("threshold", 0.08), ladder=(0.02, 0.04, 0.08, 0.16, 0.3)),
    "sada": _rival(formulas.sada),
}
