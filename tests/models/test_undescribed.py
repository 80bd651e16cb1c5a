"""Step reuse in models whose blocks no family describes: their blocks are skipped together, or they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ConfigMixin, DDIMPipeline, DDIMScheduler, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from tests.models.tiny import FAMILIES as TINY
from tests.models.undescribed import CONFIGS, DENSE, INPUTS, PIPELINES, build
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from tokenmerge import StepReuse, ToMeConfig, UnsupportedModelError, apply_token_merging
from tokenmerge.models.find import FAMILIES, find_hosts
from tokenmerge.models.undescribed import SKIPPING
from tokenmerge.models.unsupported import REASONS
from tokenmerge.plans.generation import StepKind, plan_generation
from tokenmerge.runtime.blocks.span import _by_sample, _in_shape

STEPS = 6
REUSE = ToMeConfig(ratio=0, reuse=StepReuse(every=2))  # steps 0, 1, 3 and 5 are full
# As above, but steps 0, 1, 2 and 5 are full: step 3 extrapolates by the changes in the two steps before.
THREE = ToMeConfig(ratio=0, reuse=StepReuse(full_steps=(0, 0.2, 0.4, 1)))
DESCRIBED = {name for family in FAMILIES for name in family.CLASSES}
UNDESCRIBED = sorted(CONFIGS.keys() - DESCRIBED)


pytestmark = [
    # Models as small as these cannot always reach a speed-up of 2.
    pytest.mark.filterwarnings("ignore:speedup=2"),
    # What the models of diffusers themselves warn about, on a CPU.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask"),
    pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated"),
    pytest.mark.filterwarnings("ignore:`scale` is deprecated"),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def pipeline_of(model: nn.Module) -> SimpleNamespace:
    """What token merging needs of a pipeline."""
    return SimpleNamespace(transformer=model, scheduler=DDIMScheduler())


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def call_at(name: str, step: int, batch: int = 2) -> dict[str, Any]:
    """The arguments of a call at a step, in which the numbers change from step to step."""
    arguments = INPUTS[name](batch)
    sample = find_sample(name)
    moved = tree_map_only(Tensor, lambda tensor: tensor * (1 + 0.1 * step**1.5), arguments[sample])
    return {**arguments, sample: moved}


def find_sample(name: str) -> str:
    return SKIPPING[name].sample or next(iter(INPUTS[name](1)))


@contextlib.contextmanager
def called() -> Iterator[set[nn.Module]]:
    """Collect the modules that are called, without a hook on any of them."""
    found: set[nn.Module] = set()
    hook = register_module_forward_pre_hook(lambda module, _: found.add(module))
    yield found
    hook.remove()


def skipped_modules(model: nn.Module) -> set[nn.Module]:
    """The modules inside those that are skipped."""
    (host,) = find_hosts(model)
    return {inner for path in host.span for inner in list(model.get_submodule(path).modules())[1:]}


def test_every_class_in_which_nothing_merges_has_been_looked_at():
    assert SKIPPING.keys() - DESCRIBED == REASONS.keys() - DESCRIBED
    assert REASONS.keys() - DESCRIBED == {*CONFIGS, *DENSE, *PIPELINES}
    assert {name for name, skipping in SKIPPING.items() if skipping.dense} == DENSE.keys()


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_skipped_steps_run_no_block_and_return_what_the_model_would(name):
    """With the inputs of the full steps before it, which are equal, a skipped step has the same result."""
    model, arguments = build(name), INPUTS[name](2)
    dense = tensors(model(**arguments))
    inside = skipped_modules(model)
    patch = apply_token_merging(model, REUSE)
    (host,) = find_hosts(model)
    fills_cache = host.fills_cache is not None and host.fills_cache(arguments)  # such a call always runs
    assert fills_cache == (name == "WanAnimate2Transformer3DModel")
    assert (host.span == ("",)) == (SKIPPING[name].way == "whole output")
    for step in range(STEPS):
        patch.at_step(step, STEPS)
        with called() as found:
            made = tensors(model(**INPUTS[name](2)))
        skips = plan_generation(REUSE, STEPS)[step].kind is not StepKind.FULL and not fills_cache
        assert bool(found & inside) != skips, step
        for own, expected in zip(made, dense, strict=True):
            assert own.shape == expected.shape
            scale = expected.abs().max()
            # What blocks add is a difference, so a skipped step rounds once more than a full one.
            torch.testing.assert_close(own, expected, rtol=0, atol=2e-5 * float(scale))
    patch.remove()


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_a_speed_up_of_1_changes_nothing_and_removed_it_is_gone(name):
    model, arguments = build(name), INPUTS[name](2)
    classes = {module: type(module) for module in model.modules()}
    attributes = {module: set(vars(module)) for module in model.modules()}
    dense = tensors(model(**arguments))
    for asked in (1.0, 2.0):
        patch = apply_token_merging(pipeline_of(model), speedup=asked)
        if asked == 1:
            assert all(map(torch.equal, tensors(model(**INPUTS[name](2))), dense))
        patch.remove()
        assert {module: type(module) for module in model.modules()} == classes
        assert {module: vars(module).keys() for module in model.modules()} == attributes
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(map(torch.equal, tensors(model(**INPUTS[name](2))), dense))


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_the_handle_says_what_is_skipped_and_why_nothing_merges(name):
    model = build(name)
    patch = apply_token_merging(pipeline_of(model), speedup=2.0)
    shown = str(patch)
    assert f"merging: none in {name}: {REASONS[name]}" in shown
    what = (
        "the whole model, whose output"
        if SKIPPING[name].way == "whole output"
        else "blocks, and what they add"
    )
    assert what in shown
    report = patch.report(steps=20)
    assert report.speedup > 1
    assert report.flops_of_steps.count(report.flops_dense) == report.step_signs.count("D")
    with pytest.raises(UnsupportedModelError, match=f"{name} yet: .*step reuse alone speeds up its pipeline"):
        apply_token_merging(pipeline_of(model), ratio=0.5)
    patch.remove()


@pytest.mark.parametrize(
    "name", ["BriaFibo2Transformer2DModel", "StableCascadeUNet", "MotifVideoTransformer3DModel"]
)
def test_a_sample_alone_has_the_result_that_it_has_in_a_batch(name):
    model = build(name)
    results = []
    for batch in (2, 1):
        patch = apply_token_merging(model, THREE)
        made = []
        for step in range(STEPS):
            patch.at_step(step, STEPS)
            made += tensors(model(**call_at(name, step, batch)))
        results.append([one[:1] for one in made])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "first"), [((2, 5, 3), 2), ((5, 2, 3), 2), ((6, 3), 2), ((2,), 2), ((5, 3), 1)]
)
def test_the_samples_of_a_tensor_are_found_along_its_first_axes(shape, first):
    """As sequences before batches, and frames folded into the batch, of two samples."""
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    found = _by_sample(tensor, 2)
    assert len(found) == first
    if shape == (5, 2, 3):
        assert torch.equal(found[1], tensor[:, 1])
    assert torch.equal(_in_shape(found, tensor.shape, 2), tensor)


def forecast(outputs: list[Tensor]) -> Tensor:
    """The linear forecast of the next of three outputs, damped where they turn, for each sample."""
    first, second, third = (one.flatten(1) for one in outputs)
    then, now = second - first, third - second
    agreement = torch.nn.functional.cosine_similarity(now, then, dim=1).clamp(min=0)
    return (third + now * agreement[:, None]).view_as(outputs[-1])


def test_each_of_several_outputs_is_extrapolated_by_itself():
    """A video and its sound, of which the sound changes otherwise."""
    name = "StableCascadeUNet"
    model = TwoOutputs(build(name))
    for step in range(3):
        model(step)
    expected = [forecast([made[place] for made in model.made]) for place in (0, 1)]
    patch = apply_token_merging(SimpleNamespace(transformer=model.inner, scheduler=DDIMScheduler()), THREE)
    made = []
    for step in range(4):
        patch.at_step(step, STEPS)
        made = model(step)
    for own, other in zip(made, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(made[0], model.made[2][0])


class TwoOutputs:
    """Calls a model whose result is a dictionary in a tuple, with two tensors and a number."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner
        self.made: list[tuple[Tensor, Tensor]] = []
        plain = type(inner).forward

        class StableCascadeUNet(type(inner)):  # type: ignore[misc]
            def forward(self, sample: Tensor, timestep_ratio: Tensor, **more: Any) -> Any:
                (made,) = plain(self, sample, timestep_ratio, **more, return_dict=False)
                return {"image": made, "sound": made.mean((2, 3)) ** 2}, 7

        inner.__class__ = StableCascadeUNet

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        made, seven = self.inner(**call_at("StableCascadeUNet", step))
        assert seven == 7
        self.made.append((made["image"], made["sound"]))
        return self.made[-1]


def test_blocks_that_are_compiled_alone_are_skipped():
    name = "GlmImageTransformer2DModel"
    model, counter = build(name), CompileCounter()
    patch = apply_token_merging(model, REUSE)
    runs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled = counter(graph, inputs)

        def run(*arguments: Any) -> Any:
            runs.append(step)
            return compiled(*arguments)

        return run

    for block in model.transformer_blocks:
        block.compile(backend=count, fullgraph=True)
    for step in range(STEPS):
        patch.at_step(step, STEPS)
        model(**INPUTS[name](2))
    blocks = len(model.transformer_blocks)
    assert runs == [step for step in (0, 1, 3, 5) for _ in range(blocks)]
    patch.remove()


def test_a_change_of_shapes_begins_anew():
    """Also of an argument that is not the sample: after it, two steps run everything."""
    name = "T5FilmDecoder"
    model = build(name)
    inside = skipped_modules(model)
    patch = apply_token_merging(model, REUSE)
    ran = []
    for step in range(STEPS):
        patch.at_step(step, STEPS)
        arguments = INPUTS[name](2)
        if step >= 2:
            ((notes, mask),) = arguments["encodings_and_masks"]
            arguments["encodings_and_masks"] = [(notes[:, 1:], mask[:, 1:])]
        with called() as found:
            model(**arguments)
        ran.append(bool(found & inside))
    assert ran == [True, True, True, True, False, True]


def test_samples_in_a_list_are_skipped_as_a_whole():
    """In a pipeline whose blocks get images of several sizes."""
    model = TINY["ZImageTransformer2DModel"].build()
    small, large = (
        TINY["ZImageTransformer2DModel"].inputs(2, 4, 4),
        TINY["ZImageTransformer2DModel"].inputs(2, 8, 8),
    )

    def call() -> list[Tensor]:
        return tensors(model(**{**small, "x": [small["x"][0], large["x"][1]]}))

    dense = call()
    pipe = type("ZImageOmniPipeline", (), {})()
    pipe.transformer, pipe.scheduler = model, DDIMScheduler()
    patch = apply_token_merging(pipe, REUSE)
    assert "merging: none in ZImageOmniPipeline: each of its samples is a list" in str(patch)
    ran = []
    for step in range(STEPS):
        patch.at_step(step, STEPS)
        with called() as found:
            assert all(map(torch.equal, call(), dense))
        ran.append(len(found) > 1)
    assert ran == [plan.kind is StepKind.FULL for plan in plan_generation(REUSE, STEPS)]
    patch.remove()


@pytest.mark.parametrize("name", DENSE)
def test_a_model_that_always_runs_dense_is_refused_with_the_reason(name):
    model = build(name)
    with pytest.raises(
        UnsupportedModelError, match=f"{name} yet: .*steps cannot be skipped.*{SKIPPING[name].dense}"
    ):
        apply_token_merging(pipeline_of(model), speedup=2.0)


class NewDenoiser(ModelMixin, ConfigMixin):
    """A model of a class of diffusers that no list has."""

    @register_to_config
    def __init__(self, sample_size: int = 8, in_channels: int = 4) -> None:
        super().__init__()
        self.inner = build("UNet2DModel")

    def forward(self, sample: Tensor, timestep: Tensor) -> Any:
        return self.inner(sample, timestep)


def test_a_pipeline_with_a_model_that_nobody_has_looked_at_draws_faster():
    pipe = DDIMPipeline(NewDenoiser(), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)

    def image() -> Tensor:
        made = pipe(generator=torch.Generator().manual_seed(1), num_inference_steps=10, output_type="np")
        return torch.from_numpy(made.images)

    dense = image()
    patch = apply_token_merging(pipe, speedup=2.0)
    first, second = image(), image()
    assert torch.equal(first, second)
    assert not torch.equal(first, dense)
    shown = str(patch)
    assert "10 steps" in shown
    assert "the whole model, whose output is extrapolated" in shown
    assert "merging: none in NewDenoiser: its blocks have not been described yet" in shown
    assert "cache between steps: 0.0 MB" in shown
    assert patch.report().speedup == pytest.approx(2, abs=0.01)
    patch.remove()
    assert torch.equal(image(), dense)


def glm_caches(mode: str) -> GlmImageKVCache:
    """The caches that GLM-Image's pipeline passes: those of each condition image are written first."""
    caches = GlmImageKVCache(num_layers=2)
    caches.set_mode(mode)
    return caches


@pytest.mark.parametrize(
    ("name", "fills", "reads"),
    [
        (
            "AnyFlowFARTransformer3DModel",
            {"kv_cache_flag": {"num_cached_chunks": 0, "is_cache_step": True}},
            {"kv_cache_flag": {"num_cached_chunks": 1, "is_cache_step": False}},
        ),
        ("GlmImageTransformer2DModel", {"kv_caches": glm_caches("write")}, {"kv_caches": glm_caches("read")}),
        ("Flux2KleinKVPipeline", {"kv_cache_mode": "extract"}, {"kv_cache_mode": "cached"}),
        ("WanAnimate2Transformer3DModel", {"kv_cache_mode": "extract"}, {"kv_cache_mode": "cached"}),
    ],
)
def test_a_call_that_fills_a_cache_is_told_from_one_that_reads_it(name, fills, reads):
    """As the pipelines of these models call them."""
    fills_cache = SKIPPING[name].fills_cache
    assert fills_cache is not None
    assert fills_cache(fills)
    assert not fills_cache(reads)
    assert not fills_cache({})
