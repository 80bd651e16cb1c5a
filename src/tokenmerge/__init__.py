"""Faster diffusion models without training, by token merging and step reuse.

The five calls that matter::

    patch = tokenmerge.apply_token_merging(pipe, speedup=2.0)     # patch in place, for a wanted speed-up
    print(patch)                                                  # what it does, saves and caches
    patch.remove()                                                # restore the model exactly
    with tokenmerge.token_merging(pipe, speedup=2.0): ...         # the same for one block of code
    tokenmerge.apply_patch(pipe, ratio=0.5)                       # tomesd's call, for old scripts

Instead of a speed-up, pass ``ratio=0.5`` to merge half of the tokens and nothing else, a :class:`ToMeConfig`
with settings of your own, the name of a published method of :mod:`tokenmerge.presets`, a :class:`ViTConfig`
for a vision transformer, or the path of a file that ``tokenmerge tune`` wrote.

Names that need PyTorch are imported when they are first used, so that parts that do not need it, such as
``tokenmerge.paddle``, can be imported without it.

>>> import tokenmerge
>>> tokenmerge.ToMeConfig(ratio=0.5).ratio
0.5
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmerge import presets
from tokenmerge.config import Correction, MergeSharing, Rule, StepReuse, ToMeConfig
from tokenmerge.errors import (
    ConfigError,
    MissingExtraError,
    ModelInUseError,
    NothingToMergeError,
    TokenMergingError,
    UnsupportedModelError,
)
from tokenmerge.warn import warn_renamed

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Correction",
    "DecreasingSchedule",
    "MergeSharing",
    "MissingExtraError",
    "ModelInUseError",
    "NothingToMergeError",
    "Patch",
    "Rule",
    "StepReuse",
    "ToMeConfig",
    "TokenMergingError",
    "UnsupportedModelError",
    "ViTConfig",
    "__version__",
    "apply_patch",
    "apply_token_merging",
    "merge",
    "presets",
    "remove_patch",
    "remove_token_merging",
    "token_merging",
]

if TYPE_CHECKING:
    from tokenmerge import merge
    from tokenmerge.api import Patch, apply_token_merging, remove_token_merging, token_merging
    from tokenmerge.compat import apply_patch, remove_patch
    from tokenmerge.vit.config import DecreasingSchedule, ViTConfig
else:
    # Where each name is defined that is imported when it is first used.
    _MODULE_OF = {
        **dict.fromkeys(("Patch", "apply_token_merging", "remove_token_merging", "token_merging"), "api"),
        **dict.fromkeys(("apply_patch", "remove_patch"), "compat"),
        **dict.fromkeys(("DecreasingSchedule", "ViTConfig"), "vit.config"),
    }
    # Public modules that ``import tokenmerge`` alone makes available, and what is imported for each.
    _MODULES = {name: name for name in ("compat", "default_method", "merge", "report")}
    _MODULES["vit"] = "vit.report"

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used, or return a former one with a warning (PEP 562)."""
        if name == "PlanSharing":
            warn_renamed("tokenmerge.PlanSharing", "tokenmerge.MergeSharing")
            return MergeSharing
        if name in _MODULE_OF:
            value = getattr(import_module(f"tokenmerge.{_MODULE_OF[name]}"), name)
        elif name in _MODULES:
            import_module(f"tokenmerge.{_MODULES[name]}")
            value = import_module(f"tokenmerge.{name}")
        else:
            raise AttributeError(f"module 'tokenmerge' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return names already imported, and names that can be imported."""
        return sorted({*globals(), *__all__, *_MODULES})
