"""Count the kernels that one call of a model launches, for docs/launches.md.

The models are on the meta device, so nothing is computed, and no accelerator is needed. The counted call is
the second one, with another timestep: what depends on the token grid alone is known by then, and what depends
on the step is not. Weights are in bfloat16. Views and allocations launch nothing; fused attention is one
launch, as on a GPU.

    python benchmarks/launches.py                # all models: one to two minutes
    python benchmarks/launches.py sd15 flux      # these
    python benchmarks/launches.py --record NAME  # and keep the counts under this name
    python benchmarks/launches.py --table        # only write the table from the record

On transformers a stack is counted too: tokens merge before the first block and are unmerged after the last.
Its first step is dense, so the counted call is that of the third step. It is also printed as dense + how many
launches, beside how many there should be at most.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmerge import (
    Correction,
    MergeSharing,
    ToMeConfig,
    apply_patch,
    apply_token_merging,
    presets,
    remove_patch,
)
from tokenmerge.models.find import find_hosts
from tokenmerge_tools.bench.loaded_model import find_geometry

RECORD = Path(__file__).with_name("launches_meta.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "launches.md"
SIZES = {
    "sd15": ((512, 512), (768, 768), (1024, 1024)),
    "sdxl": ((1024, 1024),),
    "sd3": ((1024, 1024),),
    "flux": ((1024, 1024),),
    "wan": ((480, 832),),
}
SHARED = MergeSharing(blocks=True)
OLD_CALL = "`apply_patch(ratio=0.5)`"
TODO = "`presets.todo()`"
# What the columns of the table are called, and the settings. SDXL merges at its second level only.
METHODS: dict[str, dict[str, Any]] = {
    "`ToMeConfig(ratio=0.5)`": {},
    '`planner="tiled"`': {"planner": "tiled"},
    "as `auto` merges": {"planner": "tiled", "merge_sharing": SHARED, "proportional": True},
}
# A transformer's blocks merge once a step: the first step is dense, and later ones are corrected.
IN_A_STACK = "as a stack"
STACK = ToMeConfig(
    ratio=0.5,
    scope="block",
    planner="tiled",
    features="model_residual",
    proportional=True,
    merge_sharing=SHARED,
    correction=Correction(every=1000),
)
STEPS = 28
# The steps that run before the counted one: the dense one, and the first that merges.
STEPS_BEFORE = 2
# How many launches more than the unchanged model a stack should take.
WANTED_MORE = 40
# Operations that launch nothing, beside those that return views.
_NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "promote_types"}


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        made = function._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in made)
        if not is_view and name not in _NO_LAUNCH:
            self.of[name] += 1
        return function(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """Makes fused attention one launch. On the meta device it would be several operations."""

    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self.launches = launches

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
        self.launches.of["scaled_dot_product_attention"] += 1
        query: Tensor = given["query"]
        return query.new_empty(*query.shape[:-1], given["value"].shape[-1])


@contextlib.contextmanager
def counting() -> Iterator[Launches]:
    """Count the launches within the context."""
    with torch.no_grad(), Launches() as launches, _FusedAttention(launches):
        yield launches


def build(name: str) -> nn.Module:
    """Return a model of the published size on the meta device."""
    import diffusers

    geometry = find_geometry(name)
    with torch.device("meta"):
        model = getattr(diffusers, geometry.denoiser)(**geometry.config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def example(name: str, model: nn.Module, height: int, width: int) -> dict[str, Any]:
    """Return the arguments of a call with images of this size. Guidance doubles the batch."""
    if name == "wan":  # 81 frames

        def blank(*shape: int) -> Tensor:
            return torch.zeros(1, *shape, device="meta", dtype=torch.bfloat16)

        sample = blank(16, 21, height // 8, width // 8)
        return {
            "hidden_states": sample,
            "timestep": torch.zeros(1, device="meta"),
            "encoder_hidden_states": blank(512, 4096),
        }
    geometry = find_geometry(name)
    arguments = find_hosts(model)[0].example(height // 8, width // 8, 2 if geometry.guided else 1)
    if name != "flux":  # whose pipeline alone casts timesteps
        arguments["timestep"] = arguments["timestep"].float()
    return arguments


def launches(model: nn.Module, arguments: dict[str, Any]) -> collections.Counter[str]:
    """Count the launches of a second call, of another step."""
    first = "sample" if "sample" in arguments else "hidden_states"
    others = {name: value for name, value in arguments.items() if name != first}
    for _ in range(2):
        # Pipelines expand one number to the timesteps of a batch.
        step = torch.zeros_like(others["timestep"].flatten()[0]).expand(others["timestep"].shape)
        sample = arguments[first].clone()
        others["timestep"] = step
        with counting() as counted:
            model(sample, **others)  # tomesd reads the size of the sample from the first argument
    return counted.of


def in_a_stack(name: str, model: nn.Module, height: int, width: int) -> collections.Counter[str]:
    """Count the launches of a full step that merges the tokens of a transformer's stack."""
    arguments = example(name, model, height, width)
    patch = apply_token_merging(model, STACK)
    try:
        for step in range(STEPS_BEFORE + 1):
            patch.at_step(step, STEPS)
            sample = arguments["hidden_states"].clone()
            timestep = torch.zeros_like(arguments["timestep"].flatten()[0])
            others = {**arguments, "hidden_states": sample}
            others["timestep"] = timestep.expand(arguments["timestep"].shape)
            with counting() as counted:
                model(**others)
    finally:
        patch.remove()
    return counted.of


def merged(name: str, model: nn.Module, height: int, width: int, method: str) -> int:
    """Count the launches of a call of a merged model."""
    if method == IN_A_STACK:
        return in_a_stack(name, model, height, width).total()
    deepest = 2 if name == "sdxl" else 1
    arguments = example(name, model, height, width)
    if method == OLD_CALL:
        apply_patch(model, ratio=0.5, max_downsample=deepest)
    elif method == TODO:
        apply_token_merging(model, presets.todo(max_downsample=deepest))
    else:
        apply_token_merging(model, ToMeConfig(ratio=0.5, max_downsample=deepest, **METHODS[method]))
    try:
        return launches(model, arguments).total()
    finally:
        remove_patch(model)


def counts(name: str, model: nn.Module, height: int, width: int) -> Iterator[tuple[str, int]]:
    """Yield each method and the launches of a call with it."""
    arguments = example(name, model, height, width)
    yield "dense", launches(model, arguments).total()
    if "sample" in arguments:
        import tomesd

        tomesd.apply_patch(model, ratio=0.5, max_downsample=2 if name == "sdxl" else 1)
        yield "tomesd", launches(model, arguments).total()
        tomesd.remove_patch(model)
        yield OLD_CALL, merged(name, model, height, width, OLD_CALL)
        yield TODO, merged(name, model, height, width, TODO)
    for method in METHODS:
        yield method, merged(name, model, height, width, method)
    if "sample" not in arguments:  # a transformer
        yield IN_A_STACK, merged(name, model, height, width, IN_A_STACK)


def recorded() -> dict[tuple[str, str], list[int]]:
    """Return the recorded launches by model and method, each from the oldest to the newest."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in map(json.loads, RECORD.read_text(encoding="utf-8").splitlines()):
        found.setdefault((row["model"], row["method"]), []).append(row["launches"])
    return found


def write_table() -> None:
    """Write the oldest and the newest counts of the record into the page."""
    found = recorded()
    models = list(dict.fromkeys(model for model, _ in found))
    methods = list(dict.fromkeys(method for _, method in found))

    def cell(model: str, method: str) -> str:
        counts = found.get((model, method), [])
        if method == IN_A_STACK:
            dense = found[model, "dense"][-1]
            shown = [f"dense + {count - dense}" for count in counts]
        else:
            shown = [str(count) for count in counts]
        if not shown:
            return ""
        return " → ".join(dict.fromkeys([shown[0], shown[-1]]))

    lines = [f"| one call | {' | '.join(methods)} |", f"|---|{'---:|' * len(methods)}"]
    for model in models:
        cells = [cell(model, method) for method in methods]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    before, rest = PAGE.read_text(encoding="utf-8").split("<!-- launches -->\n", 1)
    after = rest.split("<!-- end of launches -->", 1)[1]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}<!-- launches -->\n{table}\n<!-- end of launches -->{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*SIZES, []], help="default: all")
    parser.add_argument("--record", metavar="NAME", help="what the counts are kept as, such as a commit")
    parser.add_argument("--table", action="store_true", help="only write the table into docs/launches.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in [] if options.table else options.models or SIZES:
        model = build(name)
        for height, width in SIZES[name]:
            title = f"{find_geometry(name).title}, {width} × {height}"
            dense = 0
            for method, count in counts(name, model, height, width):
                dense = count if method == "dense" else dense
                row = {"name": options.record, "model": title, "method": method, "launches": count}
                print(json.dumps(row, ensure_ascii=False), flush=True)
                if method == IN_A_STACK:
                    print(
                        f"{title}: dense + {count - dense}, wanted at most dense + {WANTED_MORE}", flush=True
                    )
                if options.record:
                    with RECORD.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if options.record or options.table:
        write_table()


if __name__ == "__main__":
    main()
