"""Other software may replace a method of a host's class at any time; merged modules call the one in place."""

import functools
from collections.abc import Callable, Iterator

import hosts
import pytest
import tomesd
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from tokenmerge import ToMeConfig, apply_patch, apply_token_merging, remove_patch, token_merging

CONFIG = ToMeConfig(ratio=0.5, seed=None)
# All attention merges, so that no layer that stays dense shows the replaced method.
EVERYWHERE = {"max_downsample": 2, "merge_crossattn": True}


def tenth(attention: nn.Module, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Attention as another implementation, told from the original by its result."""
    return x / 10


@pytest.fixture
def replace() -> Iterator[Callable[[type, str, Callable], None]]:
    """Replaces a method of a class until the test ends."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch.setattr


@torch.no_grad()
def compvis(model: nn.Module) -> Tensor:
    return model.model.diffusion_model(*hosts.compvis_inputs())


def test_attention_replaced_behind_patching_is_called_and_so_is_the_original_when_it_is_back(replace):
    unet = hosts.unet()
    original = Attention.forward
    with token_merging(unet, ToMeConfig(ratio=0.5, seed=None, **EVERYWHERE)):
        merged = hosts.call(unet, **hosts.inputs())
        replace(Attention, "forward", tenth)
        replaced = hosts.call(unet, **hosts.inputs())
        Attention.forward = original
        assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)
    replace(Attention, "forward", tenth)
    with token_merging(unet, ToMeConfig(ratio=0.5, seed=None, **EVERYWHERE)):
        assert torch.equal(hosts.call(unet, **hosts.inputs()), replaced)
    assert not torch.allclose(replaced, merged)


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize(
    ("name", "method"), [("CrossAttention", "forward"), ("BasicTransformerBlock", "_forward")]
)
def test_what_a_web_ui_replaces_has_the_effect_that_it_has_with_tomesd(replace, before, name, method):
    """Of a replaced method of the blocks, tomesd knows nothing: it puts its own in its place."""
    replaced = getattr(hosts, name)
    original, calls = getattr(replaced, method), []

    @functools.wraps(original)
    def optimised(self: nn.Module, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        calls.append(x.shape[1])
        return original(self, 0.9 * x, *args, **kwargs)

    model = hosts.LatentDiffusion()
    apply_patch(model, use_rand=False, **EVERYWHERE)  # the class has been swapped, and has seen `original`
    plain = compvis(model)
    remove_patch(model)
    if before:
        replace(replaced, method, optimised)
    apply_patch(model, use_rand=False, **EVERYWHERE)
    replace(replaced, method, optimised)
    ours = compvis(model)
    assert calls
    assert not torch.allclose(ours, plain)
    remove_patch(model)
    if method == "forward":
        tomesd.apply_patch(model, use_rand=False, **EVERYWHERE)
        theirs = compvis(model)
        tomesd.remove_patch(model)
        # As in tests/test_compat.py.
        assert ((ours - theirs).norm() / theirs.norm()).item() < 1e-5


def test_replaced_attention_gets_merged_tokens(replace):
    unet, seen = hosts.unet(), []

    def sees(self: nn.Module, tokens: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        seen.append((encoder_hidden_states is None, tokens.shape[1]))
        return tokens

    apply_token_merging(unet, CONFIG)
    replace(
        Attention,
        "forward",
        lambda self, x, encoder_hidden_states=None, **_: sees(self, x, encoder_hidden_states),
    )
    hosts.call(unet, **hosts.inputs())
    assert {n for is_self_attention, n in seen if is_self_attention} == {128, 64}  # levels 1 and 2


def test_arguments_go_by_the_names_of_the_method_in_place(replace):
    """The mask is cut as the tokens are, wherever the replaced method takes it."""

    def takes_the_mask_second(
        self: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> Tensor:
        seen.append(attention_mask)
        return hidden_states

    def block(self: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states + self.attn1(hidden_states, mask)

    seen: list[Tensor | None] = []
    unet = hosts.unet()
    mask = torch.arange(256.0).expand(2, 1, 256)
    blocks = unet.down_blocks[0].attentions[0].transformer_blocks
    patch = apply_token_merging(unet, CONFIG)
    replace(type(blocks[0]).__bases__[0], "forward", block)
    replace(Attention, "forward", takes_the_mask_second)
    with patch.record() as plans, torch.no_grad():
        unet.down_blocks[0].attentions[0](torch.randn(2, 32, 16, 16), return_dict=False)
    (recorded,) = plans.values()
    assert len(seen) == 1
    assert torch.equal(seen[0][:, 0], recorded.plan.kept().to(mask.dtype))


def test_a_wrapper_that_passes_on_whatever_it_gets_takes_the_names_of_what_was_there(replace):
    unet = hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.5, merge_mlp=True))
    merged = hosts.call(unet, **hosts.inputs())
    original = FeedForward.forward
    replace(FeedForward, "forward", lambda *args: original(*args))
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)


@pytest.mark.slow
@pytest.mark.parametrize("by_block", [True, False])
def test_compiled_it_is_one_graph_for_all_blocks_and_another_for_the_replaced_method(replace, by_block):
    torch._dynamo.reset()
    compiled: list[nn.Module] = []
    unet = hosts.unet(
        block_out_channels=(32,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        norm_num_groups=4,
    )
    apply_token_merging(unet, CONFIG)
    model: nn.Module = unet
    if by_block:
        unet.compile_repeated_blocks(fullgraph=True, backend=hosts.counting(compiled))
    else:
        model = torch.compile(unet, fullgraph=True, backend=hosts.counting(compiled))
    first = hosts.call(model, **hosts.inputs())
    graphs = len(compiled)
    replace(Attention, "forward", tenth)
    replaced = hosts.call(model, **hosts.inputs())
    assert not torch.allclose(replaced, first)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(hosts.call(unet, **hosts.inputs()), replaced)
    hosts.call(model, **hosts.inputs())
    assert graphs == (1 if by_block else 2)  # of a whole model, torch compiles the hook of its call by itself
    assert len(compiled) == graphs + 1


def test_a_reference_to_the_method_from_before_removal_does_what_the_class_does_now(replace):
    unet = hosts.unet()
    attention = unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1
    patch = apply_token_merging(unet, CONFIG)
    stale = attention.forward
    patch.remove()
    x = torch.randn(2, 256, 32)
    assert torch.equal(stale(x), attention(x))
    replace(Attention, "forward", tenth)
    assert torch.equal(stale(x), x / 10)
