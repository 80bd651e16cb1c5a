"""Tiny models split between two processes on a CPU, and the same models in one process.

``python -m tests.runtime.several_processes RANK FOLDER`` is one of the two processes. It leaves the results
of all cases in the folder.
"""

from __future__ import annotations

import dataclasses
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from diffusers import ContextParallelConfig, TensorParallelConfig
from diffusers.hooks import context_parallel, tensor_parallel
from diffusers.models import attention_dispatch
from tests.kernels import backend
from tests.models.test_every_family import model_of, settings
from tests.models.tiny import FAMILIES
from torch import Tensor, nn

from tokenmerge import Correction, MergeSharing, StepReuse, apply_token_merging
from tokenmerge.ops.partition import num_tokens
from tokenmerge.ops.plan import Plan, join_plans
from tokenmerge.planners.sequences import num_removed
from tokenmerge.plans import pays_from
from tokenmerge.runtime.blocks import planning

PROCESSES = 2
FLUX, WAN, QWEN = "FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel"
KONTEXT, CHRONO = "FluxTransformer2DModel, Kontext", "ChronoEditTransformer3DModel"

# Frames, rows, columns, and the number of tokens that are removed where the ratio is not what says it.
Piece = tuple[int, int, int, int | None]


def _pieces(*grids: tuple[int, int, int]) -> list[Piece]:
    return [(*grid, None) for grid in grids]


HALVES = [_pieces((1, 4, 8)), _pieces((1, 4, 8))]
# Of three frames, one and a half.
FRAMES = [_pieces((1, 8, 8), (1, 4, 8)), _pieces((1, 4, 8), (1, 8, 8))]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with settings, and how it is split between processes.

    Attributes:
        family: its name.
        changes: settings.
        parts: what each process has of the token grid, by hand; None: all of it.
        size: rows and columns of the token grid.
        words: number of text tokens, which diffusers splits too.
        parallel: arguments of diffusers' configuration.
        tensors: whether weights are split, and not tokens.
        kernel: back-end of diffusers.
        steps: of a generation; 0: one call outside of any.
        calls: in each step.
        patched_first: whether token merging is applied before the model is split.
        compiled: whether its blocks are compiled.
        refused: what an error says; empty: there is none.
    """

    family: str = FLUX
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: Sequence[list[Piece]] | None = None
    size: tuple[int, int] = (8, 8)
    words: int = 6
    parallel: dict[str, Any] = dataclasses.field(default_factory=lambda: {"ulysses_degree": PROCESSES})
    tensors: bool = False
    kernel: str = "native"
    steps: int = 0
    calls: int = 1
    patched_first: bool = False
    compiled: bool = False
    refused: str = ""


def _of(name: str, **facts: Any) -> Case:
    return Case(name, parts=FRAMES if name in (WAN, CHRONO) else HALVES, **facts)


_EVERYWHERE = {
    "layers": {},
    "cross-attention and MLP": {"merge_crossattn": True, "merge_mlp": True},
    "proportional": {"proportional": True},
    "block": {"scope": "block", "proportional": True},
    "tiled": {"planner": "tiled"},
    "uniform": {"planner": "uniform"},
}
_ALONE = {"merge_sharing": MergeSharing(guidance=False)}
_OF_A_STEP_BEFORE = {
    "residuals": {"features": "residual"},
    "residuals of the model": {"features": "model_residual"},
    "residuals of the model, shared": {
        "features": "model_residual",
        "merge_sharing": MergeSharing(blocks=True),
    },
    # As auto has them. Without correction, tokens that merged for all blocks have the same residual, and
    # rounding decides which of them merge next.
    "residuals of the model, whole blocks": {
        **{"features": "model_residual", "scope": "block", "proportional": True},
        **{"merge_sharing": MergeSharing(blocks=True), "correction": Correction(every=3)},
    },
}
_IN_ITS_GRAPH = "splits tokens inside the graph of this block"
_STEPS = {"scope": "block", "reuse": StepReuse(every=2), "correction": Correction(every=3)}

CASES = {
    **{f"{name}, dense": _of(name, changes={"ratio": 0.0}) for name in (FLUX, WAN)},
    **{
        f"{name}, {what}": _of(name, changes=changes)
        for name in (FLUX, WAN)
        for what, changes in _EVERYWHERE.items()
    },
    # Soft plans multiply what rounding changes by 1000; on the tokens of FLUX that shows.
    f"{WAN}, toma": _of(WAN, changes={"planner": "toma", "sx": 4, "sy": 4}),
    **{f"{name}, patched first": _of(name, patched_first=True) for name in (FLUX, WAN)},
    **{f"{name}, steps": _of(name, changes=_STEPS, steps=8) for name in (FLUX, WAN)},
    "plans for steps": _of(FLUX, changes={"merge_sharing": MergeSharing(every=2, blocks=True)}, steps=3),
    **{
        f"{name}, {what}": _of(name, changes=changes, steps=3)
        for name in (FLUX, WAN)
        for what, changes in _OF_A_STEP_BEFORE.items()
    },
    "importance": _of(FLUX, changes={"planner": "importance"}, steps=3, calls=2),
    "ring": _of(FLUX, changes={"proportional": True}, parallel={"ring_degree": PROCESSES}, kernel="flash"),
    f"{WAN}, ring": _of(
        WAN, changes={"proportional": True}, parallel={"ring_degree": PROCESSES}, kernel="flash"
    ),
    "no mask": _of(WAN, changes={"proportional": True}, kernel="flash"),
    "parts of different lengths": Case(
        changes={"proportional": True},
        parts=[_pieces((1, 3, 5), (1, 1, 3)), _pieces((1, 1, 2), (1, 3, 5))],
        size=(7, 5),
        words=7,
        parallel={"ulysses_degree": PROCESSES, "ulysses_anything": True},
    ),
    # The reference has 16 × 8 tokens, of which the second part would lose 72; the first loses 16 + 24.
    "references": Case(
        KONTEXT,
        changes={"ratio": 0.25, "reference_ratio": 0.75},
        parts=[[(1, 8, 8, 16), (1, 4, 8, 24)], [(1, 12, 8, 40)]],
    ),
    **{name: _of(name, changes={"proportional": True}) for name in (QWEN, CHRONO, "Flux2Transformer2DModel")},
    **{
        f"tensor parallel, {what}": Case(changes=changes, parallel={"tp_degree": PROCESSES}, tensors=True)
        for what, changes in {**_EVERYWHERE, "dense": {"ratio": 0.0}}.items()
    },
    **{
        f"tensor parallel, {name}": Case(
            name, changes={"proportional": True}, parallel={"tp_degree": PROCESSES}, tensors=True
        )
        for name in (QWEN, "Flux2Transformer2DModel")
    },
    **{
        f"{name}, compiled": _of(name, changes={**_ALONE, "proportional": True}, compiled=True)
        for name in (FLUX, WAN)
    },
    f"{FLUX}, compiled, steps": _of(FLUX, changes=_STEPS, steps=8, compiled=True),
    f"{WAN}, compiled, steps": _of(WAN, changes=_STEPS, steps=8, compiled=True, refused=_IN_ITS_GRAPH),
    **{
        f"{FLUX}, compiled, {what}": _of(FLUX, changes=changes, steps=3, compiled=True)
        for what, changes in _OF_A_STEP_BEFORE.items()
    },
    **{
        f"{WAN}, compiled, {what}": _of(
            WAN, changes={**_ALONE, **changes}, steps=3, compiled=True, refused=_IN_ITS_GRAPH
        )
        for what, changes in _OF_A_STEP_BEFORE.items()
    },
    "tensor parallel, patched first": Case(
        parallel={"tp_degree": PROCESSES}, tensors=True, patched_first=True
    ),
}


REPORTED = (f"{FLUX}, block", f"{WAN}, layers", "parts of different lengths", "tensor parallel, layers")


def model_of_case(case: Case) -> nn.Module:
    return model_of(FAMILIES[case.family])


def in_one_process(case: Case) -> Tensor:
    """The result of a case where nothing is split, and each part of the tokens is planned by itself."""
    case, model = dataclasses.replace(case, compiled=False), model_of_case(case)
    plan = planning.plan_pictures if case.parts is None else _planning_in(case.parts)
    with mock.patch.object(planning, "plan_pictures", plan), backend(case.kernel):
        return _generation(case, model, lambda: None)


def _planning_in(parts: Sequence[list[Piece]]) -> Callable[..., Plan]:
    pieces = [piece for part in parts for piece in part]
    lengths = [num_tokens(piece[:3]) for piece in pieces]

    def plan(planner: Any, features: Tensor, pictures: Any, step: Tensor, *importance: Tensor) -> Plan:
        config, plans = pictures[0][1], []
        values = zip(*(x.split(lengths, 1) for x in (features, *importance)), strict=True)
        for (*sides, r), (own, *more) in zip(pieces, values, strict=True):
            removed = num_removed(sides, config) if r is None else r
            plans.append(planner(own, sides, removed, config, step, *more) if removed else None)
        return join_plans(plans, lengths)

    return plan


def _split(case: Case, model: nn.Module) -> None:
    # diffusers asks which accelerator a process has, and counts none on a CPU.
    with mock.patch("torch.accelerator.device_count", return_value=1):
        if not case.tensors:
            model.enable_parallelism(config=ContextParallelConfig(**case.parallel))
            return
        with mock.patch.object(tensor_parallel, "_SUPPORTED_TP_DEVICES", ("cpu",)):
            model.enable_parallelism(config=TensorParallelConfig(**case.parallel))


def _generation(case: Case, model: nn.Module, split: Any) -> Tensor:
    family = FAMILIES[case.family]
    arguments = {**family.inputs(2, *case.size), "return_dict": False}
    for name in ("encoder_hidden_states", "encoder_hidden_states_mask"):
        if name in arguments and case.family != WAN:
            arguments[name] = arguments[name][:, : case.words]
    if "txt_ids" in arguments:
        arguments["txt_ids"] = arguments["txt_ids"][: case.words]
    if case.family.startswith("Flux2"):  # diffusers splits ids with a batch axis alone
        arguments |= {name: arguments[name].expand(2, -1, -1) for name in ("img_ids", "txt_ids")}
    config = settings(family, **case.changes)
    if not case.patched_first:
        split()
    if case.compiled:
        torch._dynamo.reset()
        with torch.no_grad():
            model(**arguments)  # diffusers' own hook notes what it cannot note in a graph
        model.compile_repeated_blocks(fullgraph=True, backend="eager")
    patch = apply_token_merging(model, config)
    if case.patched_first:
        split()
    results = []
    with torch.no_grad():
        for index in range(case.steps or 1):
            if case.steps:
                patch.at_step(index, case.steps)
            arguments["timestep"] = arguments["timestep"] * 0.9
            text = arguments["encoder_hidden_states"]
            results = [
                model(**{**arguments, "encoder_hidden_states": text.roll(i, 0)})[0] for i in range(case.calls)
            ]
            if case.steps:
                arguments["hidden_states"] = arguments["hidden_states"] - sum(results)
    return torch.stack(results)


def report(case: Case, model: nn.Module) -> str:
    """What is said of merging in a model before a run. How fast this machine is takes no part in it."""
    patch = apply_token_merging(model, settings(FAMILIES[case.family], **case.changes))
    with mock.patch("tokenmerge.handle.fewest_tokens", return_value=pays_from(0)):
        return str(patch.report(height=16, width=16))


def run_all(rank: int, folder: Path) -> None:
    """Leave the result of each case in the folder, or the error as text."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    context_parallel._all_gather_anything = gather  # gloo gathers no tensors of different lengths
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=PROCESSES,
        timeout=timedelta(seconds=60),
    )
    results: dict[str, Any] = {}
    models = {name: model_of_case(CASES[name]) for name in REPORTED}
    for name, model in models.items():
        _split(CASES[name], model)
    if rank == 0:  # alone: nothing waits for the others
        results["reports"] = {name: report(CASES[name], model) for name, model in models.items()}
    for name, case in CASES.items():
        model = model_of_case(case)
        try:
            with backend(case.kernel, flash if case.kernel == "flash" else None):
                results[name] = _generation(case, model, lambda m=model, c=case: _split(c, m))
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def gather(tensor: Tensor, dim: int, group: Any) -> Tensor:
    """Tensors of all processes in a row, whatever their lengths."""
    pairs: list[Any] = [None] * PROCESSES
    torch.distributed.all_gather_object(pairs, tensor, group=group)
    return torch.cat(pairs, dim)


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    _parallel_config: Any = None,
) -> Tensor:
    """As FlashAttention: it takes no mask, and diffusers joins the keys of several processes around it."""
    if attn_mask is not None:
        raise ValueError("`attn_mask` is not supported for flash-attn 2.")
    if _parallel_config is None:
        return _with_lse(query, key, value, scale)[0]
    return attention_dispatch._templated_context_parallel_attention(
        query,
        key,
        value,
        None,
        dropout_p,
        is_causal,
        scale,
        False,
        False,
        forward_op=_forward,
        backward_op=None,
        _parallel_config=_parallel_config,
    )


def _forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    **_: Any,
) -> Any:
    result, lse = _with_lse(query, key, value, scale)
    return (result, lse) if return_lse else result


def _with_lse(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of ``[b, n, heads, d]``, and the logarithm of the sum of its weights ``[b, n, heads]``."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (logits.softmax(-1) @ value).transpose(1, 2), logits.logsumexp(-1).transpose(1, 2)


if __name__ == "__main__":
    run_all(int(sys.argv[1]), Path(sys.argv[2]))
