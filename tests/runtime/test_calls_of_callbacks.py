"""A call of the model that belongs to no step runs dense and changes nothing, whoever makes it."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import cached
import diffusers
import hosts
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, PNDMScheduler
from diffusers.callbacks import PipelineCallback
from tests.fake_device import AVAILABLE, DEVICE, FakeDevice, OnDevice, to_device
from tests.models.test_diffusion_forcing import pipeline, video_of
from tests.models.tiny import FAMILIES
from tests.runtime.combinations.test_batches import CASES, SLOW
from tests.runtime.test_shared_models import beside
from tests.runtime.test_steps_in_pipelines import draw
from torch import Tensor, nn

from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.plans.generation import StepKind
from tokenmerge.runtime.patching import call_facts
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.calls import detail_of, is_made_of

# The arithmetic of some schedulers of diffusers, and a word of theirs about callbacks of old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array_(_ implementation|wrap__):DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*CrossAttnStoreProcessor at mid_block:UserWarning"),
    pytest.mark.filterwarnings("ignore:min_psnr=30:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*saves next to no time at this size:UserWarning"),
]

STEPS = 8
REUSED: dict[str, Any] = {"method": ToMeConfig(ratio=0, reuse=StepReuse(every=2))}
SETTINGS: dict[str, dict[str, Any]] = {
    "reused": REUSED,
    "shallow": {"method": ToMeConfig(ratio=0, reuse=StepReuse(every=4, shallow_every=2))},
    "corrected": {"method": ToMeConfig(ratio=0.5, scope="block", correction=Correction(every=2))},
    "plans kept": {"method": ToMeConfig(ratio=0.5, merge_sharing=MergeSharing(every=3))},
    "speedup": {"speedup": 2.0},
    "min_psnr": {"speedup": 2.0, "min_psnr": 30},
}
SOLVERS: dict[str, Callable[[Any], Any]] = {
    name: getattr(diffusers, name).from_config
    for name in (
        *("DDIMScheduler", "DDPMScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler"),
        *("EulerDiscreteScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "LCMScheduler"),
        "UniPCMultistepScheduler",
    )
} | {"PNDMScheduler": lambda config: PNDMScheduler.from_config(config, skip_prk_steps=True)}


def apply(pipe: Any, settings: dict[str, Any]) -> Any:
    given = dict(settings)
    return apply_token_merging(pipe, *([given.pop("method")] if "method" in given else []), **given)


def with_own_lists(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of which a model may empty the lists, as one does with what a ControlNet adds."""
    return {name: list(value) if isinstance(value, list) else value for name, value in arguments.items()}


def less(sample: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """A sample with less noise."""
    return 0.9 * sample if isinstance(sample, Tensor) else [0.9 * one for one in sample]


class Look:
    """A callback that calls the model as the step did, with less noise and with other changes.

    It is made before the model is patched, and compares what it gets with what a dense copy says.
    """

    def __init__(self, model: nn.Module, each: int = 1, **changes: Any) -> None:
        self.model, self.dense = model, copy.deepcopy(model)
        self.each, self.changes = each, changes
        self.calls = 0
        self._given: tuple[tuple, dict[str, Any]] = (), {}
        self._looks = False
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._looks:
            self._given = args, with_own_lists(kwargs)

    def __call__(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        if step % self.each == 0:
            self.look()
        return {}

    def look(self) -> None:
        args, kwargs = self._given
        kwargs = {**kwargs, **self.changes}
        if args:
            args = (less(args[0]), *([] if "timestep" in self.changes else args[1:]))
        else:
            name = "sample" if "sample" in kwargs else "hidden_states"
            kwargs[name] = less(kwargs[name])
        if hasattr(
            self.model, "attn_processors"
        ):  # a pipeline with perturbed attention changes them as it runs
            self.dense.set_attn_processor(self.model.attn_processors)
        self._looks = True
        with torch.no_grad():
            found, dense = (model(*args, **with_own_lists(kwargs)) for model in (self.model, self.dense))
        self._looks = False
        # A sample may be a list of images.
        assert all(torch.equal(one, other) for one, other in zip(found[0], dense[0], strict=True))
        self.calls += 1


def changes_nothing(model: nn.Module, look: Look, picture: Callable[..., Any], patch: Any) -> None:
    """Draw without a callback, with it, and without it: the images, and what is said of them, are equal."""

    def said() -> Any:
        log = state_of(model).last_run
        return dict(log.kind_of_step), log.misfits, log.batch, patch.estimate

    expected, told = picture(), said()
    for callback in (look, None):
        assert torch.equal(picture(callback), expected)
        assert said() == told
    assert look.calls


def of_pipe(pipe: Any, **given: Any) -> Callable[..., Tensor]:
    return lambda callback=None: draw(pipe, STEPS, callback_on_step_end=callback, **given)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("each", [1, 3])
def test_a_callback_may_call_the_model(pipe, solver, each):
    """As the step did. It gets what the dense model says, and changes nothing."""
    pipe.scheduler = SOLVERS[solver](pipe.scheduler.config)
    look = Look(pipe.unet, each)
    changes_nothing(pipe.unet, look, of_pipe(pipe, guidance_scale=2.0), apply(pipe, REUSED))
    assert look.calls == len(range(0, pipe.num_timesteps, each))


@pytest.mark.parametrize("solver", ["DDIMScheduler", "EulerDiscreteScheduler"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_it_may_do_so_with_any_settings(pipe, solver, settings):
    pipe.scheduler = SOLVERS[solver](pipe.scheduler.config)
    changes_nothing(pipe.unet, Look(pipe.unet), of_pipe(pipe, guidance_scale=2.0), apply(pipe, settings))


@pytest.mark.parametrize(
    "changes",
    [
        {"encoder_hidden_states": torch.ones(2, 5, 16)},
        {"timestep": 999},  # of the beginning, which no step of the generation has
        {"timestep": torch.tensor(1)},
    ],
    ids=["another text", "a step before", "a step after"],
)
@pytest.mark.parametrize("solver", ["DDIMScheduler", "PNDMScheduler", "EulerDiscreteScheduler"])
def test_it_may_be_given_another_text_or_timestep(pipe, solver, changes):
    pipe.scheduler = SOLVERS[solver](pipe.scheduler.config)
    look = Look(pipe.unet, **changes)
    changes_nothing(pipe.unet, look, of_pipe(pipe), apply(pipe, REUSED))


def test_where_no_setting_follows_the_steps_it_merges_and_changes_nothing(pipe):
    look = Look(pipe.unet)
    look.dense = pipe.unet
    apply(pipe, {"method": ToMeConfig(ratio=0.5)})
    expected = draw(pipe, STEPS)
    assert torch.equal(draw(pipe, STEPS, callback_on_step_end=look), expected)


class Controller:
    """An object with the pipeline's scheduler, which makes it look like a pipeline."""

    def __init__(self, pipe: Any, look: Look) -> None:
        self.scheduler, self.look = pipe.scheduler, look

    def after_step(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        return self._look(pipe, step, timestep, tensors)

    def _look(self, *given: Any) -> dict[str, Any]:
        return self.look(*given)

    __call__ = after_step


class OfDiffusers(PipelineCallback):
    tensor_inputs: ClassVar = ["latents"]

    def __init__(self, look: Look) -> None:
        super().__init__(cutoff_step_ratio=None, cutoff_step_index=2)
        self.look = look

    def callback_fn(self, pipe: Any, step: int, timestep: Any, tensors: Any) -> Any:
        return self.look(pipe, step, timestep, tensors)


class OfTorch(nn.Module):
    """It is called as the model is."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self.forward = look


KINDS: dict[str, Callable[[Any, Look], Any]] = {
    "function": lambda pipe, look: lambda *given: look(*given),
    "decorated": lambda pipe, look: torch.no_grad()(lambda *given: look(*given)),
    "partial": lambda pipe, look: functools.partial(
        functools.partial(lambda look, *given: look(*given), look)
    ),
    "method": lambda pipe, look: Controller(pipe, look).after_step,
    "object": lambda pipe, look: Controller(pipe, look),
    "of diffusers": lambda pipe, look: OfDiffusers(look),
    "of torch": lambda pipe, look: OfTorch(look),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_callback_may_call_the_model(pipe, kind):
    look = Look(pipe.unet)
    callback = KINDS[kind](pipe, look)
    picture = of_pipe(pipe)
    patch = apply(pipe, REUSED)
    changes_nothing(pipe.unet, look, lambda given=None: picture(callback if given else None), patch)


def test_a_callback_of_old_may_call_the_model(pipe):
    look = Look(pipe.unet)
    patch = apply(pipe, REUSED)

    def picture(given: Any = None) -> Tensor:
        more = {"callback": lambda *_: look.look(), "callback_steps": 1} if given else {}
        return draw(pipe, STEPS, **more)

    changes_nothing(pipe.unet, look, picture, patch)


class Decorated(diffusers.StableDiffusionPipeline):
    """A pipeline whose steps run in a method with the decorator of the callback."""

    def __call__(self, prompt: Any, steps: int, callback_on_step_end: Any = None) -> Tensor:
        text, _ = self.encode_prompt(prompt, torch.device("cpu"), 1, False)
        self.scheduler.set_timesteps(steps)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        for index, t in enumerate(self.scheduler.timesteps):
            noise = self.predict(latents, t, text)
            latents = self.scheduler.step(noise, t, latents).prev_sample
            if callback_on_step_end is not None:
                callback_on_step_end(self, index, t, {"latents": latents})
        return latents

    @torch.no_grad()
    def predict(self, latents: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.unet(latents, t, text).sample


def test_functions_with_one_decorator_are_told_apart(pipe):
    made = Decorated(**pipe.components, requires_safety_checker=False)
    look = Look(pipe.unet)
    patch = apply(made, REUSED)
    callback = KINDS["decorated"](made, look)

    def picture(given: Any = None) -> Tensor:
        return made("a cat", STEPS, callback_on_step_end=callback if given else None)

    changes_nothing(pipe.unet, look, picture, patch)
    assert StepKind.SHALLOW in state_of(pipe.unet).last_run.kind_of_step.values()


def callback_of(name: str) -> str | None:
    takes = inspect.signature(getattr(diffusers, name).__call__).parameters
    return next((own for own in ("callback_on_step_end", "callback") if own in takes), None)


# It reads what attention keeps in every step, so that only the default method runs there.
READS_ATTENTION = "StableDiffusionSAGPipeline"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.pipeline + case.version, marks=[pytest.mark.slow] * (case.pipeline in SLOW)
        )
        for case in CASES
        if callback_of(case.pipeline)
    ],
)
def test_in_every_pipeline_a_callback_may_call_the_model(case):
    made = case.build()
    model = getattr(made, "unet", None) or made.transformer
    look = Look(model)
    patch = apply(made, {"speedup": 2.0} if case.pipeline == READS_ATTENTION else REUSED)

    def picture(given: Any = None) -> Tensor:
        callback: dict[str, Any] = {}
        if given and callback_of(case.pipeline) == "callback_on_step_end":
            callback = {"callback_on_step_end": given}
        elif given:
            callback = {"callback": lambda *_: given.look(), "callback_steps": 1}
        return case.draw(made, 1, True, **callback)

    changes_nothing(model, look, picture, patch)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("settings", [REUSED, {"speedup": 2.0}], ids=["reused", "speedup"])
def test_in_diffusion_forcing_too(delay, settings):
    pipe = pipeline()
    look = Look(pipe.transformer)
    patch = apply(pipe, settings)
    picture = functools.partial(video_of, pipe, ar_step=delay)
    changes_nothing(pipe.transformer, look, lambda given=None: picture(callback_on_step_end=given), patch)
    assert look.calls == STEPS + 3 * delay


class Silent(diffusers.StableDiffusionPipeline):
    """A pipeline without callbacks."""

    @torch.no_grad()
    def __call__(self, prompt: Any, steps: int) -> Tensor:
        text, _ = self.encode_prompt(prompt, torch.device("cpu"), 1, False)
        self.scheduler.set_timesteps(steps)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        for t in self.scheduler.timesteps:
            latents = self.scheduler.step(self.unet(latents, t, text).sample, t, latents).prev_sample
        return latents


def test_a_pipeline_within_a_callback_is_no_such_call(pipe):
    """Its model merges and reuses as it does alone, also where it has no callbacks of its own."""
    patch = apply(pipe, REUSED)
    inner = beside(pipe)
    inner.__class__ = Silent
    expected, made = inner("a dog", STEPS), []
    before = draw(pipe, STEPS)
    assert torch.equal(
        draw(pipe, STEPS, callback_on_step_end=lambda *_: made.append(inner("a dog", STEPS)) or {}), before
    )
    assert len(made) == STEPS
    assert all(torch.equal(one, expected) for one in made)
    patch.remove()
    assert not torch.equal(inner("a dog", STEPS), expected)


# --- loops of one's own ---------------------------------------------------------------------------


class Loop:
    """A loop that may call something after each step, and whose prompts may have calls of their own."""

    def __init__(self, scheduler: Any, separate: bool = False) -> None:
        self.scheduler, self.separate = scheduler, separate
        self.unet = hosts.unet()
        self.texts = torch.randn(2, 1, 7, hosts.TEXT, generator=torch.Generator().manual_seed(9))

    @torch.no_grad()
    def __call__(self, after_step: Any = None, told: Any = None, scale: float = 7.5) -> Tensor:
        self.scheduler.set_timesteps(STEPS)
        latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(3))
        latents = latents.to(self.texts.dtype)
        torch.manual_seed(0)  # for schedulers that add noise
        for index, t in enumerate(self.scheduler.timesteps):
            if told is not None:
                told(index, len(self.scheduler.timesteps))
            sample = getattr(self.scheduler, "scale_model_input", lambda sample, _: sample)(latents, t)
            if self.separate:
                plain, guided = (self.unet(sample, t, text).sample for text in self.texts)
            else:
                plain, guided = self.unet(torch.cat([sample] * 2), t, self.texts.flatten(0, 1)).sample.chunk(
                    2
                )
            latents = self.scheduler.step(plain + scale * (guided - plain), t, latents).prev_sample
            if after_step is not None:
                after_step(index, t, latents)
        return latents


def looks_at(
    model: nn.Module, text: Tensor, each: int, copies: int
) -> tuple[Callable[..., None], list[Tensor]]:
    """Return what calls the model on what a step has made, and a list of the differences to a dense copy."""
    dense, found = copy.deepcopy(model), []

    def look(index: int, t: Tensor, latents: Tensor) -> None:
        if index % each == 0:
            given = torch.cat([latents] * copies), t, torch.cat([text] * copies)
            found.append((model(*given).sample - dense(*given).sample).abs().max())

    return look, found


FLOW = FlowMatchEulerDiscreteScheduler()


@pytest.mark.parametrize("scheduler", [DDIMScheduler(clip_sample=False), FLOW], ids=["DDIM", "flow matching"])
@pytest.mark.parametrize("separate", [False, True], ids=["in one batch", "in calls of their own"])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("each", "copies"), [(1, 1), (3, 2)])
def test_what_a_loop_calls_after_a_step_is_dense(scheduler, separate, told, each, copies):
    """The sample that the step has made tells. With ``patch.at_step`` too, where no scheduler is asked."""
    loop = Loop(copy.deepcopy(scheduler), separate)
    look, found = looks_at(loop.unet, loop.texts[1], each, copies)
    patch = apply(loop.unet if told else loop, REUSED)
    draw_it = functools.partial(loop, told=patch.at_step if told else None)
    expected = draw_it()
    kinds = dict(state_of(loop.unet).last_run.kind_of_step)
    assert StepKind.SHALLOW in kinds.values()
    for after_step in (look, None):
        assert torch.equal(draw_it(after_step), expected)
        assert dict(state_of(loop.unet).last_run.kind_of_step) == kinds
        assert state_of(loop.unet).last_run.misfits == 0
    assert not any(found)
    assert len(found) == len(range(0, STEPS, each))


@pytest.mark.parametrize("scheduler", [DDIMScheduler(clip_sample=False), FLOW], ids=["DDIM", "flow matching"])
@pytest.mark.parametrize("separate", [False, True], ids=["in one batch", "in calls of their own"])
def test_what_a_loop_calls_with_the_number_of_the_last_timestep_is_dense(scheduler, separate):
    """A number is none of the scheduler's timesteps, so its value alone tells that its step is over."""
    loop = Loop(copy.deepcopy(scheduler), separate)
    look, found = looks_at(loop.unet, loop.texts[1], 1, 1)
    apply(loop, REUSED)
    expected = loop()
    kinds = dict(state_of(loop.unet).last_run.kind_of_step)

    def look_again(index: int, t: Tensor, latents: Tensor) -> None:
        if index < STEPS - 1:  # after the last step, a warning says that the generation is over
            look(index, t.item(), less(latents))

    assert torch.equal(loop(look_again), expected)
    assert dict(state_of(loop.unet).last_run.kind_of_step) == kinds
    assert len(found) == STEPS - 1
    assert not any(found)


OTHERS: dict[str, Callable[[], Any]] = {
    "DDPM": diffusers.DDPMScheduler,
    "PNDM": lambda: PNDMScheduler(skip_prk_steps=True),
    "Heun": diffusers.HeunDiscreteScheduler,
    "Euler ancestral": diffusers.EulerAncestralDiscreteScheduler,
    "DPM++": diffusers.DPMSolverMultistepScheduler,
    "DDIM": lambda: DDIMScheduler(clip_sample=False),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("where", ["float32", "bfloat16", "on a device"])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(
    ("each", "separate"), [(1, False), (3, True)], ids=["in one batch", "in calls of their own"]
)
def test_what_a_loop_calls_is_dense_whatever_its_scheduler(name, each, where, told, separate, monkeypatch):
    """The next step begins with the sample of such a call, which shows that it was none of the step."""
    loop = Loop(OTHERS[name](), separate)
    if told and where == "bfloat16" and loop.scheduler.init_noise_sigma != 1:
        pytest.skip("the sample of the next step is scaled and rounded")
    if where == "on a device":  # where comparing samples waits for it
        monkeypatch.setattr(call_facts, "needs_sync", lambda value: True)
    if where == "bfloat16":
        loop.unet.to(torch.bfloat16)
        loop.texts = loop.texts.bfloat16()
    look, found = looks_at(loop.unet, loop.texts[1], each, 1)
    patch = apply(loop.unet if told else loop, REUSED)
    draw_it = functools.partial(loop, told=patch.at_step if told else None)
    expected = draw_it()
    kinds = dict(state_of(loop.unet).last_run.kind_of_step)
    assert StepKind.SHALLOW in kinds.values()
    for after_step in (look, None):
        assert torch.equal(draw_it(after_step), expected)
        assert dict(state_of(loop.unet).last_run.kind_of_step) == kinds
        assert state_of(loop.unet).last_run.misfits == 0
    assert found
    assert not any(found)


def beside_calls(model: nn.Module) -> list[int]:
    """Filled with the calls of a model that belong to no step."""
    found: list[int] = []
    state = state_of(model)
    model.register_forward_hook(lambda *_: found.append(1) if state.context.beside else None)
    return found


@pytest.mark.parametrize("solver", SOLVERS)
def test_no_call_of_a_pipeline_is_taken_for_such_a_call(pipe, solver):
    """Also where a callback replaces the latents. Some schedulers call the model twice in a step."""

    def change(pipe: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        return {"latents": tensors["latents"].clone() if step % 2 else 0.9 * tensors["latents"]}

    pipe.scheduler = SOLVERS[solver](pipe.scheduler.config)
    apply(pipe, REUSED)
    found = beside_calls(pipe.unet)
    for given in ({}, {"callback_on_step_end": change}):
        draw(pipe, STEPS, guidance_scale=2.0, **given)
    picture = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    picture.set_progress_bar_config(disable=True)
    draw(picture, STEPS, image=torch.rand(1, 3, 32, 32), strength=0.6, guidance_scale=2.0)
    assert not found


@pytest.mark.parametrize("name", ["SAG", "PAG", "Panorama"])
def test_no_second_call_of_a_step_is_taken_for_such_a_call(pipe, name):
    kinds = {
        "SAG": ("StableDiffusionSAGPipeline", {"sag_scale": 0.75, "guidance_scale": 1.0}),
        "PAG": ("StableDiffusionPAGPipeline", {"pag_scale": 3.0, "guidance_scale": 1.0}),
        "Panorama": ("StableDiffusionPanoramaPipeline", {"width": 64, "height": 32, "view_batch_size": 1}),
    }
    kind, given = kinds[name]
    parts = dict(pipe.components)
    if name == "PAG":
        parts["pag_applied_layers"] = "mid"
    made = getattr(diffusers, kind)(**parts, requires_safety_checker=False)
    made.set_progress_bar_config(disable=True)
    apply(made, {"speedup": 2.0})
    found = beside_calls(pipe.unet)
    draw(made, STEPS, **given)
    assert state_of(pipe.unet).follows_steps
    assert not found


def tiles(latents: Tensor, *_: Any) -> list[Tensor]:
    return [latents[..., start : start + 8] for start in range(0, 9, 4)]  # each overlaps the next one


def flipped(latents: Tensor, *_: Any) -> list[Tensor]:
    return [latents, latents.flip(-1), latents.clone(), 1.1 * latents]


def noised(latents: Tensor, predict: Any, *_: Any) -> list[Tensor]:
    return [latents, predict(latents) + 0.01 * torch.randn(latents.shape)]


def smoothed(latents: Tensor, predict: Any, *_: Any) -> list[Tensor]:
    """As guidance by blurred images does."""
    return [latents, torch.lerp(latents, predict(latents), 0.1).lerp(latents.roll(1, -1), 0.001)]


@pytest.mark.parametrize("samples", [tiles, flipped, noised, smoothed])
@torch.no_grad()
def test_no_further_call_of_a_loop_is_taken_for_such_a_call(samples):
    loop = Loop(DDIMScheduler(clip_sample=False))
    apply(loop, REUSED)
    unet, text, found = loop.unet, loop.texts[0], beside_calls(loop.unet)
    loop.scheduler.set_timesteps(STEPS)
    latents = torch.randn(1, 4, 16, 16)
    for t in loop.scheduler.timesteps:
        for sample in samples(latents, lambda given, t=t: unet(given, t, text).sample):
            noise = unet(sample, t, text).sample
        if noise.shape == latents.shape:
            latents = loop.scheduler.step(noise, t, latents).prev_sample
        else:
            latents = 0.9 * latents + 0.1 * torch.randn(latents.shape)
    assert not found


def test_a_sample_is_recognised_as_made_of_others():
    sample, first, second = (torch.randn(2, 4, 16, 16) for _ in range(3))
    calls = [(detail_of(sample), detail_of(made)) for made in (first, second)]
    numbers = torch.tensor([0.98, 0.9])[:, None, None, None]  # of each image
    made = numbers * sample + 0.1 * first - 0.3 * second
    assert is_made_of(detail_of(made), calls)
    assert is_made_of(detail_of(made[1:]), calls)  # some of the images
    assert is_made_of(detail_of(sample - 0.1 * first), calls[:1])
    assert not is_made_of(detail_of(made), calls[:1])
    others = {
        "the sample": sample,
        "another scale of it": 0.9 * sample,
        "rounded": sample.half(),
        "one of two": torch.stack([made[0], sample[1]]),
        "noise": made + 1e-4 * torch.randn(made.shape),
        "another place": made.roll(1, -1),
        "infinite": made / 0,
        "nothing": 0 * made,
        "small": made[..., :2, :2],
        "of another size": made[..., :8],
    }
    for name, other in others.items():
        assert not is_made_of(detail_of(other), calls), name
    assert not is_made_of(None, calls)
    assert not is_made_of(detail_of(made), [])


def test_what_tells_such_a_call_goes_with_all_that_is_cached():
    loop = Loop(DDIMScheduler(clip_sample=False))
    apply(loop, REUSED)
    loop()
    memory = cached.memory_of(loop.unet)
    numbers = weakref.ref(memory.tracker.numbers)
    memory.close()
    assert numbers() is None


# --- on a device ----------------------------------------------------------------------------------


class OnDeviceLoop:
    """A pipeline on a fake device, whose call notes how often its steps waited."""

    def __init__(self, model: nn.Module, scheduler: Any) -> None:
        self.transformer, self.scheduler = to_device(model), scheduler
        given = FAMILIES["FluxTransformer2DModel"].inputs(1, 16, 16)
        self.inputs = {name: OnDevice(value) for name, value in given.items()}

    def __call__(self, device: FakeDevice, callback_on_step_end: Any = None) -> tuple[Tensor, list[int]]:
        self.scheduler.set_timesteps(STEPS, device=DEVICE)
        latents, waited = self.inputs["hidden_states"], []
        for index, t in enumerate(self.scheduler.timesteps):
            before = device.waits.total()
            noise = self.predict(latents, t)
            latents = self.scheduler.step(noise, t, latents, return_dict=False)[0]
            callback_on_step_end(self, index, t, {"latents": latents})
            waited.append(device.waits.total() - before)
        return latents, waited

    def predict(self, latents: Tensor, t: Tensor) -> Tensor:
        unit = 1000 if isinstance(self.scheduler, FlowMatchEulerDiscreteScheduler) else 1
        given = {**self.inputs, "hidden_states": latents, "timestep": t.expand(1) / unit}
        return self.transformer(**given, return_dict=False)[0]


@pytest.mark.skipif(not AVAILABLE, reason="this version of PyTorch has no device types made in Python")
@pytest.mark.parametrize("scheduler", [FLOW, DDIMScheduler(clip_sample=False)], ids=["flow matching", "DDIM"])
@torch.no_grad()
def test_on_a_device_it_changes_nothing_and_waits_no_more(scheduler):
    """Where timesteps lie on the device, and the model is given another number of them."""
    found: list[tuple[Tensor, Tensor]] = []
    with FakeDevice() as device:
        loop = OnDeviceLoop(FAMILIES["FluxTransformer2DModel"].build(), copy.deepcopy(scheduler))
        dense = copy.copy(loop)
        dense.transformer = copy.deepcopy(loop.transformer)
        apply(loop, REUSED)

        def look(pipe: Any, index: int, t: Tensor, tensors: Any) -> None:
            found.append((loop.predict(tensors["latents"], t), dense.predict(tensors["latents"], t)))

        expected, waited = loop(device, lambda *_: None)
        log = state_of(loop.transformer).last_run
        kinds = dict(log.kind_of_step)
        assert StepKind.SKIPPED in kinds.values()
        picture, waits = loop(device, look)
        log = state_of(loop.transformer).last_run
    assert torch.equal(picture.held, expected.held)
    assert dict(log.kind_of_step) == kinds
    assert sum(waits) <= sum(waited)
    assert all(torch.equal(one.held, other.held) for one, other in found)
    assert len(found) == STEPS
