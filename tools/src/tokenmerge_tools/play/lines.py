"""Lines to copy: Python code that draws a trial again, and the command that finds closer settings."""

from __future__ import annotations

import math
import shlex

from tokenmerge_tools import demo
from tokenmerge_tools.method_spec import AUTO
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.play.trial import Trial

_LEAST_SPEEDUP = 1.05  # one call of each does not show a smaller one


def python_lines(options: GenerateOptions) -> str:
    """Python code that merges in a pipeline ``pipe`` and draws the picture with it.

    >>> print(python_lines(GenerateOptions(prompt="a red apple", steps=20)).splitlines()[3])
    patch = tokenmerge.apply_token_merging(pipe, 0.5)
    """
    arguments = {} if options.size is None else dict(zip(("width", "height"), options.size, strict=True))
    arguments |= {"num_inference_steps": options.steps}
    given = "" if options.guidance is None else f"guidance_scale={options.guidance:g}, "
    numbers = "".join(f"{name}={value}, " for name, value in arguments.items())
    return (
        "import tokenmerge\nimport torch\n\n"
        f"patch = tokenmerge.apply_token_merging(pipe, {_merging(options)})\n"
        f"noise = torch.Generator().manual_seed({options.seed})\n"
        f"picture = pipe({options.prompt!r}, {numbers}{given}generator=noise).images[0]"
    )


def _merging(options: GenerateOptions) -> str:
    """The arguments of ``apply_token_merging`` after the pipeline."""
    method, ratio = options.merging.method, options.merging.changes.get("ratio", 0.5)
    if method == AUTO:
        return f"{float(ratio)}"
    if method == "tome":
        return f"tokenmerge.ToMeConfig(ratio={ratio})"
    return f"{method!r}, ratio={ratio}"


def tune_command(trial: Trial) -> str:
    """The command that searches for the closest settings at the speed of a trial.

    If merging was not faster in it, the command asks for settings that are at least as close, or, if the
    pictures are identical, for a speed-up of 1.5.
    """
    options = trial.options
    words = ["tokenmerge", "tune", "--model", options.model, *_goal(trial)]
    if options.model not in demo.NAMES:
        words += ["--prompts", "prompts.txt"]
    if options.size is not None:
        words += ["--size", "x".join(map(str, options.size))]
    words += ["--steps", str(options.steps)]
    if options.guidance is not None:
        words += ["--guidance", f"{options.guidance:g}"]
    for name in ("dtype", "device"):
        if (value := getattr(options, name)) != getattr(GenerateOptions, name):
            words += [f"--{name}", value]
    return shlex.join([*words, "--out", "outputs/tuned.json"])


def _goal(trial: Trial) -> list[str]:
    if trial.speedup >= _LEAST_SPEEDUP:
        return ["--min-speedup", f"{math.floor(trial.speedup * 20) / 20:g}"]
    return ["--min-speedup", "1.5"] if trial.identical else ["--min-psnr", f"{math.floor(trial.psnr)}"]
