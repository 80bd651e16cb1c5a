"""What forecasts missed is made good in the next full step, where nothing guides without a classifier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cached
import diffusers
import numpy as np
import pytest
import torch
from tests.models.family import TEXT
from tests.models.test_every_family import model_of
from tests.models.tiny import FAMILIES
from torch import Tensor

from tokenmerge import StepReuse, ToMeConfig, apply_token_merging
from tokenmerge.runtime.patching.patch import state_of
from tokenmerge.runtime.steps.calls import CallNumbers
from tokenmerge.runtime.steps.making_good import Outputs, weights
from tokenmerge.runtime.steps.scheduler import is_euler, next_schedule

STEPS = 9
FULL = (0, 1, 3, 6, 7)
REUSE = ToMeConfig(ratio=0.0, reuse=StepReuse(full_steps=tuple(step / (STEPS - 1) for step in FULL)))
EULER = diffusers.FlowMatchEulerDiscreteScheduler


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def flux(scheduler: Any = None) -> Any:
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    model = model_of(FAMILIES["FluxTransformer2DModel"])
    pipe = diffusers.FluxPipeline(**parts, transformer=model, scheduler=scheduler or EULER(shift=3.0))
    pipe.set_progress_bar_config(disable=True)
    return pipe


class Run:
    """One generation: what the model returned by itself, what the pipeline got, and the samples."""

    def __init__(self, pipe: Any, config: ToMeConfig = REUSE, **arguments: Any) -> None:
        model = pipe.transformer
        self.returned: list[Tensor] = []
        self.given: list[Tensor] = []
        self.samples: list[Tensor] = []
        hooks = [model.register_forward_hook(lambda *hook: self.returned.append(hook[-1][0].double()))]
        apply_token_merging(pipe, config)
        hooks.append(model.register_forward_hook(lambda *hook: self.given.append(hook[-1][0].double())))
        self.kept: list[int] = []
        hooks.append(model.register_forward_hook(lambda *_: self.kept.append(len(outputs_of(model)))))
        hooks.append(model.register_forward_pre_hook(self._note_sample, with_kwargs=True))
        texts = {"prompt_embeds": noise(1, 7, TEXT), "pooled_prompt_embeds": noise(1, TEXT)}
        self.image = pipe(
            **{**texts, **arguments},
            height=128,
            width=128,
            num_inference_steps=STEPS,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
        ).images.double()
        for hook in hooks:
            hook.remove()

    def _note_sample(self, model: Any, args: Any, kwargs: Any) -> None:
        self.samples.append(kwargs["hidden_states"].double())

    @property
    def made_good(self) -> list[int]:
        """The steps in which the pipeline got something else than the model returned."""
        pairs = zip(self.returned, self.given, strict=True)
        return [step for step, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


def parabolas(outputs: list[Tensor]) -> list[Tensor]:
    """Put in the place of each forecast the parabola through the full steps around it, by numpy."""
    found = list(outputs)
    for step in set(range(STEPS)) - set(FULL):
        after = next((full for full in FULL if full > step), None)
        if after is not None:
            nodes = [full for full in FULL if full <= after][-3:]
            values = np.stack([outputs[node].numpy().ravel() for node in nodes])
            fit = np.polyfit(nodes, values, len(nodes) - 1)
            value = sum(factor * step ** (len(fit) - 1 - power) for power, factor in enumerate(fit))
            found[step] = torch.from_numpy(value).view_as(outputs[step])
    return found


@torch.no_grad()
def test_the_image_is_as_if_the_parabolas_had_been_the_forecasts():
    pipe = flux()
    run = Run(pipe)
    changes = pipe.scheduler.sigmas.double().diff()
    pairs = list(zip(changes, parabolas(run.returned), strict=True))
    for step in FULL[2:]:  # up to the end of each full step that follows on a skipped one
        wanted = run.samples[0] + sum(change * output for change, output in pairs[: step + 1])
        found = [*run.samples, run.image][step + 1]
        # Samples of a size of 1 are float32, in each step with a rounding of its own.
        torch.testing.assert_close(found, wanted, rtol=0, atol=STEPS * 4e-7)
    assert run.made_good == [3, 6]
    missed = max((one - other).abs().max() for one, other in zip(run.given, run.returned, strict=True))
    assert missed > 1e-3


@pytest.mark.parametrize("adds_noise", [False, True])
@torch.no_grad()
def test_plans_know_it_before_a_generation_and_in_it(adds_noise):
    pipe = flux(EULER(stochastic_sampling=adds_noise))
    assert next_schedule(pipe, STEPS).is_euler is not adds_noise
    Run(pipe)
    assert state_of(pipe.transformer).last_run.schedule.is_euler is not adds_noise


@torch.no_grad()
def test_nothing_of_it_stays_after_the_last_step():
    run = Run(flux())
    assert run.kept == [*[1] * (STEPS - 1), 0]


def outputs_of(model: Any) -> list[Any]:
    noted = cached.memory_of(model).tracker.noted
    return [value for (_, name), value in noted.items() if name == "outputs"]


def guided() -> Run:
    """A second call in each step, of which FLUX's pipeline does not tell."""
    texts = {"negative_prompt_embeds": noise(1, 7, TEXT, seed=1), "true_cfg_scale": 3.0}
    return Run(flux(), **texts, negative_pooled_prompt_embeds=noise(1, TEXT, seed=1))


def with_strong_guidance() -> Run:
    pipe = flux()
    type(pipe).do_classifier_free_guidance = property(lambda _: True)
    try:
        return Run(pipe)
    finally:
        del type(pipe).do_classifier_free_guidance


def with_noise() -> Run:
    return Run(flux(EULER(stochastic_sampling=True)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draw", [guided, with_strong_guidance, with_noise])
@torch.no_grad()
def test_where_nothing_is_made_good(draw: Callable[[], Run]):
    assert draw().made_good == []


@torch.no_grad()
def test_a_loop_of_ones_own_is_left_alone():
    """Nobody knows how it guides."""
    pipe = flux()
    model = pipe.transformer
    returned: list[Tensor] = []
    given: list[Tensor] = []
    model.register_forward_hook(lambda *hook: returned.append(hook[-1][0].clone()))
    apply_token_merging(pipe, REUSE)
    model.register_forward_hook(lambda *hook: given.append(hook[-1][0].clone()))
    arguments = FAMILIES["FluxTransformer2DModel"].inputs(1, 8, 8)
    pipe.scheduler.set_timesteps(STEPS)
    for timestep in pipe.scheduler.timesteps:
        arguments["timestep"] = timestep.expand(1) / 1000
        output = model(**arguments)[0]
        arguments["hidden_states"] = pipe.scheduler.step(output, timestep, arguments["hidden_states"])[0]
    assert [step.value for step in state_of(model).last_run.kind_of_step.values()].count("skipped") == 4
    assert not state_of(model).last_run.schedule.is_euler
    assert len(returned) == len(given) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(returned, given, strict=True))


@torch.no_grad()
def test_a_sample_is_recognised_by_what_its_scheduler_got(monkeypatch):
    """The next sample follows from that, and not from what the model returned by itself."""
    noted: list[Tensor] = []
    note = CallNumbers.note_result

    def note_result(self: CallNumbers, number: int, result: Any) -> None:
        noted.append(result[0].double())
        note(self, number, result)

    monkeypatch.setattr(CallNumbers, "note_result", note_result)
    run = Run(flux())
    assert all(torch.equal(one, other) for one, other in zip(noted, run.given, strict=True))


def test_each_image_of_a_list_is_made_good_by_itself():
    sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)
    outputs = Outputs()
    value = noise(2, 3)
    for step, (runs, factor) in enumerate([(True, 1.0), (True, 2.0), (False, 2.0), (True, 4.0)]):
        result = ([value[0] * factor, value[1] * factor, "text"],)
        got = outputs.note(step, runs, result, sigmas)
    # The straight line says 3 in step 2, where 2 was taken.
    torch.testing.assert_close(got[0][:2], [value[0] * 5, value[1] * 5])
    assert got[0][2] == "text"


def test_a_host_may_change_what_the_model_returned():
    sigmas = torch.linspace(1, 0, 5)
    found = []
    for changes in (False, True):
        outputs = Outputs()
        for step, (runs, value) in enumerate([(True, 1.0), (True, 2.0), (False, 2.0), (True, 4.0)]):
            result = torch.full((1, 2), value)
            found.append(outputs.note(step, runs, result, sigmas).clone())
            if changes:
                result.zero_()
    assert torch.equal(found[3], found[7])


def test_outputs_of_another_shape_make_nothing_good():
    sigmas = torch.linspace(1, 0, 6)
    outputs = Outputs()
    results = []
    for step, (runs, size) in enumerate([(True, 2), (True, 2), (False, 2), (True, 3), (False, 3), (True, 3)]):
        results.append((torch.full((1, size), float(step**2)),))
        assert outputs.note(step, runs, results[-1], sigmas) is results[-1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_result_keeps_its_dtype_and_a_step_of_no_length_is_left_alone(dtype):
    outputs = Outputs()
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.4])
    values = [torch.full((1, 2), value, dtype=dtype) for value in (1.0, 5.0, 2.0)]
    for step, value in enumerate(values):
        got = outputs.note(step, step != 1, value, sigmas)
        assert got.dtype == dtype
    assert torch.equal(got, values[-1])


def test_the_weights_are_those_of_the_polynomial_through_the_nodes():
    nodes = [2, 3, 7]
    for place in (4, 5.5, 6):
        found = weights(place, nodes)
        for power in range(3):
            total = sum(weight * node**power for node, weight in found.items())
            assert total == pytest.approx(place**power)


def test_only_some_schedulers_add_the_output_alone():
    assert is_euler(EULER())
    assert is_euler(EULER(shift=3.0, use_karras_sigmas=True))
    assert not is_euler(EULER(stochastic_sampling=True))
    assert not is_euler(diffusers.EulerDiscreteScheduler())
    assert not is_euler(diffusers.FlowMatchHeunDiscreteScheduler())
    assert not is_euler(None)
    scaled = EULER()
    scaled.register_to_config(sigma_data=1.0)  # as Cosmos' pipelines do, whose output is scaled before
    assert not is_euler(scaled)
