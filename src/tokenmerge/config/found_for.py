"""What ``tokenmerge tune`` found settings for."""

from __future__ import annotations

import dataclasses

from tokenmerge.config.checks import check_fields, integer, refuse


@dataclasses.dataclass(frozen=True)
class FoundFor:
    """The model, size and number of steps that settings were found for.

    Args:
        model: class of the denoiser.
        height: height of the latents, ≥ 1.
        width: width of the latents, ≥ 1.
        steps: denoising steps, ≥ 1.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    model: str
    height: int
    width: int
    steps: int

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            refuse("tuned.found_for.model", "the name of a class", self.model)
        check_fields(self, "tuned.found_for.", dict.fromkeys(("height", "width", "steps"), integer(1)))

    def differences(
        self, model: str | None = None, size: tuple[int, int] | None = None, steps: int | None = None
    ) -> list[str]:
        """Return the differences, each as a part of a sentence. Arguments that are None are not compared.

        Args:
            model: class of the denoiser.
            size: (height, width) of the latents.
            steps: denoising steps.

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
        return found

    @staticmethod
    def warning(differences: list[str]) -> str:
        """Return the warning about differences, at least one."""
        return (
            f"these settings were found for {' and for '.join(differences)}; speed and closeness may "
            "differ from what was measured: run tokenmerge tune again"
        )
