"""What ``tokenmerge tune`` measured on one model: a speed, and how far estimates were off."""

from __future__ import annotations

import dataclasses
from typing import Any

from tokenmerge.config.checks import (
    MOST_STEPS,
    at_least_1,
    check_fields,
    integer,
    number,
    of_type,
    optional,
    refuse,
)
from tokenmerge.config.former import takes_former_names
from tokenmerge.errors import ConfigError
from tokenmerge.warn import warn_renamed

VERSION_OF_TUNE = 3
KEYS = frozenset({"version", "speedup", "for", "estimates"})
KEYS_OF_A_PLAN = frozenset({"version", "speedup", "plan", "for"})  # of version 2, until November 2026
_decibels = number("a number of dB from -200 to 200", lambda value: -200 <= value <= 200)
_spread = number("a number of dB from 0 to 200", lambda value: 0 <= value <= 200)


@takes_former_names(solver="scheduler")
@dataclasses.dataclass(frozen=True)
class FoundFor:
    """The kind of generation that was measured. A field is None if it is unknown.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    model: str  # class of the denoiser
    height: int  # of the latents, ≥ 1
    width: int
    steps: int
    scheduler: str | None = None  # class of the scheduler
    guidance: float | None = None  # scale of classifier-free guidance, ≥ 0, which is 1 without it
    weights: str | None = None  # fingerprint of the weights of the denoiser

    def __post_init__(self) -> None:
        name_of_class = of_type(str, "the name of a class")
        checks = {
            "model": name_of_class,
            "scheduler": optional(name_of_class),
            "height": integer(1),
            "width": integer(1),
            "steps": integer(1, MOST_STEPS),
            "guidance": optional(number("a number ≥ 0", lambda value: value >= 0)),
            "weights": optional(of_type(str, "a fingerprint")),
        }
        check_fields(self, "for.", checks)

    @property
    def solver(self) -> str | None:
        """The former name of ``scheduler``."""
        warn_renamed("FoundFor.solver", "FoundFor.scheduler")
        return self.scheduler

    def differences(
        self,
        model: str | None = None,
        size: tuple[int, int] | None = None,
        steps: int | None = None,
        scheduler: str | None = None,
        guidance: float | None = None,
        weights: str | None = None,
    ) -> list[str]:
        """Return the differences, each as a part of a sentence. Arguments that are None are not compared.

        >>> FoundFor("UNet2DConditionModel", 64, 64, 20).differences(size=(96, 64), steps=4)
        ['latents of 64 × 64, not 96 × 64', '20 steps, not 4']
        """
        compared = (
            ("{}, not {}", self.model, model),
            ("a {0} with other weights", self.weights and self.model, weights and self.model),
            ("latents of {0[0]} × {0[1]}, not {1[0]} × {1[1]}", (self.height, self.width), size),
            ("{} steps, not {}", self.steps, steps),
            ("{}, not {}", self.scheduler, scheduler),
            ("guidance {:g}, not {:g}", self.guidance, guidance),
        )
        found = []
        for text, recorded, given in compared:
            if None in (recorded, given):
                continue
            differs = self.weights != weights if "weights" in text else recorded != given
            if differs:
                found.append(text.format(recorded, given))
        return found

    @staticmethod
    def warning(differences: list[str]) -> str:
        """Return the note about differences from what was measured."""
        return (
            f"tokenmerge tune measured {' and '.join(differences)}: the estimate is that of small models, "
            "and the speed was not measured here; run tokenmerge tune for this generation"
        )


@dataclasses.dataclass(frozen=True)
class OffAtSpeed:
    """How far the estimates were off at one speed: the true PSNR less the estimate, in dB, in the mean."""

    speedup: float  # dense operations divided by those of the generation
    before: float  # of the estimate before a run
    after: float  # of that after a run

    def __post_init__(self) -> None:
        checks = {"speedup": at_least_1, "before": _decibels, "after": _decibels}
        check_fields(self, "estimates.off.", checks)


@dataclasses.dataclass(frozen=True)
class EstimateErrors:
    """How far the estimates were off on one model.

    ``off`` has the errors by speed, ascending. The spreads are the standard deviations of one prompt from
    them, in dB. What is learned from few prompts is mixed with what is known of small models, which
    counts for some prompts; ``freedom`` is the number of prompts that a spread counts for, less one.
    """

    prompts: int  # ≥ 2
    off: tuple[OffAtSpeed, ...]
    spread_before: float
    spread_after: float
    freedom: int

    def __post_init__(self) -> None:
        checks = {
            "prompts": integer(2),
            "spread_before": _spread,
            "spread_after": _spread,
            "freedom": integer(1),
        }
        check_fields(self, "estimates.", checks)
        speeds = [one.speedup for one in self.off]
        if not speeds or speeds != sorted(set(speeds)):
            refuse("estimates.off", "at least one speed, ascending and each once", speeds)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The content of a file of ``tokenmerge tune``."""

    speedup: float  # for the default method, ≥ 1
    found_for: FoundFor
    errors: EstimateErrors

    def __post_init__(self) -> None:
        check_fields(self, "", {"speedup": at_least_1})

    def content(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "version": VERSION_OF_TUNE,
            "speedup": self.speedup,
            "for": dataclasses.asdict(self.found_for),
            "estimates": dataclasses.asdict(self.errors),
        }

    @classmethod
    def of(cls, content: dict[str, Any]) -> Tuned:
        """Return what a file holds, from its content with the keys ``KEYS``.

        Raises:
            ConfigError: a value is missing, of the wrong type or out of range.
        """
        if content["version"] != VERSION_OF_TUNE or isinstance(content["version"], bool):
            refuse("version", f"{VERSION_OF_TUNE}, the one that this release reads", content["version"])
        estimates = content["estimates"]
        off = estimates.get("off") if isinstance(estimates, dict) else None
        if not isinstance(off, list):
            refuse("estimates", "an object with a list off", estimates)
        found_for = _made(FoundFor, "for", content["for"])
        speeds = tuple(_made(OffAtSpeed, "estimates.off", one) for one in off)
        errors = _made(EstimateErrors, "estimates", {**estimates, "off": speeds})
        return cls(content["speedup"], found_for, errors)


def _made(cls: Any, name: str, values: Any) -> Any:
    """Return a dataclass with the values of an object in a file."""
    fields = dataclasses.fields(cls)
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    known = {field.name for field in fields}
    if not isinstance(values, dict) or not needed <= values.keys() <= known:
        got = list(values) if isinstance(values, dict) else values
        refuse(name, f"an object with the keys {', '.join(field.name for field in fields)}", got)
    return cls(**values)


def refuse_a_plan(content: dict[str, Any]) -> None:
    """Refuse a file of an earlier ``tokenmerge tune``, which holds a plan.

    Raises:
        ConfigError: in any case.
    """
    speedup = at_least_1("speedup", content["speedup"])
    raise ConfigError(
        "version: this file holds a plan of an earlier tokenmerge tune, which is no longer read; run "
        f"tokenmerge tune again, or write apply_token_merging(pipe, speedup={speedup:g})"
    )
