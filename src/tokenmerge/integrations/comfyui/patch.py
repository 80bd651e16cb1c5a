"""Adds token merging and step reuse to a clone of a model, only by wrappers and patches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokenmerge.integrations.comfyui import unet
from tokenmerge.integrations.comfyui.sampling import KEY, Sampling, running_in, sampling_in
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.integrations.comfyui.transformer import ReplacedBlock, finish_run

Attend = Callable[..., Tensor]  # ComfyUI's attention functions
_ATTENTION = "optimized_attention_override"
_SAMPLING = "tokenmerge_sampling"  # key of the running sampling in the options of all of its steps


def patched(model: Any, settings: Settings) -> Any:
    """Return a clone of a ``ModelPatcher`` that merges tokens. The settings of an earlier node are replaced.

    The model itself, its other clones and its weights stay as they are.
    """
    clone = model.clone()
    wrappers = _Wrappers(settings)
    for kind in ("sampler_sample", "calc_cond_batch", "apply_model", "diffusion_model"):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, getattr(wrappers, kind))
    replaced = clone.model_options["transformer_options"].get("patches_replace", {}).get("dit", {})
    for block in settings.target.blocks:
        if block.layout is not None:  # in a transformer
            inner = replaced.get(block.key)
            inner = inner.inner if isinstance(inner, ReplacedBlock) else inner
            is_last = block is settings.target.blocks[-1]
            replacement = ReplacedBlock(block.key, block.layout, inner, is_last)
            clone.set_model_patch_replace(replacement, "dit", *block.key)
    options = clone.model_options["transformer_options"]
    before = options.pop(_ATTENTION, None)
    before = before.before if isinstance(before, WeighedAttention) else before
    attention = WeighedAttention(before) if settings.config.proportional else before
    if attention is not None:
        options[_ATTENTION] = attention
    return clone


@dataclasses.dataclass(frozen=True)
class WeighedAttention:
    """Proportional attention: a merged token counts for as many keys as it stands for (arXiv 2210.09461)."""

    # The attention function of another node, or None for the function that ComfyUI has chosen.
    before: Attend | None = None

    def __call__(
        self, function: Attend, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **more: Any
    ) -> Tensor:
        """Compute attention, with log(size) added to the logits if the keys are merged tokens."""
        _, running = running_in(more.get("transformer_options"))
        tokens = k.shape[2] if more.get("skip_reshape") else k.shape[1]
        bias = None if running is None else running.bias(k, tokens)
        if bias is not None:
            mask = bias if mask is None else _joined(mask, bias)
            if "sage" in getattr(function, "__name__", ""):  # SageAttention ignores masks
                function = getattr(function, "__globals__", {}).get("attention_pytorch", function)
        if self.before is not None:
            function = functools.partial(self.before, function)
        return function(q, k, v, heads, mask=mask, **more)


def _joined(mask: Tensor, bias: Tensor) -> Tensor:
    """Return a mask plus a bias ``[b, 1, n]``. The mask may lack a batch axis or have an axis for heads."""
    bias = bias.unsqueeze(1) if mask.ndim == 4 else bias
    return mask + bias if mask.is_floating_point() else bias.masked_fill(~mask, float("-inf"))


def _adds_noise(sampler: Any) -> bool:
    """Return whether the steps of a sampler add new noise. The function of one that does takes a source."""
    function = getattr(sampler, "sampler_function", None)
    known = inspect.signature(function).parameters if callable(function) else {}
    eta = known["eta"].default if "eta" in known else 1.0  # the share of new noise
    return "noise_sampler" in known and bool(getattr(sampler, "extra_options", {}).get("eta", eta))


@dataclasses.dataclass(frozen=True)
class _Wrappers:
    """Wrappers of ComfyUI's functions of these names."""

    settings: Settings

    def sampler_sample(
        self, executor: Any, model: Any, sigmas: Tensor, extra: dict[str, Any], *more: Any, **named: Any
    ) -> Any:
        """Run one sampling. What it caches is dropped when it ends or is cancelled."""
        options = extra["model_options"]["transformer_options"]
        settings = self.settings.beside(options)
        sampling = Sampling(
            settings, sigmas.tolist(), getattr(model, "cfg", None), _adds_noise(executor.class_obj)
        )
        options[_SAMPLING] = sampling
        known = len(self.settings.notes)
        for note in settings.notes[known:]:
            sampling.say(note)
        try:
            return executor(model, sigmas, extra, *more, **named)
        finally:
            sampling.forget()

    def calc_cond_batch(self, executor: Any, *arguments: Any) -> Any:
        """Evaluate all prompts once. The options carry the sampling if it merges."""
        model, conds, x, sigma, model_options = arguments
        options = model_options["transformer_options"]
        sampling = options.get(_SAMPLING) or Sampling(self.settings)
        noise = model.model_sampling
        now = float(sigma.max())
        start = noise.percent_to_sigma(self.settings.start)
        end = noise.percent_to_sigma(self.settings.end)
        merges = end < now <= start
        if merges:
            every_cond = itertools.chain.from_iterable(prompt or () for prompt in conds)
            whole = all("area" not in cond for cond in every_cond)
            sampling.begin_step(now, noise.timestep(sigma), x.shape, whole)
        given = {**model_options, "transformer_options": {**options, KEY: sampling if merges else None}}
        results = executor(model, conds, x, sigma, given)
        if self.settings.config.guided_planner and len(results) > 1:
            sampling.guidance_change = results[0] - results[1]
        return results

    def apply_model(self, executor: Any, x: Tensor, *more: Any, **named: Any) -> Any:
        """Call the model once."""
        given = (*more, *named.values())
        options = next((value for value in given if isinstance(value, dict) and KEY in value), {})
        sampling = sampling_in(options)
        if sampling is None:
            return executor(x, *more, **named)
        sampling.begin_call(x.shape, options, x)
        result = executor(x, *more, **named)
        finish_run(sampling)
        sampling.end_call(result)
        return result

    def diffusion_model(self, executor: Any, *arguments: Any, **named: Any) -> Any:
        """Call the model's network once. On some steps it skips the deep stages of a UNet."""
        target = self.settings.target
        sampling = sampling_in(arguments[-1]) if target.is_unet else None
        if sampling is None:
            return executor(*arguments, **named)
        *first, options = arguments
        arguments = *first, {**options, "patches": unet.with_patches(options.get("patches", {}))}
        if target.cut is None or not sampling.decision.caches:
            return executor(*arguments, **named)
        return unet.call_stages(executor, target.cut, sampling, arguments, named)
