"""What a user asks for: settings as frozen values, checked when they are made.

Imports ``errors`` alone, and no torch.
"""

from tokenmerge.config.tome import (
    COMBINATIONS,
    GUIDED_PLANNERS,
    PLANNERS,
    SCOPES,
    Schedule,
    ToMeConfig,
    highest_ratio,
)

__all__ = ["COMBINATIONS", "GUIDED_PLANNERS", "PLANNERS", "SCOPES", "Schedule", "ToMeConfig", "highest_ratio"]
