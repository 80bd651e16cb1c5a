"""Time models: single steps, generations, CUDA graphs, compiled blocks; and their kernels and images."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from on_gpu.clock import in_turns, time_of_graph, times_of
from on_gpu.models import TINY_FRAMES, TINY_SIDE, Loop, build
from on_gpu.record import Facts, Run
from on_gpu.variants import (
    Context,
    call_step,
    deepcache,
    default,
    generations_in_turns,
    methods,
    speedups,
    stack,
    stacks,
    steps_in_turns,
)
from tokenmerge.default_method import DefaultMethod
from tokenmerge.models.find import find_hosts

GRID_SIZES = (512, 768, 1024)
GRID_BATCHES = (1, 4, 8, 16)
TINY_BATCHES = (1, 2)
GRID_ROUNDS = 3
# What the names of kernels of attention hold.
ATTENTION = ("flash", "fmha", "sdpa", "attention")


def grid(run: Run) -> None:
    """Time one step of Stable Diffusion 1.5 by size and batch, as papers do, and generations."""
    model = _built(run, "sd15", run.half)
    if model is None:
        return
    sizes = (TINY_SIDE,) if run.tiny else GRID_SIZES
    batches = TINY_BATCHES if run.tiny else GRID_BATCHES
    cells = [(size, batch) for batch in batches for size in sizes]
    # The cells with a wanted figure come first.
    cells.sort(key=lambda cell: cell not in ((1024, 1), (768, 8)))
    for size, batch in cells:
        loop = Loop(run, "sd15", model, size, size, batch=batch)
        about = {"size": [size, size], "batch": batch}
        steps_in_turns(run, f"sd15 {size}, batch {batch}", loop, methods(loop), GRID_ROUNDS, **about)
        run.free()
    for size in sizes:
        _time_generations(run, "sd15", model, (size, size), 2)


def transformer(
    run: Run,
    name: str,
    sizes: Mapping[str, tuple[int, int]],
    rounds: Mapping[str, int],
    generations: Mapping[str, int],
    frames: int = 1,
    fewer_blocks: Mapping[str, int] | None = None,
) -> None:
    """Time one step of a transformer in stacks, and generations at some sizes.

    Args:
        run: the record.
        name: of the model.
        sizes: the height and width in pixels by name.
        rounds: the rounds of single steps by size.
        generations: the rounds of whole generations, for some of the sizes.
        frames: of a video.
        fewer_blocks: by size, how many of the blocks are there. All other sizes have all blocks.
    """
    dtype = run.half if name == "sd3" else run.bfloat16
    if run.tiny:
        sizes = {str(TINY_SIDE): (TINY_SIDE, TINY_SIDE)}
    for key, side in sizes.items():
        blocks = (fewer_blocks or {}).get(key)
        model = _built(run, name, dtype, **({} if blocks is None else {"num_layers": blocks}))
        if model is None:
            return
        loop = Loop(run, name, model, *side, TINY_FRAMES if run.tiny and frames > 1 else frames)
        about = {"size": [*side], "frames": frames, "blocks": blocks or "all"}
        steps_in_turns(run, f"{name} {key}", loop, stacks(loop), 2 if run.tiny else rounds[key], **about)
        if run.tiny or key in generations:
            _time_generations(run, name, model, side, generations.get(key, 2), loop, key)
        del loop, model
        run.free()


def _built(run: Run, name: str, dtype: torch.dtype, **changes: Any) -> Any:
    """Return a model, and record what it is. The result is None if it was not built."""
    found: list[Any] = []

    def make() -> Facts:
        found.append(build(run, name, dtype, **changes))
        parameters = sum(own.numel() for own in found[0].parameters())
        return {"parameters": parameters, "dtype": str(dtype), **changes}

    run.measure(f"{name}: build", make, 5, again=True)
    return found[0] if found else None


OF_VIDEO = ("dense", "speed-up 2", "speed-up 3")


def _time_generations(
    run: Run,
    name: str,
    model: Any,
    size: tuple[int, int],
    rounds: int,
    loop: Loop | None = None,
    key: str = "",
) -> None:
    loop = loop or Loop(run, name, model, *size)
    title = f"{name} {key or size[0]}"
    about = {"size": [*size], "guidance": loop.guidance_scale, "solver": type(loop.scheduler).__name__}
    run.measure(f"{title}: fewest tokens that merge", partial(_fewest_tokens, loop), 3)
    video = name == "wan"
    chosen = speedups(loop)
    if video:
        # A round of all variants of a video would take minutes.
        chosen = {variant: chosen[variant] for variant in chosen if variant in OF_VIDEO}
    generations_in_turns(run, title, loop, chosen, rounds, warm_up_steps=2 if video else 6, **about)


def _fewest_tokens(loop: Loop) -> Facts:
    """Return from how many tokens on merging pays here, and the seconds of measuring that."""
    began = time.monotonic()
    found = DefaultMethod.of(loop, find_hosts(loop), 2.0).facts.fewest_tokens
    return {"fewest": [own._asdict() for own in found], "seconds": time.monotonic() - began}


def profile(run: Run) -> None:
    """Count the kernels of one step, and their time by name."""
    for name in ("sd15", "sd3"):
        model = _built(run, name, run.half)
        if model is None:
            continue
        side = TINY_SIDE if run.tiny else 1024
        loop = Loop(run, name, model, side, side)
        merged = methods(loop) | ({} if loop.is_unet else {"stack 0.5": partial(stack, loop, 0.5)})
        for variant, context in merged.items():
            run.measure(f"{name} 1024: {variant}", partial(_kernels, run, loop, context), 2)
        del loop, model
        run.free()


@torch.no_grad()
def _kernels(run: Run, loop: Loop, context: Context) -> Facts:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if run.on_gpu else []
    with context() as patch:
        for index in range(loop.steps_before):
            call_step(loop, patch, index)
        with torch.profiler.profile(activities=kinds) as seen:
            call_step(loop, patch, loop.steps_before)
            if run.on_gpu:
                torch.cuda.synchronize()
    there = [event for event in seen.events() if "CUDA" in str(event.device_type)]
    longest = Counter[str]()
    for event in there:
        longest[event.name[:80]] += event.device_time_total
    of_attention = sum(us for name, us in longest.items() if any(word in name for word in ATTENTION))
    return {
        "kernels": len(there),
        "device_us": round(sum(longest.values())),
        "attention_us": round(of_attention),
        "operations": sum(event.name.startswith("aten::") for event in seen.events()),
        "longest_us": {kernel: round(us) for kernel, us in longest.most_common(12)},
    }


def graphs(run: Run) -> None:
    """Time a whole step as a CUDA graph, in which launching takes no time."""
    model = _built(run, "sd15", run.half)
    if model is None:
        return
    for size in (TINY_SIDE,) if run.tiny else (512, 1024):
        loop = Loop(run, "sd15", model, size, size)
        captured = {
            variant: partial(_time_graph, run, loop, context) for variant, context in methods(loop).items()
        }
        in_turns(run, f"sd15 {size}, one step as a CUDA graph", captured, 2, size=[size, size])
        run.free()


@torch.no_grad()
def _time_graph(run: Run, loop: Loop, context: Context, turn: int) -> Facts:
    """Return the time of a replay. What is drawn at random is the same in each of them."""
    with context() as patch:
        for index in range(loop.steps_before):
            call_step(loop, patch, index)
        again = partial(call_step, loop, patch, loop.steps_before)
        if not run.on_gpu:
            return {**times_of(run, again), "graph": "only on a GPU"}
        again()
        try:
            return {"ms": time_of_graph(run, again)}
        except RuntimeError as error:
            return {"refused": f"{type(error).__name__}: {error}"[:200]}


def pictures(run: Run) -> None:
    """Draw an image with each bundled model, dense and at a speed-up of 2, with seconds on this device."""
    for name in ("emoji-unet", "emoji-mmdit"):
        run.measure(name, partial(_pair, run, name), 6)
        run.free()


def _pair(run: Run, name: str) -> Facts:
    import diffusers
    from PIL import Image, ImageDraw

    from tokenmerge_tools import demo
    from tokenmerge_tools.closeness import psnr
    from tokenmerge_tools.sheets import as_tensor

    of = {"emoji-unet": "StableDiffusionPipeline", "emoji-mmdit": "StableDiffusion3Pipeline"}[name]
    pipe = getattr(diffusers, of).from_pretrained(demo.path(name), torch_dtype=run.half).to(run.device)
    pipe.set_progress_bar_config(disable=True)
    side, steps = (64, 4) if run.tiny else (256, 20)

    def draw() -> Any:
        return pipe(
            "a red apple on a light blue background",
            height=side,
            width=side,
            num_inference_steps=steps,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
        ).images[0]

    drawn = []
    ms = {}
    for variant, context in (("dense", contextlib.nullcontext), ("speed-up 2", partial(default, pipe))):
        with context():
            drawn.append(draw())  # also the warm-up
            ms[variant] = min(times_of(run, draw)["ms"] for _ in range(1 if run.tiny else 3))
    sheet = Image.new("RGB", (2 * side, side + 16), "white")
    for place, (picture, variant) in enumerate(zip(drawn, ms, strict=True)):
        sheet.paste(picture, (place * side, 0))
        ImageDraw.Draw(sheet).text(
            (place * side + 2, side + 2), f"{variant}: {ms[variant] / 1000:.2f} s", "black"
        )
    sheet.save(run.folder / f"gpu-{name}.png")
    closeness = psnr(as_tensor(drawn[1:]), as_tensor(drawn[:1]))
    facts = {"size": side, "steps": steps, "all_ms": ms, "psnr_db": round(float(closeness.mean()), 2)}
    return {**facts, "speedup": round(ms["dense"] / ms["speed-up 2"], 3), "file": f"gpu-{name}.png"}


def compiled(run: Run) -> None:
    """Compile the blocks of a model, and time generations with them."""
    models = {"flux": run.bfloat16, "sdxl": run.half, "sd15": run.half}
    for name, dtype in list(models.items())[: 1 if run.tiny else None]:
        loops: list[Loop] = []
        torch._dynamo.reset()  # graphs that this process made before count against the limit of torch.compile
        run.measure(f"{name}: compile", partial(_compile, run, name, dtype, loops), 30)
        for loop in loops:
            variants: dict[str, tuple[Context, int]] = {
                "dense": (contextlib.nullcontext, loop.steps),
                "speed-up 2": (partial(default, loop), loop.steps),
            }
            if not loop.is_unet and not run.tiny:
                variants["stack 0.5"] = (partial(stack, loop, 0.5), loop.steps)
            generations_in_turns(run, f"{name}, compiled blocks", loop, variants, 2)
        torch._dynamo.reset()
        run.free()


def _compile(run: Run, name: str, dtype: torch.dtype, loops: list[Loop]) -> Facts:
    """Add a loop whose model compiles its blocks when they first run."""
    side = 128 if run.tiny else 1024
    loop = Loop(run, name, build(run, name, dtype), side, side)
    loop.model.compile_repeated_blocks(fullgraph=True, backend="eager" if run.tiny else "inductor")
    loops.append(loop)
    return {"size": [side, side]}


def sdxl(run: Run) -> None:
    """Time one step of SDXL with each method, and generations, also beside DeepCache."""
    model = _built(run, "sdxl", run.half)
    if model is None:
        return
    side = TINY_SIDE if run.tiny else 1024
    loop = Loop(run, "sdxl", model, side, side)
    steps_in_turns(run, f"sdxl {side}", loop, methods(loop), GRID_ROUNDS, size=[side, side])
    rivals: dict[str, tuple[Context, int]] = {
        "DeepCache, every 2nd step": (partial(deepcache, loop, 2), loop.steps),
        "DeepCache, every 3rd step": (partial(deepcache, loop, 3), loop.steps),
    }
    variants = speedups(loop) | rivals
    generations_in_turns(run, f"sdxl {side}", loop, variants, 2, size=[side, side])
