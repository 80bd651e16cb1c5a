"""The default method in pipelines whose blocks Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from tests.models.family import TEXT, noise, seeded
from tests.models.tiny import FAMILIES
from tests.tiny_pipeline import UNET
from torch import Tensor

from tokenmerge import token_merging
from tokenmerge.ops.plan import Plan
from tokenmerge.runtime.blocks import planning


def _unet() -> tuple[Any, dict[str, Any]]:
    unet = seeded(diffusers.UNet2DConditionModel(**UNET))
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    scheduler = diffusers.DDIMScheduler(clip_sample=False)
    pipe = diffusers.StableDiffusionPipeline(
        **parts, unet=unet, scheduler=scheduler, requires_safety_checker=False
    )
    texts = noise(2, 7, UNET["cross_attention_dim"])
    return pipe, {"prompt_embeds": texts[:1], "negative_prompt_embeds": texts[1:], "guidance_scale": 5.0}


def _flux() -> tuple[Any, dict[str, Any]]:
    model = seeded(FAMILIES["FluxTransformer2DModel"].build())
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(**parts, transformer=model, scheduler=scheduler)
    return pipe, {"prompt_embeds": noise(1, 7, TEXT), "pooled_prompt_embeds": noise(1, TEXT)}


def _revised(revise: Callable[[Plan], Plan]) -> Any:
    """Let a function replace each new plan within the context."""
    make = planning._new_plan
    return mock.patch.object(planning, "_new_plan", lambda *given: revise(make(*given)))


def _noted(plans: list[Plan], turned: list[float]) -> Any:
    """Note each new plan within the context, and the share of tokens for which rounding would change it."""
    make = planning._new_plan

    def note(*given: Any) -> Plan:
        *others, features, are_added = given
        plan = make(*given)
        plans.append(plan)
        for seed in range(_DRAWS):
            noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(seed))
            other = make(*others, features + _ROUNDING * features.abs().max() * noise, are_added)
            turned.append(_differing(plan, other))
        return plan

    return mock.patch.object(planning, "_new_plan", note)


def _differing(one: Plan, other: Plan) -> float:
    """Return the share of tokens whose place another token takes in another plan."""
    return (_destinations(one) != _destinations(other)).float().mean().item()


def _destinations(plan: Plan) -> Tensor:
    """``[b, n]``: the token whose place each token takes."""
    return plan.kept().gather(1, plan.labels())


# Sums in another order differ by less than this share of the largest value.
_ROUNDING = 1e-5
_DRAWS = 8  # of noise for each plan: a single one often misses the one pair of tokens that rounding can turn


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of PyTorch about its own compiler, of diffusers about Python
@pytest.mark.parametrize("build", [_unet, _flux])
def test_compiled_blocks_draw_what_the_default_method_draws_without_a_compiler(build):
    """With the same plans they differ by rounding: ten times what it changes in the dense image.

    Rounding also turns a few near-ties of the matching, so their own plans differ in a few tokens. One such
    token changes the image by up to 1e-3, and the plans of later steps with it. The most that it turns is
    measured with noise. At most twice as many may differ, since both images are rounded.
    """
    pipe, text = build()
    pipe.set_progress_bar_config(disable=True)
    model = getattr(pipe, "unet", None) or pipe.transformer
    side = 48 * pipe.vae_scale_factor * (1 if hasattr(pipe, "unet") else 2)

    def draw() -> Tensor:
        generator = torch.Generator().manual_seed(0)
        given = {"height": side, "width": side, "output_type": "latent", "generator": generator, **text}
        return pipe(**given, num_inference_steps=10).images

    torch._dynamo.reset()
    dense, eager = draw(), {}
    for speedup in (2.0, 1.5):
        plans: list[Plan] = []
        turned: list[float] = []
        with token_merging(pipe, speedup=speedup), _noted(plans, turned):
            eager[speedup] = draw(), plans, max(turned)
        assert plans
        assert not torch.equal(eager[speedup][0], dense)
    model.compile_repeated_blocks()
    rounding = max((draw() - dense).abs().max(), 2**-23 * dense.abs().max())
    for speedup, (expected, plans, most) in eager.items():
        left: Iterator[Plan] = iter(plans)

        def give(plan: Plan, left: Iterator[Plan] = left, most: float = most) -> Plan:
            given = next(left)
            assert _differing(plan, given) <= 2 * most
            return given

        with token_merging(pipe, speedup=speedup), _revised(give):
            assert (draw() - expected).abs().max() <= 10 * rounding
        assert next(left, None) is None
