"""Keeping other libraries' chatter out of what a command shows."""

from __future__ import annotations

import logging

from tokenmerge.measure.pipelines.loading import require_diffusers

__all__ = ["quiet_libraries"]


def quiet_libraries(command: str) -> None:
    """Switch off loading bars, and advice about parts of other libraries that no command uses.

    Args:
        command: what needs diffusers, in words.

    Raises:
        MissingExtraError: diffusers is not installed.
    """
    # diffusers imports torchao where it is installed, which reports each kernel that this machine cannot run.
    for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    require_diffusers(command)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # A pipeline works with any codec that fits, but says on loading when it was made with another class.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
