"""What a user asks for: settings as frozen values, checked when they are made.

``ToMeConfig`` has the fields of ``MergeSettings``, and further ones. Its rules say what else holds at which
levels and steps. ``at_step`` and ``at_level`` apply them one after the other; the last returns the
``MergeSettings`` that planners and blocks get.

Imports only ``errors`` and ``warn``, and no torch.
"""

from typing import Any

from tokenmerge.config.json_file import (
    load_config,
    load_settings,
    read_metadata,
    save_config,
    to_metadata,
)
from tokenmerge.config.parts import Correction, MergeSharing, StepReuse, check_known, flat
from tokenmerge.config.rules import Rule, dense_outside
from tokenmerge.config.settings import (
    CACHED_FEATURES,
    COMPARES_NOTHING,
    GUIDED_PLANNERS,
    OWN_NUMBER,
    PLANNERS,
    SCOPES,
    SOFT_PLANNERS,
    MergeSettings,
    check_below_highest_ratio,
    highest_ratio,
)
from tokenmerge.config.tome import SETTINGS, ToMeConfig
from tokenmerge.config.tuned import EstimateErrors, FoundFor, OffAtSpeed, Tuned
from tokenmerge.warn import warn_renamed

__all__ = [
    "CACHED_FEATURES",
    "COMPARES_NOTHING",
    "GUIDED_PLANNERS",
    "OWN_NUMBER",
    "PLANNERS",
    "SCOPES",
    "SETTINGS",
    "SOFT_PLANNERS",
    "Correction",
    "EstimateErrors",
    "FoundFor",
    "MergeSettings",
    "MergeSharing",
    "OffAtSpeed",
    "Rule",
    "StepReuse",
    "ToMeConfig",
    "Tuned",
    "check_below_highest_ratio",
    "check_known",
    "dense_outside",
    "flat",
    "highest_ratio",
    "load_config",
    "load_settings",
    "read_metadata",
    "save_config",
    "to_metadata",
]


def __getattr__(name: str) -> Any:
    """Return a class by its former name, with a warning (PEP 562)."""
    if name == "PlanSharing":
        warn_renamed("tokenmerge.config.PlanSharing", "tokenmerge.config.MergeSharing")
        return MergeSharing
    raise AttributeError(f"module 'tokenmerge.config' has no attribute {name!r}")
