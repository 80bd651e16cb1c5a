"""Keeping other libraries' chatter out of what a command shows."""

from __future__ import annotations

import logging

from tokenmerge.loading import require_diffusers

__all__ = ["quiet_libraries"]


def quiet_libraries(command: str) -> None:
    """Switch off loading bars, and advice about image processors that no command uses.

    Args:
        command: what needs diffusers, in words.

    Raises:
        MissingExtraError: diffusers is not installed.
    """
    require_diffusers(command)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # A pipeline works with any codec that fits, but says on loading when it was made with another class.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
