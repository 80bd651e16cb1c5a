"""Requests of several threads to the plug-ins, whose servers are stood in for: each has its own settings."""

from __future__ import annotations

import random
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline

from tokenmerge import ConfigError, apply_token_merging, remove_token_merging
from tokenmerge.integrations.serving import sglang, vllm_omni

RIGHT = (None, 1, 1.5, 2, 3)
WRONG = (0.5, "fast", True, float("nan"), [2.0])
VLLM = "vllm_omni.diffusion.models.diffusers_adapter"
SGLANG = "sglang.multimodal_gen.runtime"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def draw(pipe: StableDiffusionPipeline, steps: int, seed: int) -> torch.Tensor:
    call = {"num_inference_steps": steps, "guidance_scale": 3.0, "output_type": "latent"}
    return pipe("apple", height=32, width=32, generator=torch.Generator().manual_seed(seed), **call).images


def with_vllm_omni(pipe: StableDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that answers a request as vLLM-Omni's adapter does."""

    class DiffusersAdapterPipeline:
        def load_weights(self) -> None:
            self._pipeline = pipe

        def forward(self, req: Any) -> Any:
            return draw(self._pipeline, req.steps, req.seed)

    log = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    adapter = {"DiffusersAdapterPipeline": DiffusersAdapterPipeline, "logger": log}
    server = module(monkeypatch, f"{VLLM}.pipeline_diffusers_adapter", **adapter)
    parts = VLLM.split(".")
    for i in range(len(parts)):
        module(monkeypatch, ".".join(parts[: i + 1]))
    sys.modules[VLLM].pipeline_diffusers_adapter = server  # type: ignore[attr-defined]
    vllm_omni.register()
    served = DiffusersAdapterPipeline()
    served.load_weights()

    def answer(asked: dict[str, Any], steps: int, seed: int) -> Any:
        sampling = SimpleNamespace(extra_args=asked)
        return served.forward(SimpleNamespace(sampling_params=sampling, steps=steps, seed=seed))

    return answer


def with_sglang(pipe: StableDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that answers a request as SGLang's stage for pipelines of diffusers does."""
    hooks: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda place, hook, kind: hooks.update({place.split(".")[-1]: hook}))
    log = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    plugins = {"HookRegistry": registry, "HookType": SimpleNamespace(AROUND=0, AFTER=1)}
    module(monkeypatch, f"{SGLANG}.platforms.plugins", **plugins)
    module(monkeypatch, f"{SGLANG}.pipelines.diffusers_pipeline", logger=log)
    parts = f"{SGLANG}.pipelines".split(".")
    for i in range(len(parts)):
        module(monkeypatch, ".".join(parts[: i + 1]))
    module(monkeypatch, f"{SGLANG}.platforms")
    sglang.register()
    stage = SimpleNamespace(diffusers_pipe=hooks["_load_diffusers_pipeline"](lambda: pipe))

    def forward(stage: Any, batch: Any, server_args: Any) -> Any:
        call = hooks["_build_pipeline_kwargs"](dict(batch), stage, batch)
        return draw(stage.diffusers_pipe, **call)

    def answer(asked: dict[str, Any], steps: int, seed: int) -> Any:
        return hooks["forward"](forward, stage, {**asked, "steps": steps, "seed": seed}, None)

    return answer


@pytest.mark.parametrize("serve", [with_vllm_omni, with_sglang])
@pytest.mark.parametrize("requests", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_requests_of_four_threads_are_right_or_refused_and_none_is_lost(pipe, serve, requests, monkeypatch):
    expected = {}
    for speedup in RIGHT:
        wanted = 2.0 if speedup is None else speedup
        for steps in (2, 5):
            for seed in (0, 1):
                if wanted != 1:
                    apply_token_merging(pipe, speedup=wanted)
                expected[speedup, steps, seed] = draw(pipe, steps, seed)
                remove_token_merging(pipe)
    monkeypatch.setenv("TOKENMERGE_SPEEDUP", "2.0")
    monkeypatch.delenv("TOKENMERGE_SETTINGS", raising=False)
    answer = serve(pipe, monkeypatch)
    choice, asked = random.Random(0), []
    for _ in range(requests):
        speedup = choice.choice((*RIGHT, *RIGHT, *WRONG, "ratio"))
        asked.append((speedup, choice.choice((2, 5)), choice.randrange(2)))
    results: list[Any] = [None] * requests
    left, lock = iter(range(requests)), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(left, None)
            if number is None:
                return
            speedup, steps, seed = asked[number]
            given = {} if speedup is None else {"tokenmerge_speedup": speedup}
            if speedup == "ratio":
                given = {"tokenmerge_ratio": 0.5}
            try:
                results[number] = answer(given, steps, seed)
            except Exception as error:
                results[number] = error

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (speedup, steps, seed), found in zip(asked, results, strict=True):
        if any(speedup is one for one in RIGHT):
            assert isinstance(found, torch.Tensor), found
            assert torch.equal(found, expected[speedup, steps, seed])
        else:
            assert isinstance(found, ConfigError)
            assert str(found).startswith("tokenmerge_")
