"""Where proportional attention meets kernels that take no mask, and that it leaves them as they were."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import types
from typing import Any

import pytest
import torch
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from diffusers.models import attention_processor
from tests import hosts
from tests.kernels import REGISTRY, attention, backend, flash
from tests.models.family import seeded
from tests.models.test_every_family import call, model_of, settings
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.testing import assert_close

from tokenmerge import ToMeConfig, apply_token_merging, remove_token_merging
from tokenmerge.errors import UnsupportedModelError
from tokenmerge.ops.sized_attention import Bias
from tokenmerge.runtime.blocks import proportional_attention

HALF = ToMeConfig(ratio=0.5, proportional=True)
FLUX = FAMILIES["FluxTransformer2DModel"]


@pytest.fixture(autouse=True)
def no_other_model() -> None:
    """Models of other tests that nobody restored are gone, and their kernels with them."""
    gc.collect()


def close(result: Tensor, expected: Tensor) -> None:
    """Equal but for the order of sums, as in the laws of families."""
    assert_close(result, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def with_mask(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with backend("native"):
        return call(model, arguments)


def flux_with_heads_of(d: int) -> nn.Module:
    """A tiny FLUX whose rotary positions fill heads of d channels, as FLUX.1 has them with 128."""
    from diffusers import FluxTransformer2DModel

    config = dict(model_of(FLUX).config)
    changes = {"attention_head_dim": d, "num_attention_heads": 2, "axes_dims_rope": (d - 8, 4, 4)}
    torch.manual_seed(0)
    return seeded(FluxTransformer2DModel.from_config({**config, **changes}))


@pytest.fixture
def no_leftovers():
    """Collect the models that other tests have patched and left.

    The kernels of one that was collected while a graph was traced stay until the next model goes.
    """
    gc.collect()
    proportional_attention._leave_if_unneeded()


@pytest.mark.usefixtures("no_leftovers")
def test_kernels_are_those_of_before_once_no_model_needs_them():
    before = dict(REGISTRY._backends)
    plain, one, other = model_of(FLUX), model_of(FLUX), model_of(FLUX)
    apply_token_merging(plain, ToMeConfig(ratio=0.5))
    assert REGISTRY._backends == before
    patches = [apply_token_merging(model, HALF) for model in (one, other)]
    assert REGISTRY._backends != before
    patches[0].remove()
    assert REGISTRY._backends != before
    with backend("flash"):
        call(other, FLUX.inputs(1, 8, 8))
    patches[1].remove()
    assert REGISTRY._backends == before


@pytest.mark.usefixtures("no_leftovers")
def test_pytorch_s_attention_is_that_of_before_once_no_model_needs_it():
    before, plain = F.scaled_dot_product_attention, apply_token_merging(model_of(FLUX), ToMeConfig(ratio=0.5))
    assert F.scaled_dot_product_attention is before
    patches = [apply_token_merging(model_of(FLUX), HALF) for _ in range(2)]
    assert F.scaled_dot_product_attention is not before
    patches[0].remove()
    assert F.scaled_dot_product_attention is not before
    patches[1].remove()
    assert F.scaled_dot_product_attention is before
    plain.remove()


@pytest.mark.usefixtures("no_leftovers")
def test_kernels_are_those_of_before_once_a_model_is_gone_that_nobody_restored():
    before, model = F.scaled_dot_product_attention, model_of(FLUX)
    backends = dict(REGISTRY._backends)
    apply_token_merging(model, HALF)
    assert F.scaled_dot_product_attention is not before
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is before
    assert REGISTRY._backends == backends


@pytest.mark.parametrize("scope", ["layers", "block"])
def test_nothing_but_attention_is_intercepted_in_a_merged_block(scope):
    """A mode would be called for each of the 65 functions of a block."""
    model, seen = model_of(FLUX), []

    def note(module: nn.Module, args: Any) -> None:
        seen.append(_get_current_function_mode_stack())

    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        block.attn.to_q.register_forward_pre_hook(note)
    apply_token_merging(model, settings(FLUX, scope=scope, proportional=True))
    call(model, FLUX.inputs(1, 8, 8))
    assert seen == [[]] * 4


class Attentions(TorchFunctionMode):
    """Notes the masks of PyTorch's attention, which it finds as diffusers' skipping of layers does."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor | None] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            self.masks.append(kwargs.get("attn_mask"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_modes_of_other_people_see_each_attention_once(compiled):
    def masks(model: nn.Module) -> list[Tensor | None]:
        with Attentions() as outer, Attentions() as inner, torch.no_grad():
            call(model, FLUX.inputs(1, 8, 8))
        assert len(outer.masks) == len(inner.masks)
        return outer.masks

    assert masks(model_of(FLUX)) == [None] * 4
    model = model_of(FLUX)
    apply_token_merging(model, settings(FLUX, scope="block", proportional=True))
    merging = torch.compile(model, backend="eager") if compiled else model
    assert [mask is None for mask in masks(merging)] == [False] * 4


def test_skipped_attention_scores_of_diffusers_are_still_skipped():
    """Its perturbed guidance takes the values themselves, by a mode."""
    values = torch.randn(1, 2, 4, 8)
    patch = apply_token_merging(model_of(FLUX), HALF)
    with AttentionScoreSkipFunctionMode():
        assert F.scaled_dot_product_attention(values * 2, values * 3, values) is values
    patch.remove()


BY_NAME = """
from torch.nn.functional import scaled_dot_product_attention

class Processor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = (
            tokens.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for tokens in (attn.to_q(hidden_states), attn.to_k(source), attn.to_v(source))
        )
        return attn.to_out[0](scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
"""


def test_a_host_that_imported_pytorch_s_attention_by_name(monkeypatch):
    """It looks it up in its own module, which may be loaded after the model was patched."""
    unet = hosts.unet()
    patch = apply_token_merging(unet, HALF)
    expected = hosts.call(unet, **hosts.inputs())
    host = types.ModuleType("a_host_that_imports_by_name")
    exec(BY_NAME, vars(host))
    host.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention  # as imported before
    monkeypatch.setitem(sys.modules, host.__name__, host)
    unet.set_attn_processor(host.Processor())
    close(hosts.call(unet, **hosts.inputs()), expected)
    patch.remove()
    assert host.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_a_dense_model_beside_calls_the_kernel_with_what_it_has():
    shapes = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        shapes.append(query.shape[-1])
        return flash(query, key, value, scale=scale)

    merging, dense, arguments = model_of(FLUX), model_of(FLUX), FLUX.inputs(1, 8, 8)
    apply_token_merging(merging, HALF)
    with backend("flash", kernel):
        expected = call(dense, arguments)
        call(merging, arguments)
        assert shapes == [8] * 4 + [16] * 4
        assert torch.equal(call(dense, arguments), expected)


def test_a_kernel_that_another_thread_calls_meanwhile_is_left_alone():
    """The call of a patched model waits in its kernel while another thread calls the same kernel."""
    seen, arguments = [], FLUX.inputs(1, 8, 8)
    dense, merging = model_of(FLUX), model_of(FLUX)
    apply_token_merging(merging, HALF)

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        seen.append(query.shape[-1])
        if len(seen) == 1:
            other = threading.Thread(target=call, args=(dense, arguments))
            other.start()
            other.join()
        return flash(query, key, value, scale=scale)

    with backend("flash", kernel):
        call(merging, arguments)
    assert seen == [16, *[8] * 4, *[16] * 3]


def test_a_copy_keeps_its_kernels_when_the_original_is_restored():
    model, arguments = model_of(FLUX), FLUX.inputs(2, 8, 8)
    patch = apply_token_merging(model, HALF)
    expected = with_mask(model, arguments)
    copied = copy.deepcopy(model)
    patch.remove()
    with backend("flash"):
        close(call(copied, arguments), expected)


def test_a_kernel_that_raises_leaves_nothing_behind():
    model, arguments = model_of(FLUX), FLUX.inputs(2, 8, 8)
    patch = apply_token_merging(model, HALF)

    def out_of_memory(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        raise MemoryError

    with backend("flash", out_of_memory), pytest.raises(MemoryError):
        call(model, arguments)
    assert proportional_attention._of_thread.value.attention is None
    patch.remove()


@pytest.mark.parametrize(
    ("name", "d", "sizes"),
    [
        ("flash", 40, [48]),
        ("flash", 128, [136]),
        ("sage", 40, [48]),
        ("sage", 64, [72]),
        ("sage", 128, [128, 128]),
        ("sage_blackwell_hub", 64, [64, 64]),
        ("_native_xla", 64, [64, 64]),
    ],
)
def test_a_kernel_is_called_with_heads_that_it_takes(name, d, sizes):
    """Where it has no more room, twice: see :func:`tokenmerge.ops.sized_attention.attend_by_values`."""
    seen: list[int] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        seen.append(query.shape[-1])
        return flash(query, key, value, scale=scale)

    def without_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return kernel(query, key, value)

    model, arguments = flux_with_heads_of(d), FLUX.inputs(1, 8, 8)
    apply_token_merging(model, HALF)
    expected = with_mask(model, arguments)
    with backend(name, without_scale if name == "_native_xla" else kernel):
        close(call(model, arguments), expected)
    assert seen == sizes * 4


def test_xformers_of_a_unet(monkeypatch):
    """Its processor folds heads into the batch, and calls xFormers itself."""
    calls = []

    def memory_efficient_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None = None,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: object = None,
    ) -> Tensor:
        assert attn_bias is None
        calls.append(query.shape[-1])
        query, key, value = (tensor.unsqueeze(2) for tensor in (query, key, value))
        return attention(query, key, value, None, scale).squeeze(2)

    xformers = types.ModuleType("xformers")
    xformers.ops = types.ModuleType("xformers.ops")
    xformers.ops.memory_efficient_attention = memory_efficient_attention
    monkeypatch.setitem(sys.modules, "xformers", xformers)
    monkeypatch.setitem(sys.modules, "xformers.ops", xformers.ops)
    monkeypatch.setattr(attention_processor, "xformers", xformers)

    unet = hosts.unet()
    patch = apply_token_merging(unet, HALF)
    expected = hosts.call(unet, **hosts.inputs())
    unet.set_attn_processor(attention_processor.XFormersAttnProcessor())
    close(hosts.call(unet, **hosts.inputs()), expected)
    assert len(set(calls)) == 2  # merged self-attention has longer heads than the rest
    patch.remove()
    assert xformers.ops.memory_efficient_attention is memory_efficient_attention


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("scope", ["layers", "block"])
def test_an_ip_adapter_of_flux_attends_to_its_own_keys_as_before(scope, dtype):
    """It attends with the queries of the image, which must be those of before, to keys that count once."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    class Embeddings(nn.Module):
        def forward(self, embeddings: list[Tensor]) -> list[Tensor]:
            return embeddings

    model = model_of(FLUX)
    model.encoder_hid_proj = Embeddings()
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(32, 32, num_tokens=(4,), scale=1.0))
    seeded(model).to(dtype)
    images = torch.randn(2, 80, 32, generator=torch.Generator().manual_seed(0))  # more keys than the image
    images = images.to(dtype)
    given = {name: value.to(dtype) for name, value in FLUX.inputs(2, 8, 8).items()}
    arguments = {**given, "joint_attention_kwargs": {"ip_adapter_image_embeds": [images]}}

    def fresh() -> dict[str, Any]:  # the model adds to the dictionary
        return {**arguments, "joint_attention_kwargs": dict(arguments["joint_attention_kwargs"])}

    apply_token_merging(model, settings(FLUX, scope=scope, proportional=True))
    expected = with_mask(model, fresh())
    with backend("flash"):
        close_in(dtype, call(model, fresh()), expected)


def close_in(dtype: torch.dtype, result: Tensor, expected: Tensor) -> None:
    """Each of 4 blocks rounds some ten times to the dtype, in another order of sums."""
    assert result.dtype == dtype
    tolerance = 40 * torch.finfo(dtype).eps
    assert_close(result, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@DTYPES
@pytest.mark.parametrize(
    ("name", "kernel"), [("FluxTransformer2DModel", "flash"), ("QwenImageTransformer2DModel", "flash_varlen")]
)
def test_the_dtype_of_the_model_is_kept(name, kernel, dtype):
    """Qwen-Image gives a mask of its padding."""
    family = FAMILIES[name]
    model, arguments = model_of(family).to(dtype), family.inputs(2, 8, 8)
    arguments = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in arguments.items()
    }
    apply_token_merging(model, HALF)
    expected = with_mask(model, arguments)
    with backend(kernel):
        close_in(dtype, call(model, arguments), expected)


REGIONAL = ("FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel")


BACKENDS = pytest.mark.parametrize("by", ["native", "flash"])


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("name", REGIONAL)
@torch.no_grad()
def test_compiled_by_block_there_is_one_graph_for_each_kind(name, by):
    family = FAMILIES[name]

    def graphs(merging: bool) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, arguments = model_of(family), family.inputs(2, 8, 8)
        arguments.pop("encoder_hidden_states_mask", None)
        if merging:
            apply_token_merging(model, settings(family, proportional=True))
        expected = call(model, arguments)
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert torch.equal(call(model, arguments), expected)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    with backend(by):
        assert graphs(merging=True) == graphs(merging=False) > 0


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("name", REGIONAL)
@torch.no_grad()
def test_a_whole_model_compiles_into_one_graph(name, by):
    family = FAMILIES[name]
    torch._dynamo.reset()
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    arguments.pop("encoder_hidden_states_mask", None)
    apply_token_merging(model, settings(family, proportional=True))
    with backend(by):
        expected = call(model, arguments)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(call(compiled, arguments), expected)


@pytest.mark.parametrize("way", Bias)
@pytest.mark.parametrize(
    "name",
    [
        "UNet2DConditionModel",
        "FluxTransformer2DModel",
        "QwenImageTransformer2DModel",
        "WanTransformer3DModel",
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_each_bias_of_pytorch_s_attention_gives_the_same(monkeypatch, name, way):
    """Qwen-Image gives a mask of its own."""
    chosen = []

    def choose(device: str, dtype: torch.dtype, d: int, keys: int, has_mask: bool) -> Bias:
        chosen.append(Bias.MASK if has_mask else way)
        return chosen[-1]

    family = FAMILIES[name]
    model, arguments = model_of(family), family.inputs(2, 8, 8)
    apply_token_merging(model, settings(family, proportional=True))
    expected = call(model, arguments)
    monkeypatch.setattr(proportional_attention, "choose_bias", choose)
    close(call(model, arguments), expected)
    assert chosen == [Bias.MASK if name.startswith("Qwen") else way] * len(chosen) != []


def test_attention_by_matrix_products_is_still_refused():
    unet = hosts.unet()
    apply_token_merging(unet, HALF)
    unet.set_attn_processor(attention_processor.AttnProcessor())
    with pytest.raises(
        UnsupportedModelError, match="back-end of diffusers or xFormers, and this one"
    ) as error:
        hosts.call(unet, **hosts.inputs())
    assert len(str(error.value)) < 400


def test_a_model_that_is_collected_while_a_graph_is_traced_changes_nothing_in_it():
    """The guards of the graph look at the function that stood there when its tracing began."""
    model = hosts.unet()
    apply_token_merging(model, ToMeConfig(ratio=0.5, proportional=True))
    wrapped = F.scaled_dot_product_attention
    traced = []

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal model
        model = None  # the last reference to it
        gc.collect()
        traced.append(F.scaled_dot_product_attention)
        return graph.forward

    x = torch.randn(1, 2, 4, 8)
    assert_close(torch.compile(attend, backend=backend)(x), attend(x))
    assert traced == [wrapped]
    apply_token_merging(another := hosts.unet(), ToMeConfig(ratio=0.5, proportional=True))
    remove_token_merging(another)
    assert F.scaled_dot_product_attention is not wrapped
