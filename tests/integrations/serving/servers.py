"""vLLM-Omni and SGLang, as far as they run on a CPU: their loaders of plug-ins, adapters and requests."""

from __future__ import annotations

import functools

import sglang.multimodal_gen.runtime.pipelines.diffusers_pipeline as sglang_pipelines
import sglang.multimodal_gen.runtime.platforms.plugins as sglang_plugins
import torch
import vllm_omni.diffusion.models.diffusers_adapter.pipeline_diffusers_adapter as vllm_omni_adapter
import vllm_omni.plugins
from diffusers import StableDiffusionPipeline
from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
from sglang.multimodal_gen.runtime.pipelines_core.schedule_batch import Req
from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from tokenmerge import apply_token_merging, remove_token_merging


class VllmOmni:
    """A worker of vLLM-Omni that has loaded its plug-ins and then a pipeline."""

    log = vllm_omni_adapter.logger
    hooked = (
        (vllm_omni_adapter.DiffusersAdapterPipeline, "load_weights", ["self"]),
        (vllm_omni_adapter.DiffusersAdapterPipeline, "forward", ["self", "req"]),
    )

    @staticmethod
    def load_plugins(monkeypatch):
        monkeypatch.setattr(vllm_omni.plugins, "omni_plugins_loaded", False)  # once in a process
        vllm_omni.plugins.load_omni_general_plugins()

    def __init__(self, folder):
        self.config = OmniDiffusionConfig(
            model=str(folder), dtype=torch.float32, diffusion_load_format="diffusers"
        )
        device = torch.device("cpu")
        self.adapter = vllm_omni_adapter.DiffusersAdapterPipeline(od_config=self.config, device=device)
        self.adapter.load_weights()
        self.pipe = self.adapter._pipeline
        self.pipe.set_progress_bar_config(disable=True)

    def draw(self, side=32, steps=20, seed=7, speedup=None, callback=None):
        self.config.diffusers_call_kwargs = {} if callback is None else {"callback_on_step_end": callback}
        sampling = OmniDiffusionSamplingParams(
            height=side,
            width=side,
            num_inference_steps=steps,
            guidance_scale=3.0,
            seed=seed,
            generator_device="cpu",
            output_type="pt",
            extra_args={} if speedup is None else {"tokenmerge_speedup": speedup},
        )
        request = OmniDiffusionRequest(prompt="apple", sampling_params=sampling, request_id="1")
        with torch.inference_mode():  # as its runner does
            return self.adapter.forward(DiffusionRequestBatch([request])).output


class SGLang:
    """A worker of SGLang Diffusion that has loaded its plug-ins and then a pipeline."""

    log = sglang_pipelines.logger
    hooked = (
        (
            sglang_pipelines.DiffusersPipeline,
            "_load_diffusers_pipeline",
            ["self", "model_path", "server_args"],
        ),
        (sglang_pipelines.DiffusersExecutionStage, "forward", ["self", "batch", "server_args"]),
        (sglang_pipelines.DiffusersExecutionStage, "_build_pipeline_kwargs", ["self", "batch"]),
    )

    @staticmethod
    def load_plugins(monkeypatch):
        sglang_plugins.HookRegistry.reset()
        sglang_plugins._reset_lifecycle_for_tests()  # once in a process
        sglang_plugins.apply_plugin_hooks()

    def __init__(self, folder):
        self.args = ServerArgs.from_kwargs(model_path=str(folder), backend="diffusers")
        self.args.pipeline_config.dit_precision = "fp32"
        set_global_server_args(self.args)
        self.server = sglang_pipelines.DiffusersPipeline(str(folder), self.args)
        self.server.post_init()
        self.pipe = self.server.diffusers_pipe
        self.pipe.set_progress_bar_config(disable=True)

    def request(self, side=32, steps=20, seed=7, speedup=None, callback=None):
        sampling = SamplingParams(
            prompt="apple",
            negative_prompt="",
            height=side,
            width=side,
            num_inference_steps=steps,
            guidance_scale=3.0,
            seed=seed,
        )
        request = Req(sampling_params=sampling)
        own = {"tokenmerge_speedup": speedup, "callback_on_step_end": callback}
        request.extra["diffusers_kwargs"] = {name: value for name, value in own.items() if value is not None}
        return request

    def draw(self, **asked):
        (stage,) = self.server.stages
        return stage(self.request(**asked), self.args).output


SERVERS = (VllmOmni, SGLang)


class Outside:
    """The same pipeline without a server. Each image is drawn right after its settings were applied."""

    def __init__(self, folder):
        self.pipe = StableDiffusionPipeline.from_pretrained(folder)
        self.pipe.set_progress_bar_config(disable=True)
        self.draw = functools.cache(self._draw)

    def _draw(self, asked, side=32, steps=20, seed=7):
        """Draw with a speed-up, or with settings."""
        remove_token_merging(self.pipe)
        if isinstance(asked, float) and asked != 1:
            apply_token_merging(self.pipe, speedup=asked)
        elif asked != 1:
            apply_token_merging(self.pipe, asked)
        size = {"height": side, "width": side}
        call = {"num_inference_steps": steps, "guidance_scale": 3.0, "output_type": "pt"}
        return self.pipe("apple", **size, **call, generator=torch.manual_seed(seed)).images
