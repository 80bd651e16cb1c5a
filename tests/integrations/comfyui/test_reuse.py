"""Step reuse: the same weights as in diffusers, and what it does in ComfyUI's own sampling."""

from __future__ import annotations

import comfy_hosts as hosts
import pytest
import torch
from comfy.ldm.modules.diffusionmodules.openaimodel import Downsample
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

import tokenmerge
from tokenmerge import Correction, MergeSharing, StepReuse, ToMeConfig
from tokenmerge.integrations.comfyui.models import find_target
from tokenmerge.integrations.comfyui.patch import patched
from tokenmerge.integrations.comfyui.sampling import KEY, Sampling
from tokenmerge.integrations.comfyui.settings import Settings
from tokenmerge.integrations.comfyui.transformer import finish_run
from tokenmerge_tools import demo

CLASSES = {"emoji-unet": UNet2DConditionModel, "emoji-mmdit": SD3Transformer2DModel}
FOLDERS = {"emoji-unet": "unet", "emoji-mmdit": "transformer"}
WIDTHS = {"emoji-unet": 128, "emoji-mmdit": 160}
BLOCKS = {"scope": "block", "planner": "uniform"}
STACK = {
    "ratio": 0.5,
    "scope": "block",
    "planner": "tiled",
    "features": "model_residual",
    "merge_sharing": MergeSharing(blocks=True),
    "proportional": True,
}


@pytest.fixture(scope="module", params=CLASSES)
def pair(request):
    name = request.param
    theirs = CLASSES[name].from_pretrained(demo.path(name), subfolder=FOLDERS[name]).eval()
    made = hosts.emoji_unet(theirs) if name == "emoji-unet" else hosts.emoji_mmdit(theirs)
    return name, made, theirs


@pytest.mark.parametrize(
    ("only", "settings"),
    [
        ("", {"ratio": 0.0, "reuse": StepReuse(every=3)}),
        ("", {"ratio": 0.5, **BLOCKS, "reuse": StepReuse(every=2)}),
        ("", {"ratio": 0.5, **BLOCKS, "correction": Correction(every=2)}),
        ("mmdit", {"ratio": 0.5, "scope": "block", "correction": Correction(every=2), "proportional": True}),
        ("mmdit", {**STACK, "correction": Correction(every=10)}),
        ("mmdit", {**STACK, "correction": Correction(every=3), "reuse": StepReuse(every=2)}),
        ("unet", {"ratio": 0.5, "planner": "uniform", "reuse": StepReuse(every=3, shallow_every=2)}),
    ],
    ids=str,
)
def test_each_step_is_that_of_the_diffusers_path(pair, only, settings):
    """Planner "uniform" makes the same plan from any features; transformers compare the same features."""
    name, model, theirs = pair
    if only not in name:
        pytest.skip(f"for {only}")
    if "unet" in name:
        settings = {**settings, "scope": "layers"}
    config, steps = ToMeConfig(**settings), 6
    clone, settings = patched(model, given := Settings(config, find_target(model))), given
    sampling = Sampling(settings, [1 - i / steps for i in range(steps + 1)])
    draw = torch.Generator().manual_seed(0)
    start, end = torch.randn(2, 2, 4, 16, 16, generator=draw)
    text, pooled = torch.randn(2, 8, WIDTHS[name], generator=draw), torch.randn(2, 160, generator=draw)
    patch, changed = tokenmerge.apply_token_merging(theirs, config), 0.0
    with torch.inference_mode():
        for i in range(steps):
            x, time = torch.lerp(start, end, i / steps), torch.full((2,), 900.0 - 100 * i)
            sampling.begin_step(1 - i / steps, time, x.shape, True)
            options = {**clone.model_options["transformer_options"], "wrappers": clone.wrappers}
            options[KEY] = sampling
            sampling.begin_call(x.shape, {})
            more = {} if "unet" in name else {"y": pooled}
            network = model.model.diffusion_model
            here = network(x, time, context=text, transformer_options=options, **more)
            finish_run(sampling)
            sampling.end_call()
            patch.at_step(i, steps)
            named = {} if "unet" in name else {"pooled_projections": pooled}
            there = theirs(x, timestep=time, encoder_hidden_states=text, **named).sample
            # float32 over these networks errs by 5e-6, and an extrapolation adds up three such results.
            assert (here - there).abs().max() < 3e-5, i
            dense = network(x, time, context=text, **more)
            changed = max(changed, float((here - dense).abs().max()))
    patch.remove()
    assert changed > 1e-2


@pytest.fixture(scope="module")
def unet():
    # Two blocks on the way up at the finest level, so that it can be cut before the last one.
    return hosts.unet()


def reusing(model, **settings):
    return patched(model, Settings(ToMeConfig(ratio=0.0, reuse=StepReuse(**settings)), find_target(model)))


def counted(module, monkeypatch):
    """A list with one entry for each call of a module."""
    calls, forward = [], module.forward
    monkeypatch.setattr(module, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    return calls


def control_of(network, x, time, text):
    """Random additions of a ControlNet to each block of a UNet. ComfyUI has the first block's at the end."""
    shapes, draw = [], torch.Generator().manual_seed(4)
    note = {"patches": {"input_block_patch": [lambda h, options: shapes.append(h.shape) or h]}}
    network(x, time, context=text, transformer_options=note)
    add = [torch.randn(shape, generator=draw) * 0.3 for shape in shapes]
    return {"input": add[::-1], "middle": [add[-1]], "output": [each * 2 for each in add]}


@pytest.mark.parametrize("shallow", [1, 2])
@pytest.mark.parametrize("controlled", [False, True])
def test_where_nothing_changes_between_steps_nothing_is_lost(unet, shallow, controlled, caplog):
    """Extrapolating equal outputs changes nothing: skipped steps equal full ones, also with a ControlNet."""
    config = ToMeConfig(ratio=0.0, reuse=StepReuse(every=4, shallow_every=shallow))
    clone, settings = patched(unet, given := Settings(config, find_target(unet))), given
    network, sampling = unet.model.diffusion_model, Sampling(settings, [1 - i / 10 for i in range(11)])
    draw = torch.Generator().manual_seed(0)
    x, text = torch.randn(2, 4, 18, 14, generator=draw), torch.randn(2, 7, 24, generator=draw)
    time, skipped, seen = torch.full((2,), 500.0), 0, []

    def note(h, skip, options):
        """Another node's patch, which must not run for skipped blocks."""
        seen.append((options["block"], h.shape[1], options["transformer_index"]))
        return h, skip

    given = {**clone.model_options["transformer_options"], "patches": {"output_block_patch": [note]}}
    with torch.inference_mode():
        control = control_of(network, x, time, text) if controlled else None
        copy = lambda: control and {name: list(values) for name, values in control.items()}  # noqa: E731
        dense = network(x, time, context=text, control=copy())
        for i in range(10):
            sampling.begin_step(1 - i / 10, time, x.shape, True)
            sampling.begin_call(x.shape, {})
            options, seen[:] = {**given, "wrappers": clone.wrappers, KEY: sampling}, []
            here = network(x, time, context=text, control=copy(), transformer_options=options)
            sampling.end_call()
            # float32 over this network errs by 1e-6 of the largest value, and nothing is added up.
            assert torch.allclose(here, dense, atol=1e-5 * float(dense.abs().max())), i
            if i == 0:
                whole = list(seen)
            due = sampling.decision
            if due.finest is not None:
                assert not seen
            else:
                assert seen == whole[settings.target.cut.output if due.deep is not None else 0 :]
            skipped += due.deep is not None
    assert skipped == 10 - len(config.reuse.steps_of(10).full)
    assert not caplog.records  # ComfyUI warns if a ControlNet's output does not fit


def test_deep_stages_run_in_full_steps_alone(unet, monkeypatch):
    down = next(part for part in unet.model.diffusion_model.modules() if isinstance(part, Downsample))
    deep, first = counted(down, monkeypatch), unet.model.diffusion_model.input_blocks[0][0]
    shallow = counted(first, monkeypatch)
    reuse = StepReuse(every=4)
    hosts.sample(reusing(unet, every=4), steps=8)
    assert len(shallow) == 8
    assert len(deep) == len(reuse.steps_of(8).full) < 5


def test_the_finest_level_skips_steps_too(unet, monkeypatch):
    block = unet.model.diffusion_model.input_blocks[1][0]
    calls = counted(block, monkeypatch)
    hosts.sample(reusing(unet, every=4, shallow_every=2), steps=10)
    assert len(calls) == len(StepReuse(every=4, shallow_every=2).steps_of(10).finest) < 10


@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "dpmpp_sde", "dpm_2"])
def test_samplings_do_not_know_each_other(unet, sampler):
    """Reused outputs belong to one sampling: the same seed gives the same result, after any other one."""
    clone = reusing(unet, every=3)
    first = hosts.sample(clone, steps=7, sampler=sampler)
    hosts.sample(clone, steps=5, seed=9, sampler=sampler)
    assert torch.equal(hosts.sample(clone, steps=7, sampler=sampler), first)
    assert not torch.equal(hosts.sample(unet, steps=7, sampler=sampler), first)


def test_a_cancelled_sampling_leaves_nothing(unet):
    clone, dense = reusing(unet, every=3), hosts.sample(unet, steps=6)
    whole, kept = hosts.sample(clone, steps=6), []
    forget = Sampling.forget

    def cancel(step, *more):
        if step == 3:
            raise InterruptedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "forget", lambda self: kept.append(self) or forget(self))
        with pytest.raises(InterruptedError):
            hosts.sample(clone, steps=6, callback=cancel)
    assert kept[-1].residuals == {}
    assert torch.equal(hosts.sample(clone, steps=6), whole)
    assert torch.equal(hosts.sample(unet, steps=6), dense)


def test_prompts_in_calls_of_their_own_have_their_own_residuals(unet):
    """Prompts of 7 and 11 words run one after another; repeated words give them the same attention."""
    words = hosts.condition(24, 2, words=1)
    one, many = [[words[0][0].repeat(1, 7, 1), {}]], [[words[0][0].repeat(1, 11, 1), {}]]
    clone = reusing(unet, every=3)
    batched, alone = (hosts.sample(clone, steps=6, negative=negative) for negative in (one, many))
    # float32 over six steps errs by 1e-4 of the largest value.
    assert torch.allclose(batched, alone, atol=1e-3 * float(batched.abs().max()))


def test_start_and_end_percent(unet, monkeypatch):
    down = next(part for part in unet.model.diffusion_model.modules() if isinstance(part, Downsample))
    deep = counted(down, monkeypatch)
    settings = ToMeConfig(ratio=0.0, reuse=StepReuse(every=8))
    hosts.sample(patched(unet, Settings(settings, find_target(unet), 0.0, 0.5)), steps=10)
    until_half = len(deep)
    # The last 5 steps run everything, and so do the first two of the 5 before them.
    assert until_half == 7


def test_a_window_or_a_prompt_of_its_own_is_not_extrapolated_from_another(unet):
    """Residuals are reused only for the same prompts and window: another window runs in full."""
    settings = Settings(ToMeConfig(ratio=0.0, reuse=StepReuse(every=8)), find_target(unet))
    sampling, latent = Sampling(settings, [1 - i / 10 for i in range(11)]), (1, 4, 16, 16)

    class Window:
        def __init__(self, *frames):
            self.index_list = frames

    skipped = []
    for i, window in enumerate([(0, 1), (0, 1), (0, 1), (2, 3), (2, 3), (2, 3)]):
        sampling.begin_step(1 - i / 10, torch.tensor([1.0]), latent, True)
        with torch.inference_mode():
            sampling.begin_call(latent, {"context_window": Window(*window), "uuids": ["a"]})
        skipped.append(sampling.decision.deep is not None)
        if not skipped[-1]:
            sampling.ran.add("deep")
        sampling.end_call()
    assert skipped == [False, False, True, False, False, True]


def in_tiles(model, order):
    """A clone that calls the model for each of two tiles, as nodes for large images do, in an order."""
    steps = []

    def wrapper(apply, given):
        x, sigma, c = given["input"], given["timestep"], given["c"]
        if not steps or steps[-1] != float(sigma.max()):
            steps.append(float(sigma.max()))
        shift, places = order(len(steps))
        x, result = x.roll(shift, -1), torch.zeros_like(x)
        for place in places:
            part = slice(place * 16, place * 16 + 16)
            result[..., part] = apply(x[..., part].clone(), sigma, **c)
        return result.roll(-shift, -1)

    clone = model.clone()
    clone.set_model_unet_function_wrapper(wrapper)
    return clone


def test_tiles_reuse_what_is_their_own_or_nothing(unet, caplog):
    """In another order they are found again; tiles that move run completely, and this is said once."""
    size = {"size": (16, 32), "steps": 8, "cfg": 2.0}
    dense, here = hosts.sample(unet, **size), hosts.sample(reusing(unet, every=2), **size)
    assert not torch.equal(dense, here)
    kept = hosts.sample(in_tiles(reusing(unet, every=2), lambda step: (0, (0, 1))), **size)
    swapped = hosts.sample(
        in_tiles(reusing(unet, every=2), lambda step: (0, (step % 2, 1 - step % 2))), **size
    )
    assert torch.equal(swapped, kept)
    assert not torch.equal(kept, hosts.sample(in_tiles(unet, lambda step: (0, (0, 1))), **size))
    assert not caplog.records
    moved = hosts.sample(in_tiles(reusing(unet, every=2), lambda step: (5 * step, (0, 1))), **size)
    assert torch.equal(moved, hosts.sample(in_tiles(unet, lambda step: (5 * step, (0, 1))), **size))
    assert [record.getMessage().count("does not follow") for record in caplog.records] == [1]


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde"])
def test_tiles_that_move_are_told_where_little_noise_is_left_that_could_be_new(unet, caplog, sampler):
    size = {"size": (16, 32), "steps": 8, "cfg": 2.0, "sampler": sampler}
    for order in (lambda step: (0, (0, 1)), lambda step: (0, (step % 2, 1 - step % 2))):
        hosts.sample(in_tiles(reusing(unet, every=2), order), **size)
        assert not caplog.records
    hosts.sample(in_tiles(reusing(unet, every=2), lambda step: (5 * step, (0, 1))), **size)
    assert [record.getMessage().count("does not follow") for record in caplog.records] == [1]
