"""The overhead of merging per call, apart from work on tokens: tiny models, here and in another checkout.

The models are so small that Python and the hooks take most of the time. CPU time is measured, because other
programs on the machine disturb it less. The two versions run in processes of their own, in interleaved
rounds, so that a machine whose speed varies favours neither.

    python benchmarks/overhead.py                              # this checkout
    python benchmarks/overhead.py --beside ../before/src       # and its ratio to another one
    python benchmarks/overhead.py --blocks --record NAME       # one merged block beyond a dense one
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "src"


def microseconds(calls: int) -> dict[str, float]:
    """Return the median CPU time of a call of each model in microseconds, dense and merged."""
    import torch
    from diffusers import FluxTransformer2DModel, UNet2DConditionModel

    from tokenmerge import ToMeConfig, apply_token_merging

    torch.set_num_threads(1)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=4,
        norm_num_groups=8,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    )
    flux = FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    rows = torch.arange(8).repeat_interleave(8)
    ids = torch.stack([torch.zeros(64), rows, torch.arange(8).repeat(8)], dim=1)
    models = {
        "UNet": (
            unet,
            {
                "sample": torch.randn(2, 4, 16, 16),
                "timestep": torch.tensor(500),
                "encoder_hidden_states": torch.randn(2, 7, 16),
            },
        ),
        "FLUX": (
            flux,
            {
                "hidden_states": torch.randn(1, 64, 4),
                "timestep": torch.tensor([0.5]),
                "encoder_hidden_states": torch.randn(1, 7, 16),
                "pooled_projections": torch.randn(1, 16),
                "img_ids": ids,
                "txt_ids": torch.zeros(7, 3),
            },
        ),
    }
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, (model, arguments) in models.items():
            for kind in ("dense", "merged"):
                if kind == "merged":
                    apply_token_merging(model, ToMeConfig(ratio=0.5))
                times = []
                for _ in range(calls):
                    begin = time.process_time()
                    model(**arguments)
                    times.append(time.process_time() - begin)
                found[f"{name} {kind}"] = 1e6 * statistics.median(times[calls // 10 :])
    return found


def microseconds_of_arithmetic(calls: int) -> float:
    """Return the CPU time in which the tokens of such a block, and 7 of text, are merged and unmerged."""
    import torch

    from tokenmerge import ToMeConfig
    from tokenmerge.planners import PLANNERS

    tokens = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    step = torch.zeros((), dtype=torch.int64)
    plan = PLANNERS["tiled"](tokens, (1, 8, 8), 32, ToMeConfig(ratio=0.5, planner="tiled"), step).after(7)
    tokens = torch.randn(1, 71, 32)
    shortest = math.inf
    with torch.no_grad():
        for _ in range(100):
            begin = time.process_time()
            for _ in range(calls):
                plan.unmerge(plan.merge(tokens))
            shortest = min(shortest, (time.process_time() - begin) / calls)
    return round(1e6 * shortest, 1)


RECORD = Path(__file__).with_name("overhead_cpu.jsonl")
DEPTHS = (2, 12)


def block_settings() -> dict[str, Any]:
    """Return the settings of the blocks that are measured, by the name of each kind, or None for dense."""
    from tokenmerge import MergeSharing, ToMeConfig

    shared = {"planner": "tiled", "merge_sharing": MergeSharing(blocks=True), "proportional": True}
    return {
        "dense": None,
        "around attention": ToMeConfig(ratio=0.5, **shared),
        "whole blocks": ToMeConfig(ratio=0.5, scope="block", **shared),
        "around attention, a plan each": ToMeConfig(ratio=0.5),
    }


def tiny_flux(depth: int) -> tuple[Any, dict[str, Any]]:
    """Return a tiny FLUX with ``depth`` single-stream blocks, and the arguments of a call."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=depth,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    rows = torch.arange(8).repeat_interleave(8)
    arguments = {
        "hidden_states": torch.ones(1, 64, 4),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.ones(1, 7, 16),
        "pooled_projections": torch.ones(1, 16),
        "img_ids": torch.stack([torch.zeros(64), rows, torch.arange(8).repeat(8)], dim=1),
        "txt_ids": torch.zeros(7, 3),
    }
    return model, arguments


def microseconds_of_a_block(calls: int) -> dict[str, float]:
    """Return the CPU time that a merged block of a tiny FLUX takes beyond a dense one, in microseconds.

    Models of two depths tell blocks apart from what is done once a call. Each time is the shortest of many,
    in turns. It includes the arithmetic on 64 tokens of 32 channels, which is measured alone as well.
    """
    import torch

    from tokenmerge import token_merging

    torch.set_num_threads(1)
    kinds = block_settings()
    shortest: dict[tuple[str, int], float] = {}
    for _ in range(4):
        for depth in DEPTHS:
            model, arguments = tiny_flux(depth)
            for kind, config in kinds.items():
                with token_merging(model, config) if config else contextlib.nullcontext():
                    for _ in range(calls):
                        begin = time.process_time()
                        with torch.no_grad():
                            model(**arguments)
                        taken = time.process_time() - begin
                        shortest[kind, depth] = min(taken, shortest.get((kind, depth), math.inf))
    few, many = DEPTHS
    of_a_block = {kind: 1e6 * (shortest[kind, many] - shortest[kind, few]) / (many - few) for kind in kinds}
    dense = of_a_block.pop("dense")
    return {kind: round(time - dense, 1) for kind, time in of_a_block.items()}


def functions_of_a_block() -> dict[str, float]:
    """Return how many of this package's Python functions a merged block of a tiny FLUX calls.

    The first call of a model, which plans and fills caches, is not counted.
    """
    import torch

    from tokenmerge import token_merging

    found: dict[str, float] = {}
    for kind, config in block_settings().items():
        if config is None:
            continue
        called = []
        for depth in DEPTHS:
            model, arguments = tiny_flux(depth)
            with torch.no_grad(), token_merging(model, config):
                model(**arguments)
                called.append(functions_called(functools.partial(model, **arguments)))
        found[kind] = (called[1] - called[0]) / (DEPTHS[1] - DEPTHS[0])
    return found


def functions_called(run: Callable[[], object]) -> int:
    """Return how many functions of this package ``run`` calls."""
    import tokenmerge

    package = str(Path(tokenmerge.__file__).parent)
    count = 0

    def note(frame: Any, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(package):
            count += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def run(source: Path, calls: int) -> dict[str, float]:
    """Run :func:`microseconds` in a process of its own, with the package of another checkout."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, "-W", "ignore", __file__, "--calls", str(calls), "--print"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="the src folder of another checkout")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", action="store_true", help="measure one merged block")
    parser.add_argument("--record", metavar="NAME", help=f"what --blocks is kept as in {RECORD.name}")
    options = parser.parse_args()
    if options.blocks:
        row = {
            "name": options.record,
            "us_of_a_block": microseconds_of_a_block(options.calls // 20),
            "us_of_arithmetic": microseconds_of_arithmetic(options.calls // 20),
            "functions_of_a_block": functions_of_a_block(),
        }
        print(json.dumps(row))
        if options.record:
            with RECORD.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return
    if options.print:
        print(json.dumps(microseconds(options.calls)))
        return
    sources = {"here": HERE, **({"beside": options.beside} if options.beside else {})}
    rounds = [
        {name: run(source, options.calls) for name, source in sources.items()} for _ in range(options.rounds)
    ]
    for key in rounds[0]["here"]:
        here = statistics.median(one["here"][key] for one in rounds)
        line = f"{key:12} {here:8.0f} µs of CPU a call"
        if options.beside:
            ratios = sorted(one["here"][key] / one["beside"][key] for one in rounds)
            median = statistics.median(ratios)
            spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
            line += f", {median:.3f} of the other checkout ({spread})"
        print(line)


if __name__ == "__main__":
    main()
