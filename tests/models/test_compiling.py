"""Compiling merged models, by block and as a whole: as many graphs as the plain model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.testing import assert_close

from tokenmerge import (
    Correction,
    MergeSharing,
    StepReuse,
    ToMeConfig,
    UnsupportedModelError,
    apply_token_merging,
    remove_token_merging,
)

HALF = ToMeConfig(ratio=0.5)
STACK = ToMeConfig(
    ratio=0.5,
    scope="block",
    features="model_residual",
    merge_sharing=MergeSharing(blocks=True),
    correction=Correction(every=3),
    reuse=StepReuse(every=2),
)
REGIONAL = ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")


@pytest.mark.parametrize("name", REGIONAL)
def test_compiling_by_block_takes_as_many_graphs_as_the_plain_model(name):
    family = FAMILIES[name]

    def graphs(merging: bool) -> int:
        torch._dynamo.reset()
        compiled = []

        def count(module: nn.Module, example: list) -> Callable:
            compiled.append(module)
            return module.forward

        model, arguments = model_of(family), family.inputs(2, 8, 8)
        if merging:
            apply_token_merging(model, HALF)
        expected = call(model, arguments)
        model.compile_repeated_blocks(fullgraph=True, backend=count)
        assert torch.equal(call(model, arguments), expected)
        return len(compiled)

    assert graphs(merging=True) == graphs(merging=False) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex:UserWarning")
@pytest.mark.parametrize(
    ("name", "backend"),
    # Inductor takes minutes for the graphs of the others.
    [
        ("UNet2DConditionModel", "eager"),
        *((name, "eager") for name in REGIONAL),
        ("QwenImageTransformer2DModel", "inductor"),
        ("WanTransformer3DModel", "inductor"),
    ],
)
@torch.no_grad()
def test_guidance_in_two_calls_takes_as_many_graphs_as_the_plain_model(name, backend):
    """The second call of a step takes the plan of the first, and needs no further graph for that."""
    family = FAMILIES[name]

    def compiled_steps(merging: bool, backend: str) -> tuple[int, list[Tensor], list[Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, compiled = model_of(family), model_of(family)
        if merging:
            apply_token_merging(model, settings(family))
            apply_token_merging(compiled, settings(family))
        compiled.compile_repeated_blocks(fullgraph=True, backend=backend)
        expected, got = [], []
        for step in range(2):
            guided = family.inputs(2, 8, 8)
            guided["timestep"] = guided["timestep"] - step
            text = guided["encoder_hidden_states"]
            for words in (text, text.flip(1)):
                arguments = {**guided, "encoder_hidden_states": words}  # the same sample, as in pipelines
                expected.append(call(model, arguments))
                got.append(call(compiled, arguments))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if merging:  # else they would leave PyTorch's attention as it was whenever they are collected
            remove_token_merging(model)
            remove_token_merging(compiled)
        return graphs, got, expected

    graphs, got, expected = compiled_steps(merging=True, backend=backend)
    for result, plain in zip(got, expected, strict=True):
        # Fused kernels round differently, within some units in the last place of float32 for each operation.
        assert_close(result, plain, rtol=1e-4, atol=1e-5 * plain.abs().max().item())
    # Graphs are counted before a backend gets them, and of the plain model only their number matters.
    assert graphs == compiled_steps(merging=False, backend="eager")[0] > 0


@pytest.mark.parametrize("name", REGIONAL)
@torch.no_grad()
def test_a_block_that_pytorch_runs_without_its_graph_is_in_its_stack_as_well(name):
    """PyTorch does so after too many recompilations, and where compiling is switched off."""
    family = FAMILIES[name]

    def results(compiles: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model, arguments = model_of(family), family.inputs(2, 8, 8)
        patch = apply_token_merging(model, STACK)
        if compiles:
            model.compile_repeated_blocks(backend="eager")
        made = []
        for step in range(6):
            patch.at_step(step, 6)
            made.append(call(model, {**arguments, "timestep": arguments["timestep"] - step}))
        patch.remove()
        return made

    expected = results(compiles=False)
    with torch.compiler.set_stance("force_eager"):
        assert_close(results(compiles=True), expected, rtol=0, atol=0)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_close(results(compiles=True), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONAL)
def test_a_whole_model_compiles_into_one_graph(name):
    family = FAMILIES[name]
    torch._dynamo.reset()
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, HALF)
    expected = call(model, arguments)  # FLUX reads its grid from values, which a graph does not have
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(call(compiled, arguments), expected)


def test_a_whole_flux_that_was_never_called_says_what_to_do():
    family = FAMILIES["FluxTransformer2DModel"]
    torch._dynamo.reset()
    model = model_of(family)
    apply_token_merging(model, HALF)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises((UnsupportedModelError, torch._dynamo.exc.Unsupported), match=r"patch\.at_size"):
        call(compiled, family.inputs(2, 6, 8))


READS_POSITIONS = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "ChromaTransformer2DModel")


@pytest.mark.slow
@pytest.mark.parametrize("name", READS_POSITIONS)
@torch.no_grad()
def test_a_whole_model_that_is_told_its_size_compiles_before_its_first_call(name):
    family = FAMILIES[name]
    torch._dynamo.reset()
    model, arguments = model_of(family), family.inputs(2, 6, 8)
    handle = apply_token_merging(model, HALF)
    handle.at_size(12, 16)  # a token is two by two latents
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        results = [call(compiled, arguments) for _ in range(2)]
    expected = call(model, arguments)
    assert all(torch.equal(result, expected) for result in results)


SIZES = [(4, 4), (4, 8), (8, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("name", REGIONAL)
@torch.no_grad()
def test_a_whole_model_compiled_for_all_sizes_has_one_graph(name):
    """Like the plain models in diffusers' ``test_compile_on_different_shapes``, with the same sizes."""
    family = FAMILIES[name]
    torch._dynamo.reset()
    model = model_of(family)
    handle = apply_token_merging(model, HALF)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    # Without this, torch.compile would assume that sides which are equal at first stay equal.
    apart = torch.fx.experimental._config.patch(use_duck_shape=False)
    with apart, torch._dynamo.config.patch(error_on_recompile=True):
        for rows, columns in SIZES:
            if name == "FluxTransformer2DModel":
                handle.at_size(2 * rows, 2 * columns)  # positions have no values yet
            arguments = family.inputs(1, rows, columns)
            assert torch.equal(call(compiled, arguments), call(model, arguments))
