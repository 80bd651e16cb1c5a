"""Silences progress bars and warnings of other libraries."""

from __future__ import annotations

import logging

from tokenmerge_tools.pipelines.loading import require_diffusers


def quiet_libraries(command: str) -> None:
    """Turn off progress bars of other libraries, and their warnings about parts that no command uses.

    If diffusers is missing, the error names the command.
    """
    # diffusers imports torchao if it is installed, and torchao warns about kernels that cannot run here.
    for name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    require_diffusers(command)
    import diffusers.utils.logging
    import transformers.utils.logging

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # A pipeline warns if its VAE has another class than the saved one, although any class that fits works.
    logging.getLogger("diffusers.pipelines.pipeline_utils").setLevel(logging.ERROR)
