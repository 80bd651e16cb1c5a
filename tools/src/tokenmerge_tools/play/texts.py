"""The page's texts about trials and errors. HTML is escaped here."""

from __future__ import annotations

import html

from tokenmerge.errors import TokenMergingError, reason_of
from tokenmerge_tools.failures import is_out_of_memory
from tokenmerge_tools.play.trial import Trial


def closeness(trial: Trial) -> str:
    """How close merged is to dense."""
    return "identical" if trial.identical else f"{trial.psnr:.1f} dB"


def tiles(trial: Trial) -> str:
    """The figures of a trial, as HTML."""
    figures = (
        ("Dense", f"{trial.dense_seconds:.2f} s"),
        ("Merged", f"{trial.merged_seconds:.2f} s"),
        ("Speed-up", f"{trial.speedup:.2f}×"),
        ("Closeness (PSNR)", closeness(trial)),
    )
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{cells}</dl>'


def nothing_yet() -> str:
    """The hint before the first trial, as HTML."""
    return '<p class="hint">Press Draw. The picture is drawn dense and merged from the same seed.</p>'


def caption(trial: Trial) -> str:
    """The settings and the figures of a trial in one line, for the gallery."""
    options = trial.options
    settings = f"{options.merging.method} {options.merging.changes['ratio']:g}"
    size = "" if options.size is None else "×".join(map(str, options.size))
    guidance = "" if options.guidance is None else f", guidance {options.guidance:g}"
    return (
        f"{settings} · {trial.speedup:.2f}× · {closeness(trial)} · {options.prompt}"
        f" · {options.model}, seed {options.seed}, {size}, {options.steps} steps{guidance}"
    )


def groups_caption(trial: Trial) -> str:
    """The text below the picture with the merged groups, as HTML."""
    return f'<p class="caption">One border, one merged token: {html.escape(trial.groups_text)}.</p>'


def details(trial: Trial) -> str:
    """What merged, in several lines of plain text."""
    return "\n".join([trial.summary, *trial.notes])


def sentence(error: Exception) -> str:
    """An error in one line, as HTML."""
    if isinstance(error, TokenMergingError):
        return html.escape(str(error))
    if is_out_of_memory(error):
        return "There is too little memory for this; take a smaller size or model, or close other programs."
    return html.escape(f"The model failed: {reason_of(error)}. See the terminal for details.")
