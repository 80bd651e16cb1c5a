"""Token-wise reuse in blocks, stacks and layers: tokens that are not computed have residuals of their own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cached
import hosts
import pytest
import torch
from tests.models.dits import SD3
from tests.models.test_every_family import call
from tests.models.tiny import FAMILIES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

from tokenmerge import (
    ConfigError,
    Correction,
    PlanSharing,
    Schedule,
    StepReuse,
    ToMeConfig,
    apply_token_merging,
)
from tokenmerge.ops import make_plan, unmerge_onto
from tokenmerge.planners import PLANNERS
from tokenmerge.report import predict
from tokenmerge.runtime.patch import state_of
from tokenmerge.runtime.state import STATE, BlockState, LayerState

STEPS = 8
SIDE = 8
SCOPES = pytest.mark.parametrize("scope", ["block", "stack", "layers"])
HALF: dict[str, Any] = {"ratio": 0.5, "max_downsample": 8}


def sd3(layers: int = 4) -> nn.Module:
    from diffusers import SD3Transformer2DModel
    from tests.models.family import TEXT, seeded

    torch.manual_seed(0)
    return seeded(SD3Transformer2DModel(**{**SD3, "joint_attention_dim": TEXT, "num_layers": layers}))


def sample(index: int, batch: int = 2) -> dict[str, Any]:
    """A call at a step of a generation: the sample changes a little from step to step."""
    arguments = FAMILIES["SD3Transformer2DModel"].inputs(batch, SIDE, SIDE)
    generator = torch.Generator().manual_seed(index)
    noise = torch.randn(arguments["hidden_states"].shape, generator=generator)
    timestep = torch.full((batch,), 900.0 - index)
    return {
        **arguments,
        "hidden_states": arguments["hidden_states"] + 0.1 * index * noise,
        "timestep": timestep,
    }


def test_tokens_that_stay_get_what_was_computed_and_the_others_a_mean_with_their_own():
    src, dst = torch.tensor([1, 2, 4]), torch.tensor([0, 3])
    order, nearest = torch.tensor([[2, 0, 1]]), torch.tensor([[0, 1, 1]])
    plan = make_plan(src, dst, order, nearest, r=2)  # 4 goes to 3, 1 goes to 0, and 2 stays
    own, y = torch.arange(5.0).view(1, 5, 1), torch.tensor([[[20.0], [100.0], [300.0]]])
    assert plan.kept().tolist() == [[2, 0, 3]]
    for blend in (0.0, 0.25, 1.0):
        wanted = [100.0, 100 * blend + 1 * (1 - blend), 20.0, 300.0, 300 * blend + 4 * (1 - blend)]
        assert_close(unmerge_onto(plan, y, own, blend).flatten(), torch.tensor(wanted))
    assert own.flatten().tolist() == [0, 1, 2, 3, 4]


class Reference:
    """The formulas of token-wise reuse, token by token, for what one block, stack or layer adds to tokens."""

    def __init__(self, blend: float, extrapolates: bool) -> None:
        self.blend, self.extrapolates = blend, extrapolates
        self.cached: Tensor | None = None
        self.delta: Tensor | None = None
        self.agreement: list[float] = []
        self.dense_steps: list[int] = []

    def dense(self, index: int, residual: Tensor) -> None:
        before, delta_before = self.cached, self.delta
        if before is None:
            self.delta, self.agreement = torch.zeros_like(residual), [0.0] * len(residual)
        else:
            self.delta = residual - before
            pairs = zip(self.delta.flatten(1), delta_before.flatten(1), strict=True)
            self.agreement = [
                0.0 if not a.norm() * b.norm() else max(0.0, (a @ b / (a.norm() * b.norm())).item())
                for a, b in pairs
            ]
        self.cached = residual.clone()
        self.dense_steps.append(index)

    def merged(self, index: int, plan: Any, computed: Tensor) -> Tensor:
        """What each token gets, from what those that stay get."""
        got = torch.empty(len(computed), plan.inverse.shape[1], computed.shape[2])
        labels, kept = plan.labels().tolist(), plan.kept().tolist()
        known = self.cached is not None
        if not known:
            self.cached = torch.empty_like(got)
        for b in range(got.shape[0]):
            for i in range(got.shape[1]):
                now, trend = computed[b, labels[b][i]], 0.0
                if known and self.extrapolates:
                    last, before = self.dense_steps[-1], self.dense_steps[-2]
                    trend = self.agreement[b] * (index - last) / (last - before) * self.delta[b, i]
                if known and i not in kept[b]:
                    now = self.blend * now + (1 - self.blend) * (self.cached[b, i] + trend)
                got[b, i], self.cached[b, i] = now, now - trend
        return got


def modules_of(model: nn.Module, scope: str) -> tuple[nn.Module, nn.Module]:
    """Where tokens go in, and where they come out; in a stack these are two blocks."""
    blocks = model.transformer_blocks
    if scope == "layers":
        return blocks[0].attn, blocks[0].attn
    return (blocks[0], blocks[0]) if scope == "block" else (blocks[1], blocks[len(blocks) - 2])


@pytest.mark.parametrize(
    ("settings", "dense"),
    [
        ({"combine": "reuse"}, []),
        ({"combine": "reuse", "blend": 0.3, "correction": Correction(every=3)}, [0, 3, 6]),
        ({"combine": "reuse", "correction": Correction(steps=(0, 0.5))}, [0, 4]),
        ({"combine": "extrapolate", "correction": Correction(every=3)}, [0, 1, 3, 6]),
        (
            {"combine": "extrapolate", "blend": 0.2, "correction": Correction(steps=(0, 0.3, 0.6))},
            [0, 1, 2, 4],
        ),
        (
            {
                **{"combine": "extrapolate", "planner": "clusters", "blend": 0.007},
                "correction": Correction(every=6),
            },
            [0, 1, 6],
        ),
    ],
)
@SCOPES
def test_tokens_get_what_the_formulas_say(scope, settings, dense):
    """Against the host's own modules, called on the tokens that stay, and a loop over tokens."""
    model, plain = sd3(), sd3()
    config = ToMeConfig(**HALF, scope=scope, plans=PlanSharing(guidance=False), **settings)
    patch = apply_token_merging(model, config)
    first, last = modules_of(model, scope)
    taken: dict[str, Any] = {}

    def given(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        taken.update(tokens=(args[0] if args else kwargs["hidden_states"]), kwargs=dict(kwargs))

    def got(_: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        taken["result"] = result[0] if scope == "layers" else result[1]

    first.register_forward_pre_hook(given, with_kwargs=True)
    last.register_forward_hook(got, with_kwargs=True)
    reference = Reference(config.blend, config.combine == "extrapolate")
    path = next(part.path for part in state_of(model).parts if first.__dict__[STATE] is part)
    path = path.removesuffix(".attn")
    found = []
    for index in range(STEPS - 1):
        patch.at_step(index, STEPS)
        with patch.record() as plans:
            call(model, sample(index))
        tokens = taken["tokens"]

        def added(tokens: Tensor) -> Tensor:
            if scope == "layers":
                kwargs = {**taken["kwargs"], "hidden_states": tokens}
                with torch.no_grad():
                    return plain.transformer_blocks[0].attn(**kwargs)[0]
            run, text = tokens, taken["kwargs"]["encoder_hidden_states"]
            blocks = plain.transformer_blocks[:1] if scope == "block" else plain.transformer_blocks[1:-1]
            for block in blocks:
                with torch.no_grad():
                    text, run = block(run, text, temb=taken["kwargs"]["temb"])
            return run - tokens

        base = 0.0 if scope == "layers" else tokens
        if path not in plans:
            found.append(index)
            reference.dense(index, added(tokens))
            wanted = base + reference.cached
        else:
            plan = plans[path].plan
            stay = tokens.gather(1, plan.kept().unsqueeze(2).expand(-1, -1, tokens.shape[2]))
            own = added(stay)
            wanted = base + reference.merged(index, plan, own)
        assert_close(taken["result"], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())
    assert found == dense


def run(model: nn.Module, steps: int = STEPS, batch: int = 2, **settings: Any) -> tuple[list[Tensor], Any]:
    patch = apply_token_merging(model, ToMeConfig(**{**HALF, **settings}))
    results = []
    for index in range(steps):
        patch.at_step(index, steps)
        results.append(call(model, sample(index, batch)))
    return results, patch


@SCOPES
@pytest.mark.parametrize("combine", ["reuse", "extrapolate"])
def test_ratio_0_is_dense_and_removal_leaves_nothing(scope, combine):
    model = sd3()
    dense = [call(model, sample(index)) for index in range(3)]
    settings = {"scope": scope, "combine": combine}
    results, patch = run(model, 3, ratio=0.0, **settings)
    patch.remove()
    assert all(map(torch.equal, results, dense))
    results, patch = run(model, 3, **settings)
    assert not torch.equal(results[-1], dense[-1])
    memory = cached.memory_of(model)
    patch.remove()
    assert not cached.everything(memory)
    assert torch.equal(call(model, sample(2)), dense[2])


@SCOPES
def test_a_blend_of_1_is_keep(scope):
    """All tokens of a group get what is computed for their destination."""
    kept, _ = run(sd3(), scope=scope, combine="keep", schedule=Schedule(until=1.0))
    blended, _ = run(sd3(), scope=scope, combine="reuse", blend=1.0)
    # torch.lerp may round in the last bit of each block's residual.
    for one, other in zip(kept, blended, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-5 * one.abs().max().item())


@SCOPES
def test_after_a_dense_step_on_the_same_input_every_token_has_its_exact_residual(scope):
    """The second of two equal steps is the first, but for the computed tokens' smaller attention."""
    model = sd3()
    dense = call(model, sample(0))
    errors = {}
    for combine in ("keep", "reuse"):
        correction = Correction(every=4) if combine == "reuse" else Correction()
        settings = ToMeConfig(**HALF, scope=scope, combine=combine, correction=correction)
        patch = apply_token_merging(model, settings)
        results = []
        for index in range(2):
            patch.at_step(index, STEPS)
            results.append(call(model, sample(0)))
        if combine == "reuse":
            assert torch.equal(results[0], dense)
        errors[combine] = (results[1] - dense).norm().item()
        patch.remove()
    assert errors["reuse"] < 0.7 * errors["keep"]


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_residuals_of_tokens_help_with_every_planner(planner):
    """On the input of the dense step before, only attention to fewer tokens is lost."""
    model = sd3()
    dense, errors = call(model, sample(0)), {}
    for combine, correction in (("keep", Correction()), ("reuse", Correction(every=4))):
        patch = apply_token_merging(
            model, ToMeConfig(**{**HALF, "planner": planner}, combine=combine, correction=correction)
        )
        for index in range(2):
            patch.at_step(index, STEPS)
            result = call(model, sample(0))
        errors[combine] = (result - dense).norm().item()
        patch.remove()
    assert 0 < errors["reuse"] < errors["keep"]


@SCOPES
def test_an_image_does_not_depend_on_its_batch(scope):
    settings = {"scope": scope, "combine": "reuse", "blend": 0.1, "correction": Correction(every=4)}
    together, _ = run(sd3(), batch=2, plans=PlanSharing(guidance=False), **settings)
    alone, _ = run(sd3(), batch=1, plans=PlanSharing(guidance=False), **settings)
    for both, one in zip(together, alone, strict=True):
        assert_close(both[:1], one, rtol=1e-4, atol=1e-5 * one.abs().max().item())


def test_two_calls_of_a_step_have_residuals_of_their_own():
    """As guidance in two calls has: each is as if it were the only one, with plans that do not differ."""

    def results(scales: tuple[float, ...]) -> list[list[Tensor]]:
        model = sd3()
        config = ToMeConfig(**HALF, scope="block", combine="reuse", planner="uniform")
        patch = apply_token_merging(model, config)
        found: list[list[Tensor]] = [[] for _ in scales]
        for index in range(4):
            patch.at_step(index, STEPS)
            for scale, own in zip(scales, found, strict=True):
                arguments = sample(index)
                text = arguments["encoder_hidden_states"] * scale
                own.append(call(model, {**arguments, "encoder_hidden_states": text}))
        return found

    both = results((1.0, 2.0))
    for own, scale in zip(both, (1.0, 2.0), strict=True):
        assert all(map(torch.equal, own, results((scale,))[0]))


def test_another_batch_in_the_middle_takes_nothing_of_the_one_before():
    model = sd3()
    settings = {"scope": "block", "combine": "reuse", "planner": "uniform", "use_rand": False}
    patch = apply_token_merging(model, ToMeConfig(**HALF, **settings))
    for index in range(2):
        patch.at_step(index, STEPS)
        call(model, sample(index, 2))
    patch.at_step(2, STEPS)
    result = call(model, sample(2, 3))
    patch.at_step(0, STEPS)
    assert torch.equal(result, call(model, sample(2, 3)))


@pytest.mark.parametrize("scope", ["block", "stack"])
def test_step_reuse_runs_beside_it(scope):
    """On reused steps nothing runs; with changes that stay the same the result does, too."""
    model, ran = sd3(), []
    model.transformer_blocks[1].attn.register_forward_hook(lambda *_: ran.append(index))
    config = ToMeConfig(
        **HALF, scope=scope, combine="reuse", correction=Correction(every=2), reuse=StepReuse(every=2)
    )
    patch = apply_token_merging(model, config)
    results = []
    for index in range(STEPS):
        patch.at_step(index, STEPS)
        results.append(call(model, sample(0)))
    assert ran == list(StepReuse(every=2).steps_of(STEPS).full)
    assert all(torch.isfinite(result).all() for result in results)
    dense = call(sd3(), sample(0))
    assert torch.equal(results[0], dense)
    for result in results[1:]:
        assert (result - dense).norm() < 0.2 * dense.norm()


def test_what_would_break_a_stack_that_is_skipped_is_refused():
    from tokenmerge import UnsupportedModelError

    model = sd3()
    patch = apply_token_merging(model, ToMeConfig(**HALF, scope="stack", reuse=StepReuse(every=3)))
    model.transformer_blocks[1].register_forward_hook(lambda *a: (a[-1][0], a[-1][1] * 1.0))
    patch.at_step(0, STEPS)
    with pytest.raises(UnsupportedModelError, match="between the blocks of its stack"):
        call(model, sample(0))


@SCOPES
def test_it_is_not_for_training_and_nothing_stays_behind(scope):
    model = sd3()
    patch = apply_token_merging(model, ToMeConfig(**HALF, scope=scope, combine="reuse"))
    patch.at_step(0, STEPS)
    with pytest.raises(ConfigError, match="combine='reuse'"):
        model(**sample(0))
    held = []
    for index in range(STEPS):
        patch.at_step(index, STEPS)
        call(model, sample(index))
        held.append(any(cache.tokens for cache in cached.memory_of(model).caches))
    assert held == [True] * (STEPS - 1) + [False]


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="scope='keys'"):
        ToMeConfig(scope="keys", combine="reuse")
    with pytest.raises(ConfigError, match="blend: expected"):
        ToMeConfig(combine="reuse", blend=1.5)
    with pytest.raises(ConfigError, match="both say"):
        Correction(every=2, steps=(0, 0.5))
    with pytest.raises(ConfigError, match=r"correction\.steps: expected places"):
        Correction(steps=(0.5, 0.2))
    with pytest.raises(ConfigError, match=r"correction.steps=\(0.5,\): with scope='stack'"):
        ToMeConfig(scope="stack", correction=Correction(steps=(0.5,)))
    config = ToMeConfig(scope="stack", combine="reuse", correction=Correction(steps=(0, 0.5)))
    assert ToMeConfig.from_dict(config.to_dict()) == config
    model = sd3()
    apply_token_merging(model, ToMeConfig(**HALF, combine="reuse"))
    with pytest.raises(ConfigError, match="combine='reuse': it has to be known which denoising step"):
        call(model, sample(0))


@SCOPES
@pytest.mark.parametrize(("combine", "tensors"), [("reuse", 1), ("extrapolate", 2)])
def test_the_report_counts_what_is_cached(scope, combine, tensors):
    """A residual of all image tokens for each block, stack or layer, and its change where it goes on."""
    model = sd3()
    settings = {
        "scope": scope,
        "combine": combine,
        "correction": Correction(every=4),
        "plans": PlanSharing(guidance=False),
    }
    report = predict(model, ToMeConfig(**HALF, **settings), 2 * SIDE, 2 * SIDE, batch=2, steps=STEPS)
    _, patch = run(model, STEPS - 1, **settings)
    parts = 1 if scope == "stack" else len(model.transformer_blocks)
    channels = model.config.attention_head_dim * model.config.num_attention_heads
    tokens = 2 * SIDE * SIDE * channels * 4
    assert report.kept_bytes == parts * tensors * tokens
    patch.at_step(STEPS - 2, STEPS)
    call(model, sample(STEPS - 2))
    kept = [r for cache in cached.memory_of(model).caches for r in cache.tokens.values()]
    held = [t for r in kept for t in (*r.latest, *(r.delta or ())) if t is not None]
    assert sum(t.nbytes for t in held) == report.kept_bytes
    assert any("combine=" in note for note in report.notes)


@pytest.mark.parametrize("scope", ["block", "layers"])
@pytest.mark.parametrize("combine", ["reuse", "extrapolate"])
def test_blocks_compile_once_for_each_kind_of_step(scope, combine):
    """Dense, merged with nothing cached or something cached: no graph is made for a step of a known kind."""
    settings = {"scope": scope, "combine": combine, "blend": 0.1, "correction": Correction(every=3)}
    eager, compiled, counter = sd3(), sd3(), CompileCounter()
    patches = [apply_token_merging(m, ToMeConfig(**HALF, **settings)) for m in (eager, compiled)]
    torch._dynamo.reset()
    for block in compiled.transformer_blocks:
        block.compile(fullgraph=True, backend=counter)
    counts = []
    for index in range(STEPS):
        for patch in patches:
            patch.at_step(index, STEPS)
        assert torch.equal(call(compiled, sample(index)), call(eager, sample(index)))
        counts.append(counter.frame_count)
    assert counts[-1] == counts[4]


def test_a_unet_reuses_tokens_of_its_attention():
    unet = hosts.unet()
    dense = hosts.call(unet, **hosts.inputs())
    patch = apply_token_merging(unet, ToMeConfig(**HALF, combine="reuse", correction=Correction(every=3)))
    patch.at_step(0, STEPS)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)
    patch.at_step(1, STEPS)
    result = hosts.call(unet, **hosts.inputs())
    assert torch.isfinite(result).all()
    assert not torch.equal(result, dense)
    layers = [cache for _, cache in cached.caches(unet, LayerState)]
    assert layers
    assert all(cache.tokens for cache in layers)
    assert not any(cache.tokens for _, cache in cached.caches(unet, BlockState))


def test_a_controlnet_reuses_tokens_beside_its_unet():
    """Each has residuals of its own, dense steps are dense in both, and nothing is left behind."""
    unet, controlnet = hosts.unet(), hosts.controlnet()
    for layer in controlnet.controlnet_down_blocks:  # diffusers starts them at zero
        torch.nn.init.normal_(layer.weight, std=0.1)
    pipe = SimpleNamespace(unet=unet, controlnet=controlnet, vae=None)
    control = {**hosts.inputs(), "controlnet_cond": torch.rand(2, 3, 32, 32)}

    def guided() -> list[Tensor]:
        with torch.no_grad():
            down, middle = controlnet(**control, return_dict=False)
        added = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
        return [*down, hosts.call(unet, **hosts.inputs(), **added)]

    dense = guided()
    patch = apply_token_merging(pipe, ToMeConfig(**HALF, combine="reuse", correction=Correction(every=3)))
    patch.at_step(0, STEPS)
    assert all(map(torch.equal, guided(), dense))
    patch.at_step(1, STEPS)
    reused = guided()
    assert not torch.equal(reused[-2], dense[-2])
    assert not torch.equal(reused[-1], dense[-1])
    memories = []
    for model in (unet, controlnet):
        assert any(cache.tokens for _, cache in cached.caches(model, LayerState))
        memories.append(cached.memory_of(model))
    patch.remove()
    assert not any(cached.everything(memory) for memory in memories)
    assert all(map(torch.equal, guided(), dense))
