"""Faster diffusion models without training, by merging redundant tokens inside their transformer blocks.

>>> import tokenmerge
>>> tokenmerge.ToMeConfig(ratio=0.5).ratio
0.5
"""

from tokenmerge import presets
from tokenmerge.api import Patch, apply_token_merging, remove_token_merging, token_merging
from tokenmerge.compat import apply_patch, remove_patch
from tokenmerge.config import Correction, PlanSharing, Schedule, StepReuse, ToMeConfig
from tokenmerge.errors import (
    ConfigError,
    MissingExtraError,
    NothingToMergeError,
    TokenMergingError,
    UnsupportedModelError,
)
from tokenmerge.vit.config import DecreasingSchedule, ViTConfig

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Correction",
    "DecreasingSchedule",
    "MissingExtraError",
    "NothingToMergeError",
    "Patch",
    "PlanSharing",
    "Schedule",
    "StepReuse",
    "ToMeConfig",
    "TokenMergingError",
    "UnsupportedModelError",
    "ViTConfig",
    "__version__",
    "apply_patch",
    "apply_token_merging",
    "presets",
    "remove_patch",
    "remove_token_merging",
    "token_merging",
]
