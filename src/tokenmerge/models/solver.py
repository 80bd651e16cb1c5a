"""What the solver of a pipeline does with the model's results, read from diffusers' scheduler."""

from __future__ import annotations

from typing import Any

# Schedulers that add noise in each step and whose name does not say so.
_NOISY = ("DDPMScheduler", "LCMScheduler", "TCDScheduler", "RePaintScheduler")
# Schedulers that combine the results of four steps. With their weights, such as 55/24, −59/24, 37/24 and
# −9/24, they multiply an error that alternates between steps by up to 6.7.
_AMPLIFYING = ("PNDMScheduler", "IPNDMScheduler", "LMSDiscreteScheduler")


def adds_noise(scheduler: Any) -> bool:
    """Whether a solver adds noise in each step."""
    name, config = type(scheduler).__name__, getattr(scheduler, "config", {})
    return (
        name in _NOISY
        or "Ancestral" in name
        or "SDE" in name
        or str(config.get("algorithm_type", "")).startswith("sde")
        or bool(config.get("stochastic_sampling", False))
    )


def amplifies(scheduler: Any) -> bool:
    """Whether a solver amplifies an error that alternates between steps."""
    return type(scheduler).__name__ in _AMPLIFYING
