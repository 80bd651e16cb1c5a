"""What ``tokenmerge tune`` found settings for."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer, number, optional, refuse


@dataclasses.dataclass(frozen=True)
class FoundFor:
    """The signature of settings that were found by a search: what they were found for.

    Args:
        model: class of the denoiser.
        height: height of the latents, ≥ 1.
        width: width of the latents, ≥ 1.
        steps: denoising steps, ≥ 1.
        solver: class of the scheduler; None: not recorded.
        guidance: scale of classifier-free guidance, ≥ 0; 1: none; None: not recorded.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    model: str
    height: int
    width: int
    steps: int
    solver: str | None = None
    guidance: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("model", self.model), ("solver", self.solver or "")):
            if not isinstance(value, str):
                refuse(f"for.{name}", "the name of a class", value)
        checks = dict.fromkeys(("height", "width", "steps"), integer(1))
        guidance = optional(number("a number ≥ 0", lambda value: value >= 0))
        check_fields(self, "for.", {**checks, "guidance": guidance})

    def differences(
        self,
        model: str | None = None,
        size: tuple[int, int] | None = None,
        steps: int | None = None,
        solver: str | None = None,
        guidance: float | None = None,
    ) -> list[str]:
        """Return the differences, each as a part of a sentence. Arguments that are None are not compared.

        Args:
            model: class of the denoiser.
            size: (height, width) of the latents.
            steps: denoising steps.
            solver: class of the scheduler.
            guidance: scale of classifier-free guidance.

        >>> FoundFor("UNet2DConditionModel", 64, 64, 20).differences(size=(96, 64), steps=4)
        ['latents of 64 × 64, not 96 × 64', '20 steps, not 4']
        """
        found = []
        if model not in (None, self.model):
            found.append(f"{self.model}, not {model}")
        if size not in (None, (self.height, self.width)):
            assert size is not None
            found.append(f"latents of {self.height} × {self.width}, not {size[0]} × {size[1]}")
        if steps not in (None, self.steps):
            found.append(f"{self.steps} steps, not {steps}")
        if None not in (self.solver, solver) and solver != self.solver:
            found.append(f"{self.solver}, not {solver}")
        if self.guidance is not None and guidance not in (None, self.guidance):
            found.append(f"guidance {self.guidance:g}, not {guidance:g}")
        return found

    @staticmethod
    def warning(differences: list[str], speedup: float | None = None) -> str:
        """Return the warning about differences, at least one.

        Args:
            differences: as :meth:`differences` returns them.
            speedup: of the default method, which runs instead; None: the settings are used all the same.
        """
        if speedup is not None:
            return (
                f"this plan was found for {' and for '.join(differences)}, so the default method runs with "
                f"speedup={speedup:g} instead; run tokenmerge tune for this generation"
            )
        return (
            f"these settings were found for {' and for '.join(differences)}; speed and closeness may "
            "differ from what was measured: run tokenmerge tune again"
        )
