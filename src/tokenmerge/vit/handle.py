"""The handle that ``apply_token_merging`` returns for a vision transformer."""

from __future__ import annotations

from typing import Any, NoReturn

from tokenmerge.errors import ConfigError, short_repr, why
from tokenmerge.handle import Handle
from tokenmerge.report import saved
from tokenmerge.vit.planner import RecordedTokens
from tokenmerge.vit.report import ViTReport, predict_vit

_OF_REPORT = ("height", "width", "batch")
# Attributes of the handle on a diffusion model, and why a vision transformer has none of them.
_OF_DIFFUSION_MODELS = {
    "metadata": "a vision transformer draws no images; leave the call out",
    "estimate": "a vision transformer draws no images; leave it out",
    "record_steps": "a vision transformer has no denoising steps; leave the call out",
    "steps": "a vision transformer has no denoising steps",
    "at_step": "a vision transformer has no denoising steps; leave the call out",
    "at_size": "a vision transformer reads its grid from its input; leave the call out",
}


class _OfDiffusionModelsError(ConfigError, AttributeError):
    """An attribute that only the handle on a diffusion model has. ``hasattr`` says that it is not there."""


class EncoderPatch(Handle[ViTReport, RecordedTokens]):
    """The handle on a patched vision transformer."""

    def __getattr__(self, name: str) -> NoReturn:
        if name in _OF_DIFFUSION_MODELS:
            raise _OfDiffusionModelsError(f"{name}: {_OF_DIFFUSION_MODELS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def report(
        self,
        height: int | None = None,
        width: int | None = None,
        *,
        batch: int | None = None,
        **unknown: Any,
    ) -> ViTReport:
        """Count what merging does to each layer, and what it saves.

        Args:
            height: height of the image in pixels, by default that of the model.
            width: width of the image in pixels, by default that of the model.
            batch: number of images in a call, ≥ 1, by default 1.
            unknown: arguments of other names, which are refused. Those of a report on a diffusion model may
                be None.

        Raises:
            ConfigError: a number is out of range, or is about denoising steps.
            TypeError: there is no argument of a name that was given.
        """
        for name in ("steps", "guidance", "references", "frames"):
            given = unknown.pop(name, None)
            is_given = bool(given) if name == "references" else given is not None
            if is_given:
                refused = f"a vision transformer has no {name}, got {short_repr(given)}"
                raise ConfigError(f"{name}: {refused}; leave it out")
        self._refuse_unknown(unknown, _OF_REPORT)
        return predict_vit(self._model, self.config, height, width, 1 if batch is None else batch)

    def __repr__(self) -> str:
        models = " + ".join(type(model).__name__ for model in self._states)
        title = f"tokenmerge in {models}: {self.config}"
        try:
            report = self.report()
        except Exception as error:  # printing a handle never fails, whatever became of the model
            return f"{title}\n  not counted: {why(error)}"
        first = report.rows[0]
        last = report.rows[-1]
        return (
            f"{title}\n"
            f"  merging: {first.tokens} tokens in the first layer, {last.merged_tokens} after the last\n"
            f"  counted at {report.width} × {report.height} px, batch {report.batch}: "
            f"{saved(report.flops_dense, report.flops_merged)} of the operations saved"
        )
