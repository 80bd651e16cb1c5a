"""Faster diffusion models without training, by merging redundant tokens inside their transformer blocks.

>>> import tokenmerge
>>> tokenmerge.ToMeConfig(ratio=0.5).ratio
0.5
"""

from tokenmerge import merge, presets
from tokenmerge.api import Patch, apply_token_merging, remove_token_merging, token_merging
from tokenmerge.compat import apply_patch, remove_patch
from tokenmerge.config import ToMeConfig
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
    "DecreasingSchedule",
    "MissingExtraError",
    "NothingToMergeError",
    "Patch",
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
