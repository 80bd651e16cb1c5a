"""Token Merging beside ComfyUI's own nodes that patch the same places, in both orders."""

from __future__ import annotations

import importlib

import comfy_hosts as hosts  # first: it brings ComfyUI's code
import pytest
import torch
from test_transformers import IMAGE, MODELS, Patcher, call, flux, settings_of

from tokenmerge import Correction, StepReuse, ToMeConfig
from tokenmerge.integrations.comfyui import settings as node_settings
from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.nodes import TokenMerging
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.plans import pays_from

LATENT = {"samples": torch.zeros(1, 4, 32, 32)}
SHRINK = "PatchModelAddDownscale", 1, 2.0, 0.0, 0.35, True, "bicubic", "bicubic"
# Two and two tiles of 16 × 16 latent positions, since a swap size of 1 draws nothing.
HYPERTILE = "HyperTile", 128, 1, 0, False
CACHES = {
    "EasyCache": ("EasyCacheNode", 0.2, 0.15, 0.95, False),
    "LazyCache": ("LazyCacheNode", 0.2, 0.15, 0.95, False),
}
NODES = {
    "HyperTile": ("nodes_hypertile", *HYPERTILE),
    "TomePatchModel": ("nodes_tomesd", "TomePatchModel", 0.3),
    "PerturbedAttentionGuidance": ("nodes_pag", "PerturbedAttentionGuidance", 3.0),
    "SelfAttentionGuidance": ("nodes_sag", "SelfAttentionGuidance", 0.5, 2.0),
    "FreeU": ("nodes_freelunch", "FreeU", 1.1, 1.2, 0.9, 0.2),
    "PatchModelAddDownscale": ("nodes_model_downscale", *SHRINK),
    **{name: ("nodes_easycache", *node) for name, node in CACHES.items()},
}


@pytest.fixture(scope="module")
def model():
    return hosts.unet()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A device on which merging saves time on every grid; here a tiny one need not."""
    monkeypatch.setattr(node_settings, "fewest_tokens", lambda *_: pays_from(4))


def other(model, name):
    """A model after another node of ComfyUI."""
    file, node, *inputs = NODES[name]
    made = getattr(importlib.import_module(f"comfy_extras.{file}"), node)
    done = made().patch(model, *inputs) if name == "FreeU" else made.execute(model, *inputs)
    return (done if isinstance(done, tuple) else done.result)[0]


def merging(model, method="tomesd", ratio=0.5, **more):
    return TokenMerging().merge(model, LATENT, method=method, ratio=ratio, **more)


def sample(model, steps=10, **more):
    return hosts.sample(model, size=32, steps=steps, **more)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "tokenmerge"]


@pytest.mark.parametrize("method", ["toma", "auto"])
@pytest.mark.parametrize("name", NODES)
def test_the_order_of_the_nodes_does_not_matter(model, name, method):
    before = sample(merging(other(model, name), method)[0])
    assert torch.equal(sample(other(merging(model, method)[0], name)), before)
    assert before.isfinite().all()


@pytest.mark.parametrize("name", ["HyperTile", "TomePatchModel"])
@pytest.mark.parametrize("first", [True, False])
def test_where_another_node_regroups_tokens_its_result_stands_and_the_log_says_so(
    model, name, first, caplog, monkeypatch
):
    alone = sample(other(model, name), steps=3)
    clone = merging(other(model, name))[0] if first else other(merging(model)[0], name)
    caplog.clear()
    assert torch.equal(sample(clone, steps=3), alone)
    (line,) = said(caplog)
    assert line == (
        "Token Merging: Self-attention does not merge where its tokens are regrouped by "
        f"{name}; keep one of the nodes."
    )


def test_levels_that_another_node_leaves_alone_merge(model):
    """HyperTile's depth of 0 is the finest level."""
    alone = sample(other(model, "HyperTile"), steps=3)
    deeper = merging(other(model, "HyperTile"), levels="2")[0]
    assert not torch.equal(sample(deeper, steps=3), alone)


def test_the_text_says_who_may_regroup_tokens(model):
    text = merging(other(model, "HyperTile"))[1]
    assert "level 1: 3 blocks merged, 1024 → 512 tokens, unless regrouped by HyperTile" in text
    assert "does not merge where its tokens are regrouped by HyperTile; keep one of the nodes" in text
    assert "HyperTile" not in merging(model)[1]
    # A second node of this kind is no other node.
    assert "regrouped" not in merging(merging(model)[0])[1]


@pytest.mark.parametrize("first", [True, False])
def test_patches_of_others_get_all_tokens(model, first):
    seen = set()

    def of_attention(n, *more):
        seen.add((n.shape[1] in (1024, 256), more[-1]["block"][0]))
        return (n, *more[:-1]) if len(more) > 1 else n

    def with_patches(given):
        clone = given.clone()
        for name in ("attn1_patch", "attn1_output_patch", "attn2_patch", "attn2_output_patch"):
            clone.set_model_patch(of_attention, name)
        return clone

    plain = sample(merging(model, "toma")[0], steps=1)
    clone = merging(with_patches(model), "toma")[0] if first else with_patches(merging(model, "toma")[0])
    assert torch.equal(sample(clone, steps=1), plain)
    assert seen == {(True, way) for way in ("input", "middle", "output")}


def test_cross_attention_that_another_node_replaces_gets_all_queries(model):
    """IPAdapter finds the image's sides by the number of queries. toma merges cross-attention too."""
    seen, clone = set(), model.clone()

    def replaced(q, k, v, options):
        seen.add(q.shape[1])
        return q

    for block in (("input", 1), ("output", 2), ("output", 3)):
        clone.set_model_attn2_replace(replaced, *block)
    sample(merging(clone, "toma")[0], steps=1)
    assert seen == {1024}


@pytest.mark.parametrize("name", CACHES)
def test_beside_a_node_that_skips_whole_steps_no_parts_are_skipped(model, name, caplog, key_numbers):
    """The steps that it leaves run everything, as it believes, and the log and the text say so."""
    sample(other(model, name))
    runs = len(key_numbers)
    clone, text = merging(other(model, name), "auto")
    assert f"No part of the model is skipped, since {name} skips whole steps" in text
    assert "of 20 steps," not in text.lower()
    assert "All steps run" not in text
    key_numbers.clear()
    caplog.clear()
    sample(clone)
    assert len(key_numbers) == runs < 14 * 10
    assert [line for line in said(caplog) if name in line] == said(caplog)
    assert len(said(caplog)) == 1


@pytest.fixture
def key_numbers(monkeypatch):
    from comfy.ldm.modules.attention import CrossAttention

    seen, forward = [], CrossAttention.forward
    monkeypatch.setattr(CrossAttention, "forward", lambda *a, **k: seen.append(1) or forward(*a, **k))
    return seen


@pytest.mark.parametrize("first", [True, False])
def test_a_node_that_reads_attention_reads_it_in_every_step(model, first, monkeypatch, caplog):
    read, sag = [], importlib.import_module("comfy_extras.nodes_sag")
    attention = sag.attention_basic_with_sim
    monkeypatch.setattr(sag, "attention_basic_with_sim", lambda *a, **k: read.append(1) or attention(*a, **k))
    name = "SelfAttentionGuidance"
    clone = merging(other(model, name), "auto")[0] if first else other(merging(model, "auto")[0], name)
    caplog.clear()
    sample(clone)
    assert len(read) == 10
    assert said(caplog) == [
        f"Token Merging: No part of the model is skipped, since {name} may read self-attention in "
        "every step.",
        f"Token Merging: Self-attention that {name} replaced stays dense.",
    ]


def test_corrections_of_another_size_are_not_used(model):
    """A node that scales the deep levels changes their size during a sampling."""
    shrunk = other(model, "PatchModelAddDownscale")
    reuse = StepReuse(every=2, shallow_every=2)
    config = ToMeConfig(ratio=0.3, max_downsample=8, correction=Correction(every=2), reuse=reuse)
    clone = patched(shrunk, Settings(config, find_target(shrunk)))
    assert sample(clone, steps=12).isfinite().all()


@pytest.mark.parametrize("method", ["tomesd", "auto"])
def test_a_wrapper_around_the_model(model, method):
    calls, clone = [], model.clone()
    clone.set_model_unet_function_wrapper(
        lambda apply, given: calls.append(1) or apply(given["input"], given["timestep"], **given["c"])
    )
    assert torch.equal(sample(merging(clone, method)[0]), sample(merging(model, method)[0]))
    assert len(calls) == 10


def test_blocks_of_a_transformer_that_are_replaced_later_are_named():
    model, settings = Patcher(flux()), None
    settings = settings_of(model, ratio=0.5)

    def of_another(arguments, extra):
        return extra["original_block"](arguments)

    before = model.clone()
    before.set_model_patch_replace(of_another, "dit", "double_block", 0)
    clone = patched(before, settings)
    assert settings.beside(clone.model_options["transformer_options"]).notes == ()
    assert not torch.equal(
        call(clone, IMAGE, MODELS["flux"][2], settings), call(model, IMAGE, MODELS["flux"][2])
    )
    clone.set_model_patch_replace(of_another, "dit", "double_block", 0)
    (note,) = settings.beside(clone.model_options["transformer_options"]).notes
    assert "test_blocks_of_a_transformer" in note
    assert "place Token Merging after it" in note
