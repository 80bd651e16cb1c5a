"""Silence progress bars and advice of other libraries."""

from __future__ import annotations

import logging

from tokenmerge.measure.pipelines.loading import require_diffusers

__all__ = ["quiet_libraries"]


def quiet_libraries(command: str) -> None:
    """Switch off other libraries' progress bars, and their advice about parts that no command uses.

    Args:
        command: name of the command, for the error without diffusers.

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
    # A pipeline warns if its codec is not of the class that it was saved with, although any that fits works.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
