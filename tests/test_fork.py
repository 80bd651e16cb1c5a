"""A process that is forked after patching, as servers fork their workers, draws what its parent draws."""

import dataclasses
import multiprocessing
from collections.abc import Callable

import pytest
import torch
import vits

from tokenmerge import ViTConfig, apply_token_merging

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread():
    """OpenMP's threads do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_children(call: Callable[[int], torch.Tensor], seeds: range) -> list[torch.Tensor]:
    """The results of one forked process for each seed, which run at the same time."""
    context = multiprocessing.get_context("fork")
    ends = []
    for seed in seeds:
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=lambda s=seed, end=there: end.send(call(s).numpy()), daemon=True)
        child.start()
        ends.append((child, here))
    results = []
    for child, here in ends:
        assert here.poll(120), "the child hangs"
        results.append(torch.from_numpy(here.recv()))
        child.join(120)
        assert child.exitcode == 0
    return results


@pytest.mark.parametrize("drawn_before", [False, True])
def test_a_patched_pipeline_draws_the_same_pictures_in_forked_processes(pipe, drawn_before):
    config = apply_token_merging(pipe, speedup=2.0).config
    apply_token_merging(pipe, dataclasses.replace(config, min_tokens=16))  # so that its few tokens merge

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        settings = {"num_inference_steps": 10, "height": 32, "width": 32, "output_type": "latent"}
        return pipe("a cat", generator=generator, **settings).images

    if drawn_before:
        expected = [draw(seed) for seed in range(2)]
    pictures = in_children(draw, range(2))
    if not drawn_before:
        expected = [draw(seed) for seed in range(2)]
    assert all(map(torch.equal, pictures, expected))


@pytest.mark.parametrize("make", [vits.vit, vits.timm])
def test_a_patched_vision_transformer_gives_the_same_tokens_in_forked_processes(make):
    model = make()
    apply_token_merging(model, ViTConfig(r=6))

    @torch.no_grad()
    def tokens(seed: int) -> torch.Tensor:
        return vits.tokens(model, vits.pictures(seed + 1))

    assert all(map(torch.equal, in_children(tokens, range(2)), map(tokens, range(2))))
