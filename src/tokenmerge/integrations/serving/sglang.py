"""The plug-in for SGLang Diffusion's pipelines of diffusers (``--backend diffusers``).

SGLang calls :func:`register`, an entry point of the group ``sglang.multimodal_gen.plugins``, in each of its
processes, and applies the hooks that it registers before a model is loaded. SGLang logs an error of
:func:`register` and goes on, so values are checked in a hook, whose error stops the server. A request asks
for a speed-up of its own in its ``diffusers_kwargs``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmerge.integrations.serving import REQUESTED, ServedPipeline, by_environment, is_asked

_SERVER = "sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline"


def register() -> None:
    """Register hooks by which pipelines merge tokens, if the environment asks for it."""
    if not is_asked():
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    HookRegistry.register(f"{_SERVER}.DiffusersPipeline._load_diffusers_pipeline", _load, HookType.AROUND)
    HookRegistry.register(f"{_SERVER}.DiffusersExecutionStage.forward", _take_turns, HookType.AROUND)
    HookRegistry.register(f"{_SERVER}.DiffusersExecutionStage._build_pipeline_kwargs", _use, HookType.AFTER)


def _load(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline import logger

    wanted = by_environment()  # a wrong value stops the server before it loads anything
    pipe = load(*args, **kwargs)
    pipe.token_merging = ServedPipeline(pipe, wanted, logger)
    return pipe


def _take_turns(forward: Callable[..., Any], stage: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply settings and generate while no other request does."""
    with stage.diffusers_pipe.token_merging.turn():
        return forward(stage, *args, **kwargs)


def _use(call: dict[str, Any], stage: Any, batch: Any) -> dict[str, Any]:
    """Apply what a request asks for, and take it out of the arguments of the pipeline."""
    merging = stage.diffusers_pipe.token_merging
    merging.check_names(call)
    merging.use(call.pop(REQUESTED, None))
    return call
