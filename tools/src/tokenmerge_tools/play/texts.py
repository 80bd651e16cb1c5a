"""The page's texts about trials and errors, with HTML escaped, and lines to copy: Python and a command."""

from __future__ import annotations

import html
import math
import shlex

from tokenmerge.errors import TokenMergingError, reason_of
from tokenmerge_tools import demo
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.pipelines.options import GenerateOptions
from tokenmerge_tools.play.trials import Fewer, Trial

# The hint before the first trial.
NOTHING_YET = (
    '<p class="hint">Press Draw. The image is drawn three times from the same seed: dense, with tokenmerge, '
    "and dense in fewer steps.</p>"
)
_LEAST_SPEEDUP = 1.05  # a smaller speed-up cannot be seen in one call of each
_ASKED_INSTEAD = 1.5  # the speed-up that the command asks for after a trial that was hardly faster
_PARTS = 20  # a speed-up is rounded down to this fraction of 1


def closeness(psnr: float) -> str:
    """Return how close an image is to the dense one, by its PSNR in dB."""
    return "identical" if math.isinf(psnr) else f"{psnr:.1f} dB"


def tiles(trial: Trial) -> str:
    """Return the figures of a trial, as HTML."""
    figures = [
        ("Dense", f"{trial.dense_seconds:.2f} s"),
        ("tokenmerge", f"{trial.merged_seconds:.2f} s"),
        ("Speed-up by the clock", f"{trial.speedup:.2f}×"),
        ("Closeness (PSNR)", closeness(trial.psnr)),
    ]
    if trial.fewer is not None:
        beside = f"{trial.fewer.seconds:.2f} s, {closeness(trial.fewer.psnr)}"
        figures.append((fewer_steps(trial.fewer), beside))
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{cells}</dl>'


def fewer_steps(fewer: Fewer) -> str:
    """Return the name of a dense image in fewer steps."""
    return f"Dense, {fewer.steps} step{'s' if fewer.steps > 1 else ''}"


def groups(trial: Trial) -> str:
    """Return what the image with the groups of merged tokens shows, as HTML."""
    text = "No token merged in this image"
    if trial.merges:
        text = f"One border, one merged token: {html.escape(trial.groups_text)}"
    return f'<p class="caption">{text}.</p>'


def plan(trial: Trial) -> str:
    """Return the plan of the generation with its signs, or a line that says that every step is full."""
    lines = trial.summary.splitlines()
    begins = next((i for i, line in enumerate(lines) if line.startswith("  plan: ")), None)
    if begins is None:
        return "every step is full"
    ends = begins + 1
    while ends < len(lines) and lines[ends].startswith("        "):
        ends += 1
    return "\n".join(line.strip() for line in lines[begins:ends])


def caption(trial: Trial) -> str:
    """Return the settings and the figures of a trial in one line, for the gallery."""
    options = trial.options
    settings = options.merging.title
    size = "" if options.size is None else "×".join(map(str, options.size))
    guidance = "" if options.guidance is None else f", guidance {options.guidance:g}"
    return (
        f"{settings} · {trial.speedup:.2f}× · {closeness(trial.psnr)} · {options.prompt}"
        f" · {options.model}, seed {options.seed}, {size}, {options.steps} steps{guidance}"
    )


def details(trial: Trial) -> str:
    """Return what merged, in several lines of plain text."""
    return "\n".join([trial.summary, *trial.notes])


def sentence(error: Exception) -> str:
    """Return an error in one line, as HTML."""
    if isinstance(error, TokenMergingError):
        return html.escape(str(error))
    if is_out_of_memory(error):
        return "There is too little memory for this; take a smaller size or model, or close other programs."
    return html.escape(f"The model failed: {reason_of(error)}. See the terminal for details.")


def python_lines(options: GenerateOptions) -> str:
    """Write Python code that merges in a pipeline ``pipe`` and draws the image with it.

    >>> print(python_lines(GenerateOptions(prompt="a red apple", steps=20)).splitlines()[3])
    patch = tokenmerge.apply_token_merging(pipe, speedup=2.0)
    """
    arguments = {} if options.size is None else dict(zip(("width", "height"), options.size, strict=True))
    arguments |= {"num_inference_steps": options.steps}
    given = "" if options.guidance is None else f"guidance_scale={options.guidance:g}, "
    ratio = options.merging.changes.get("ratio", 0.5)
    merging = options.merging.argument or f"tokenmerge.ToMeConfig(ratio={ratio})"
    numbers = "".join(f"{name}={value}, " for name, value in arguments.items())
    return (
        "import tokenmerge\nimport torch\n\n"
        f"patch = tokenmerge.apply_token_merging(pipe, {merging})\n"
        f"noise = torch.Generator().manual_seed({options.seed})\n"
        f"image = pipe({options.prompt!r}, {numbers}{given}generator=noise).images[0]"
    )


def tune_command(trial: Trial) -> str:
    """Return the command that measures the speed of a trial on several prompts.

    If merging was hardly faster in it, the command asks for a speed-up of 1.5.
    """
    options = trial.options
    if trial.speedup >= _LEAST_SPEEDUP:
        speedup = math.floor(trial.speedup * _PARTS) / _PARTS
    else:
        speedup = _ASKED_INSTEAD
    words = ["tokenmerge", "tune", "--model", options.model, "--speedup", f"{speedup:g}"]
    if options.model not in demo.NAMES:
        words += ["--prompts", "prompts.txt"]
    if options.size is not None:
        words += ["--size", "x".join(map(str, options.size))]
    words += ["--steps", str(options.steps)]
    if options.guidance is not None:
        words += ["--guidance", f"{options.guidance:g}"]
    for name in ("dtype", "device"):
        value = getattr(options, name)
        if value != getattr(GenerateOptions, name):
            words += [f"--{name}", value]
    return shlex.join([*words, "--out", "outputs/tuned.json"])
