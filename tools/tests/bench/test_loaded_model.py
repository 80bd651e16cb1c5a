from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tokenmerge import ToMeConfig
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge_tools.bench.loaded_model import (
    GEOMETRIES,
    build_denoiser,
    example_inputs,
    find_geometry,
    load_model,
)
from tokenmerge_tools.failures import Failure, is_out_of_memory
from tokenmerge_tools.pipelines.loading import shared_copy
from tokenmerge_tools.variants import contexts

CPU = torch.device("cpu")
LATENT, SAMPLES = (8, 16), 2
# Millions of parameters of the published models.
PARAMETERS = {"sd15": 860, "sd21": 866, "sdxl": 2567, "sd3": 2028, "flux": 11901, "wan": 1419}


def tiny() -> nn.Module:
    return build_denoiser(GEOMETRIES["tiny"], torch.float32, CPU, seed=0)


def call(model: Any) -> Tensor:
    args, kwargs = example_inputs(getattr(model, "_orig_mod", model), LATENT, SAMPLES, guided=False, frames=5)
    with torch.no_grad():
        return model(*args, **kwargs)[0]


def state_of(model: nn.Module) -> dict[str, object]:
    return {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_geometries_are_those_of_the_published_models(name: str) -> None:
    with torch.device("meta"):
        import diffusers

        geometry = GEOMETRIES[name]
        model = getattr(diffusers, geometry.denoiser)(**geometry.config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "sd3",
            {
                "num_layers": 1,
                "num_attention_heads": 2,
                "attention_head_dim": 8,
                "caption_projection_dim": 16,
            },
        ),
        (
            "flux",
            {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16},
        ),
        ("wan", {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 16}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_run_dense_and_merged(
    monkeypatch: pytest.MonkeyPatch, name: str, change: dict, dtype: torch.dtype
) -> None:
    import dataclasses

    geometry = GEOMETRIES[name]
    more = {"axes_dims_rope": (4, 6, 6)} if name == "flux" else {}
    small = dataclasses.replace(geometry, config={**geometry.config, **change, **more})
    monkeypatch.setitem(GEOMETRIES, name, small)
    subject = load_model(f"geometry:{name}", dtype, CPU, None, seed=0)
    output = call(subject.denoiser)
    assert output.dtype == dtype
    assert torch.isfinite(output).all()
    assert subject.guided == (name != "flux")
    config = ToMeConfig(ratio=0.5, scope="block")
    model = shared_copy(subject.denoiser)
    with contexts.tokenmerge(model, config):
        merged = call(model)
    assert torch.isfinite(merged).all()
    assert not torch.equal(merged, output)


def test_a_guided_call_has_the_same_samples_twice() -> None:
    subject = load_model("geometry:tiny", torch.float32, CPU, None, seed=0)
    sample = example_inputs(subject.denoiser, LATENT, SAMPLES, guided=True)[0][0]
    assert torch.equal(sample[: len(sample) // 2], sample[len(sample) // 2 :])


def test_inputs_depend_on_the_seed_alone() -> None:
    model = tiny()
    first, again, other = (
        example_inputs(model, LATENT, SAMPLES, seed=seed, guided=False)[0][0] for seed in (1, 1, 2)
    )
    assert first.shape == (2, 4, 8, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.std() > 0.5


def test_random_weights_depend_on_the_seed_alone_and_leave_the_generator() -> None:
    before = torch.random.get_rng_state()
    first, again = (next(tiny().parameters()) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_copy_shares_weights_and_nothing_else() -> None:
    model = tiny()
    copied = shared_copy(model)
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]
    assert not set(map(id, copied.modules())) & set(map(id, model.modules()))


@pytest.mark.parametrize("name", ["geometry:sd9", "geometry:", "geometry:flux@0.5"])
def test_a_geometry_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="model: expected"):
        find_geometry(name)


@pytest.mark.parametrize("name", ["tokenmerge", "tomesd"])
@pytest.mark.parametrize("settings", [{}, {"merge_mlp": True, "merge_crossattn": True, "max_downsample": 2}])
def test_variants_act_and_leave_no_trace(name: str, settings: dict) -> None:
    if name == "tomesd":
        pytest.importorskip("tomesd")
    model, config = tiny(), ToMeConfig(ratio=0.5, **settings)
    before, dense = state_of(model), call(model)
    with getattr(contexts, name)(model, config):
        assert not torch.equal(call(model), dense)
    assert state_of(model) == before
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(call(model), dense)
    with pytest.raises(KeyError), getattr(contexts, name)(model, config):
        raise KeyError
    assert state_of(model) == before


def test_tomesd_that_would_do_nothing_is_refused() -> None:
    pytest.importorskip("tomesd")
    model = nn.Linear(2, 2)
    type(model)  # no block that tomesd supports

    class ModelMixin(nn.Module):
        pass

    with (
        pytest.raises(UnsupportedModelError, match="so it would run dense"),
        contexts.tomesd(ModelMixin(), ToMeConfig()),
    ):
        pass


def test_failures_are_told_apart() -> None:
    assert Failure.of(UnsupportedModelError("no  such\nthing")) == Failure("unavailable", "no such thing")
    assert Failure.of(ValueError("odd")) == Failure("error", "ValueError: odd")
    again = "to measure it again, delete its line from the results"
    assert Failure.of(MemoryError()) == Failure("oom", f"out of memory; {again}")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"))
    for words in ("not enough memory", "can't allocate memory: you tried to allocate"):
        assert is_out_of_memory(RuntimeError(f"[enforce fail] . DefaultCPUAllocator: {words}"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(OSError("out of memory"))
