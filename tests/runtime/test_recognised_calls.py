"""What one call of a model caches is used in the next step for the same prompt and sample, or not at all."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import hosts
import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerDiscreteScheduler
from tests.models.test_every_family import call, model_of
from tests.models.tiny import FAMILIES
from tests.runtime.test_steps_in_pipelines import draw
from torch import Tensor

from tokenmerge import (
    Correction,
    MergeSharing,
    StepReuse,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    token_merging,
)
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.patching import call_facts
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.calls import continued, detail_of

# The arithmetic of some schedulers of diffusers.
pytestmark = pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning")

STEPS, TILE = 8, 16
REUSED = ToMeConfig(ratio=0, reuse=StepReuse(every=2))
SETTINGS = {
    "reused": REUSED,
    "shallow": ToMeConfig(ratio=0, reuse=StepReuse(every=4, shallow_every=2)),
    "corrected": ToMeConfig(ratio=0.5, scope="block", correction=Correction(every=2)),
    "plans kept": ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(every=3)),
}
ALL = pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
SOLVERS = (DDIMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler)
NO_FIT = "does not follow from one of the step before"
REUSES_NOTHING = pytest.mark.filterwarnings(f"ignore:.*{NO_FIT}:UserWarning")


class Loop:
    """A loop that draws an image in tiles, in each step in an order of its own and moved by so much."""

    def __init__(self, scheduler: Any = None) -> None:
        self.scheduler = scheduler or DDIMScheduler(clip_sample=False)
        self.unet = hosts.unet()
        self.text = torch.randn(1, 7, hosts.TEXT, generator=torch.Generator().manual_seed(9))

    @torch.no_grad()
    def __call__(self, order: Any = lambda index: (0, 1, 2), moved: Any = lambda index: 0) -> Tensor:
        self.scheduler.set_timesteps(STEPS)
        latents = torch.randn(1, 4, TILE, 3 * TILE, generator=torch.Generator().manual_seed(3))
        latents = latents * self.scheduler.init_noise_sigma
        for index, t in enumerate(self.scheduler.timesteps):
            noise = torch.zeros_like(latents)
            turned = self.scheduler.scale_model_input(latents, t).roll(moved(index), -1)
            for place in order(index):
                part = slice(place * TILE, (place + 1) * TILE)
                noise[..., part] = self.unet(turned[..., part].clone(), t, self.text).sample
            latents = self.scheduler.step(noise.roll(-moved(index), -1), t, latents).prev_sample
        return latents


def misfits(model: Any) -> int:
    return state_of(model).last_run.misfits


@pytest.mark.parametrize("solver", SOLVERS)
@ALL
def test_tiles_in_any_order_are_those_in_one(config, solver):
    loop = Loop(solver(**({"clip_sample": False} if solver is DDIMScheduler else {})))
    dense = loop()
    apply_token_merging(loop, config)
    expected = loop()
    assert not torch.equal(expected, dense)
    for order in (
        lambda index: (2, 1, 0) if index % 2 else (0, 1, 2),
        lambda index: (index % 3, (index + 1) % 3, (index + 2) % 3),
    ):
        assert torch.equal(loop(order), expected)
        assert misfits(loop.unet) == 0


def test_tiles_that_move_reuse_nothing_and_this_is_said_once():
    loop = Loop()
    moved = functools.partial(loop, moved=lambda index: 5 * index)
    dense = moved()
    patch = apply_token_merging(loop, REUSED)
    with pytest.warns(UserWarning, match=NO_FIT) as said:
        assert torch.equal(moved(), dense)
    assert torch.equal(moved(), dense)
    assert len(said) == 1
    assert misfits(loop.unet) == 3 * (STEPS - 1)
    assert "21 calls reused nothing" in str(patch)
    assert len({call for call, _ in state_of(loop.unet).last_run.outputs}) <= 3  # of the last but one step
    assert not torch.equal(loop(), dense)
    assert "reused nothing" not in str(patch)


NOISY: dict[str, Callable[[], Any]] = {
    "DDPM": lambda: diffusers.DDPMScheduler(clip_sample=False),
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "DPM++ SDE": lambda: DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
}


@REUSES_NOTHING
@pytest.mark.parametrize("name", NOISY)
def test_tiles_that_move_are_noticed_though_each_step_adds_noise(name):
    """All but one of DDPM, in the second step, in which nearly all of the sample is new noise."""
    loop = Loop(NOISY[name]())
    apply_token_merging(loop, REUSED)
    loop()
    assert misfits(loop.unet) == 0
    loop(moved=lambda index: 5 * index)
    assert misfits(loop.unet) >= 3 * (STEPS - 1) - 1


def test_nearly_equal_outputs_explain_a_sample_under_strong_guidance():
    torch.manual_seed(0)
    sample, output, change = torch.randn(3, 1, 4096)
    outputs = [output, output + 1e-4 * change]
    now = 0.01 * sample + 1e4 * (outputs[1] - outputs[0])
    assert continued(now, [sample], 0.0, [outputs]) == 0
    assert continued(now, [sample], 0.0, [outputs[:1]]) is None


def guided(model: Any, changes: Any) -> Tensor:
    """Draw with two prompts in calls of their own; the unguided one is of a number that follows the step."""
    scheduler = DDIMScheduler(clip_sample=False)
    scheduler.set_timesteps(STEPS)
    model.scheduler = scheduler
    texts = torch.randn(1 + STEPS, 1, 7, hosts.TEXT, generator=torch.Generator().manual_seed(9))
    latents = torch.randn(1, 4, TILE, TILE, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for index, t in enumerate(scheduler.timesteps):
            prompts = [text for text in changes(index, texts) if text is not None]
            made = [model.unet(latents, t, text).sample for text in prompts]
            latents = scheduler.step(made[0] + 3 * (made[-1] - made[0]), t, latents).prev_sample
    return latents


OTHER_TEXT = "called with another text than in the step before, in one step after another"


@ALL
def test_a_text_of_its_own_for_each_step_is_said_once(config):
    """As in null-text inversion, which optimises what stands for no prompt in each step."""
    loop = Loop()
    apply_token_merging(loop, config)
    with pytest.warns(UserWarning, match=OTHER_TEXT) as said:
        guided(loop, lambda index, texts: (texts[1 + index], texts[0]))
    guided(loop, lambda index, texts: (texts[1 + index], texts[0]))  # a second warning would be an error
    assert len(said) == 1


@ALL
@pytest.mark.parametrize(
    "changes",
    [
        lambda index, texts: (texts[1], texts[0]),
        lambda index, texts: (texts[1] if 2 <= index < 6 else None, texts[0]),  # guidance in an interval
        lambda index, texts: (texts[1], texts[0] if index < 4 else texts[2]),  # another prompt in the middle
        lambda index, texts: (texts[1].clone(), texts[0].clone()),
    ],
)
def test_the_usual_texts_are_not_told(config, changes):
    loop = Loop()
    apply_token_merging(loop, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        guided(loop, changes)


@REUSES_NOTHING
def test_on_a_device_tiles_are_compared_from_the_second_step_on(monkeypatch):
    """All but the first one, of which nobody knew in the first step that others would come."""
    monkeypatch.setattr(call_facts, "needs_sync", lambda value: True)
    loop = Loop()
    apply_token_merging(loop, REUSED)
    expected = loop()
    assert misfits(loop.unet) == 0
    assert torch.equal(loop(lambda index: (0, 1, 2) if index < 3 else (2, 0, 1)), expected)
    loop(moved=lambda index: 5 * index)
    assert misfits(loop.unet) == 3 * (STEPS - 1) - 1


def test_a_step_is_complete_only_if_all_its_calls_are():
    """A tile that some steps leave out comes back as a new one, which nothing is cached for."""
    loop = Loop()
    patch = apply_token_merging(loop, ToMeConfig(ratio=0, reuse=StepReuse(every=2)))
    loop()
    plain = dict(state_of(loop.unet).last_run.kind_of_step)
    loop(lambda index: (0, 1) if index % 2 else (0, 1, 2))
    assert dict(state_of(loop.unet).last_run.kind_of_step) == plain
    assert patch.estimate is None or math.isfinite(patch.estimate.psnr)
    assert misfits(loop.unet) == 0


@REUSES_NOTHING
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("pictures", ["put in another order", "drawn again from the batch"])
def test_pictures_that_a_callback_moves_reuse_nothing_of_others(pipe, monkeypatch, pictures, on_device):
    """Also on a device, where comparing samples waits for it, so that it needs a reason."""
    if on_device:
        monkeypatch.setattr(call_facts, "needs_sync", lambda value: True)
    order = [1, 2, 0] if pictures == "put in another order" else [1, 1, 2]

    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": tensors["latents"][order]} if step == 3 else {}

    given = {"num_images_per_prompt": 3, "callback_on_step_end": change, "guidance_scale": 2.0}
    patch = apply_token_merging(pipe, ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.2))))
    ran: list[int] = []
    pipe.unet.mid_block.resnets[0].register_forward_hook(
        lambda *_: ran.append(pipe.scheduler.timesteps.numel())
    )
    draw(pipe, STEPS, **given)
    assert len(ran) == 4  # the two after the callback run too, by which later ones are extrapolated
    assert misfits(pipe.unet) == 1
    assert "1 call reused nothing" in str(patch)
    ran.clear()
    draw(pipe, STEPS, **{**given, "callback_on_step_end": None})
    assert len(ran) == 2


@pytest.mark.parametrize("made", ["kept", "views", "anew"])
@ALL
def test_guidance_in_an_interval_is_the_same_whichever_prompt_comes_first(config, made):
    pipe = Loop()
    unet, scheduler = pipe.unet, pipe.scheduler
    texts = torch.randn(2, 7, hosts.TEXT, generator=torch.Generator().manual_seed(9))
    kept = texts[:1], texts[1:]

    @torch.no_grad()
    def loop(first: int) -> Tensor:
        scheduler.set_timesteps(STEPS)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        for index, t in enumerate(scheduler.timesteps):
            found = {}
            for place in (0, 1) if first == 0 else (1, 0):
                text = kept[place] if made == "kept" else texts[place : place + 1]
                if place == 0 or 1 <= index < 6:  # from a step on that uses what the one before has cached
                    found[place] = unet(latents, t, text.clone() if made == "anew" else text).sample
            noise = found[0] if 1 not in found else found[1] + 3 * (found[0] - found[1])
            latents = scheduler.step(noise, t, latents).prev_sample
        return latents

    # Calls on one sample would share the plan of the first, which compares the tokens of its prompt.
    own_plans = dataclasses.replace(config.merge_sharing, guidance=False)
    for settings in (config, dataclasses.replace(config, merge_sharing=own_plans)):
        apply_token_merging(pipe, settings)
        after, before = loop(0), loop(1)
        if config.reuse.on or not settings.merge_sharing.guidance:
            assert torch.equal(after, before)
        assert misfits(unet) == 0


NAMES = (
    *("DDIMScheduler", "DDPMScheduler", "DEISMultistepScheduler", "DPMSolverMultistepScheduler"),
    *("DPMSolverSinglestepScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler"),
    *("HeunDiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "LCMScheduler"),
    *("LMSDiscreteScheduler", "PNDMScheduler", "TCDScheduler", "UniPCMultistepScheduler"),
)


@pytest.mark.parametrize("steps", [4, 12])
@pytest.mark.parametrize("name", NAMES)
def test_a_generation_as_usual_is_never_taken_for_another(pipe, name, steps):
    """Images in a batch too, with each scheduler of diffusers; a warning would be an error."""
    pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config)
    apply_token_merging(pipe, REUSED)
    for pictures in (1, 3):
        draw(pipe, steps, num_images_per_prompt=pictures, guidance_scale=2.0)
        assert misfits(pipe.unet) == 0


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("each", [1, 3])
def test_a_callback_may_call_the_model(pipe, solver, each):
    """At the timestep that is over. It gets what the dense model says, and changes nothing."""
    pipe.scheduler = solver.from_config(pipe.scheduler.config)
    other, made = torch.randn(1, 5, 16), []

    def look(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step % each == 0:
            made.append(pipe.unet(tensors["latents"], timestep, other).sample)
        return {}

    patch = apply_token_merging(pipe, REUSED)
    expected = draw(pipe, STEPS)
    kinds = dict(state_of(pipe.unet).last_run.kind_of_step)
    assert torch.equal(draw(pipe, STEPS, callback_on_step_end=look), expected)
    log = state_of(pipe.unet).last_run
    assert dict(log.kind_of_step) == kinds
    assert len(made) == len(range(0, STEPS, each))
    patch.remove()
    seen, made[:] = list(made), []
    with token_merging(pipe, REUSED):
        pass
    draw(pipe, STEPS, callback_on_step_end=look)
    assert torch.equal(seen[0], made[0])  # later ones are of other latents


def test_between_generations_a_call_is_dense(pipe):
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    given = {**hosts.inputs(1), "timestep": 321.0}
    dense = hosts.call(pipe.unet, **given)
    apply_token_merging(pipe, REUSED)
    expected = draw(pipe, STEPS)
    with pytest.warns(UserWarning, match="belongs to no step of the scheduler"):
        assert torch.equal(hosts.call(pipe.unet, **given), dense)
    assert torch.equal(hosts.call(pipe.unet, **given), dense)  # which is said once
    assert torch.equal(draw(pipe, STEPS), expected)


@pytest.mark.parametrize("first", [False, True])
def test_within_a_step_a_call_at_another_timestep_is_dense(pipe, first):
    """A controller asks the model once more, at its own timestep, before the step's call or after it."""
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    other, plain, made = torch.randn(1, 5, 16), pipe.unet.forward, []
    dense = copy.deepcopy(pipe.unet)

    def look(latents: Tensor) -> None:
        given = (latents, 1234.5, other.expand(len(latents), -1, -1))
        made.append(torch.equal(pipe.unet(*given).sample, dense(*given).sample))

    apply_token_merging(pipe, REUSED)
    expected = draw(pipe, STEPS)
    scale, step = pipe.scheduler.scale_model_input, pipe.scheduler.step

    def before(sample: Tensor, *args: Any) -> Tensor:
        if first:
            look(sample)
        return scale(sample, *args)

    def after(noise: Tensor, timestep: Any, sample: Tensor, **more: Any) -> Any:
        if not first:
            look(sample)
        return step(noise, timestep, sample, **more)

    pipe.scheduler.scale_model_input, pipe.scheduler.step = before, after
    found = draw(pipe, STEPS)
    assert made == [True] * STEPS
    if not first:
        assert torch.equal(found, expected)
    assert torch.isfinite(found).all()
    assert plain == pipe.unet.forward


def test_the_detail_of_a_sample_says_which_it_was():
    torch.manual_seed(0)
    noise, picture = torch.randn(3, 4, 32, 32), torch.nn.functional.interpolate(torch.randn(3, 4, 4, 4), 32)
    before, now = noise + picture, 0.3 * noise + picture
    details = detail_of(before), detail_of(noise.roll(7, -1) + picture)
    assert continued(detail_of(now), details, 0.0) == 0
    assert continued(detail_of(now), details[::-1], 0.0) == 1
    assert continued(detail_of(now), details[1:], 0.0) is None
    assert continued(detail_of(now), details[1:], None) == 0  # a scheduler that adds noise may have made it
    assert continued(detail_of(now[[1, 0, 2]]), details[:1], None) is None  # but not in another order
    masked = torch.cat([before, picture], dim=1), torch.cat([noise.roll(7, -1), picture], dim=1)
    assert continued(detail_of(masked[1]), [detail_of(masked[0])], 0.0) is None
    for unknown in (torch.full_like(now, math.nan), torch.zeros_like(now)):
        assert continued(detail_of(unknown), details[:1], 0.0) == 0
    assert detail_of(torch.ones(2, 16, dtype=torch.int64)) is None
    assert detail_of(list(now)).shape == detail_of(now).shape
    assert detail_of(now.to("meta")) is None


def without_blocks(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor]:
    return (hidden_states,)


@pytest.fixture
def flux() -> Iterator[Any]:
    model = model_of(FAMILIES["FluxTransformer2DModel"])
    cls = type(model)
    plain = cls.forward
    yield model
    cls.forward = plain


def put_on_class(model: Any) -> None:
    type(model).forward = without_blocks


def put_on_model(model: Any) -> None:
    model.forward = types.MethodType(without_blocks, model)


def put_under_hooks(model: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    put_on_model(model)
    add_hook_to_module(model, ModelHook())


@pytest.mark.parametrize("put", [put_on_class, put_on_model, put_under_hooks])
@pytest.mark.parametrize("first", ["other", "patch"])
def test_another_forward_of_the_model_is_refused_beside_step_reuse(flux, put, first):
    message = r"without_blocks takes the place of the model's forward.*take it off first: (del|set Flux)"
    if first == "other":
        put(flux)
        with pytest.raises(UnsupportedModelError, match=message):
            apply_token_merging(flux, REUSED)
        assert state_of(flux) is None
        apply_token_merging(flux, ratio=0.5)
        return
    patch = apply_token_merging(flux, REUSED)
    put(flux)
    patch.at_step(0, STEPS)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=message):
            call(flux, FAMILIES["FluxTransformer2DModel"].inputs(1, 8, 8))
    assert "not counted: " in str(patch)


def test_it_is_refused_in_a_pipeline_too(pipe):
    patch = apply_token_merging(pipe, speedup=2.0)
    draw(pipe, STEPS)
    put_on_model(pipe.unet)
    with pytest.raises(
        UnsupportedModelError, match=r"takes the place of the model's forward.*or pass settings of your own"
    ):
        draw(pipe, STEPS)
    patch.remove()
    with pytest.raises(UnsupportedModelError, match=r"del model\.forward"):
        apply_token_merging(pipe, speedup=2.0)
    del pipe.unet.forward
    apply_token_merging(pipe, speedup=2.0)
    draw(pipe, STEPS)


def by_closure(model: Any) -> None:
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)


def by_class(model: Any) -> None:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(model).forward(model, *args, **kwargs)

    model.forward = forward


def by_attribute(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.plain_forward(*args, **kwargs)

    model.plain_forward = model.forward
    model.forward = types.MethodType(forward, model)


def by_decorator(model: Any) -> None:
    plain = type(model).forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs)

    type(model).forward = forward


def by_object(model: Any) -> None:
    class Calls:
        def __init__(self) -> None:
            self.kept = {"forward": model.forward}

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.kept["forward"](*args, **kwargs)

    model.forward = Calls()


@pytest.mark.parametrize("wrap", [by_closure, by_class, by_attribute, by_decorator, by_object])
@pytest.mark.parametrize("first", ["other", "patch"])
def test_what_calls_the_forward_of_the_model_may_be_there(flux, wrap, first):
    def loop() -> list[Tensor]:
        arguments, made = FAMILIES["FluxTransformer2DModel"].inputs(1, 8, 8), []
        for index in range(STEPS):
            patch.at_step(index, STEPS)
            moved = {"hidden_states": arguments["hidden_states"] * (1 + 0.1 * index)}
            made.append(call(flux, {**arguments, **moved}))
        return made

    patch = apply_token_merging(flux, REUSED)
    expected = loop()
    if first == "other":
        patch.remove()
        wrap(flux)
        patch = apply_token_merging(flux, REUSED)
    else:
        wrap(flux)
    assert all(torch.equal(one, other) for one, other in zip(loop(), expected, strict=True))


def test_what_a_package_that_caches_puts_around_the_forward_is_refused(flux):
    plain = flux.forward
    around = types.FunctionType(
        (lambda *args, **kwargs: plain(*args, **kwargs)).__code__,
        {"__name__": "cache_dit.caching", "plain": plain},
        closure=(types.CellType(plain),),
    )
    flux.forward = around
    with pytest.raises(UnsupportedModelError, match="takes the place of the model's forward"):
        apply_token_merging(flux, REUSED)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "UNet2DConditionModel"])
def test_what_a_cache_leaves_out_is_noticed_and_not_extrapolated(name):
    """One that calls the model's forward on some steps, and in the others returns what it made before."""
    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(1, 16, 16)
    patch = apply_token_merging(model, ToMeConfig(ratio=0, reuse=StepReuse(every=3)))
    plain, before, leaves_out = model.forward, [], (1,)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if index not in leaves_out:
            before[:] = [plain(*args, **kwargs)]
        return before[0]

    model.forward = forward
    sample = "sample" if "sample" in arguments else "hidden_states"
    kinds, found = [], []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index in range(STEPS):
            patch.at_step(index, STEPS)
            found.append(call(model, {**arguments, sample: arguments[sample] * (1 + 0.1 * index)}))
            kinds.append(state_of(model).last_run.kind_of_step[index])
    told = [str(one.message) for one in said if "left out" in str(one.message)]
    assert len(told) == 1
    assert "other code left out what should have run in a step" in told[0]
    assert torch.equal(found[1], found[0])
    # Step 2 would extrapolate from two runs, and there was one.
    assert kinds[:3] == [StepKind.FULL, StepKind.SKIPPED, StepKind.FULL]
