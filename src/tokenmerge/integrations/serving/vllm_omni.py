"""The plug-in for vLLM-Omni's adapter of diffusers pipelines (``--diffusion-load-format diffusers``).

vLLM-Omni calls :func:`register`, an entry point of the group ``vllm_omni.general_plugins``, in each of its
processes before a model is loaded. A request asks for a speed-up of its own in its ``extra_args``.
"""

from __future__ import annotations

import functools
from typing import Any

from tokenmerge.integrations.serving import REQUESTED, ServedPipeline, by_environment, is_asked


def register() -> None:
    """Let the adapter merge tokens, if the environment asks for it. Later calls in a process do nothing."""
    if not is_asked():
        return
    from vllm_omni.diffusion.models.diffusers_adapter import pipeline_diffusers_adapter as server

    adapter = server.DiffusersAdapterPipeline
    load = adapter.load_weights
    forward = adapter.forward
    if getattr(load, "merges_tokens", False):
        return

    @functools.wraps(load)
    def load_weights(self: Any) -> None:
        wanted = by_environment()  # a wrong value stops the server before it loads anything
        load(self)
        self.token_merging = ServedPipeline(self._pipeline, wanted, server.logger)

    @functools.wraps(forward)
    def merged_forward(self: Any, req: Any) -> Any:
        asked = req.sampling_params.extra_args or {}
        self.token_merging.check_names(asked)
        with self.token_merging.turn():
            self.token_merging.use(asked.get(REQUESTED))
            return forward(self, req)

    load_weights.merges_tokens = True  # type: ignore[attr-defined]
    adapter.load_weights = load_weights
    adapter.forward = merged_forward
