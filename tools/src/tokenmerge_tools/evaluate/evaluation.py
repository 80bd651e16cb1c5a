"""Plans and checks what an evaluation draws, before any weights are loaded."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import torch

from tokenmerge.errors import ConfigError
from tokenmerge.report import counted_speedup
from tokenmerge_tools.bench.commit import source_commit
from tokenmerge_tools.evaluate.drawn import Drawn, plan_variants
from tokenmerge_tools.evaluate.options import EvaluateOptions
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import Item, Prompt, items_of
from tokenmerge_tools.evaluate.weights import weights_key
from tokenmerge_tools.machine import versions
from tokenmerge_tools.pipelines.call import default_frames, draws_videos
from tokenmerge_tools.pipelines.checks import check_merging
from tokenmerge_tools.pipelines.loading import ModelSource, SourceKind, find_model, read_index
from tokenmerge_tools.pipelines.meta_model import ModelSketch, load_sketch
from tokenmerge_tools.pipelines.settings import dtype_name, resolve_dtype, scheduler_class_name
from tokenmerge_tools.pipelines.sizes import check_size
from tokenmerge_tools.variants.variant import Variant

_SMALLEST_SIDE = 11  # pixels, the window of SSIM
_FILES = (".png", ".jpg", ".jpeg", ".webp")


@dataclasses.dataclass(frozen=True)
class Reference:
    """At least two reference pictures for FID and KID."""

    folder: Path
    pictures: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation draws, and where.

    The size is (width, height) in pixels, and dense is the first variant. ``frames`` is the length of videos;
    None: pictures are drawn. Without reference pictures, FID and KID compare with the dense ones.
    """

    source: ModelSource
    size: tuple[int, int]
    dtype: torch.dtype
    prompts: tuple[Prompt, ...]
    items: tuple[Item, ...]
    variants: tuple[Drawn, ...]
    store: PictureStore
    reference: Reference | None
    frames: int | None = None


def plan_evaluation(options: EvaluateOptions, device: torch.device) -> Evaluation:
    """Read the prompts, the model's configs and the list of reference pictures.

    Raises:
        TokenMergingError: an option does not fit the model or the machine, or nothing would merge.
    """
    prompts = options.read_prompts()
    reference = None if options.reference is None else _pictures_in(options.reference)
    source = find_model(options.model)
    dtype = resolve_dtype(options.dtype, device)
    if options.scheduler is not None:
        scheduler_class_name(options.scheduler)
    specs = options.specs()
    size = options.size
    sketch = None
    if source.kind is not SourceKind.CHECKPOINT:
        sketch = load_sketch(source)
        size = size or sketch.size
        if size is not None:
            check_size(size, sketch.scale)
            for method in (spec.merging for spec in specs):
                if method is not None:
                    check_merging(sketch, size, method)
    if size is None:
        raise ConfigError("size: this model has no default size; give --size")
    if min(size) < _SMALLEST_SIDE:
        raise ConfigError(f"size: SSIM needs at least {_SMALLEST_SIDE} pixels, got {size[0]}x{size[1]}")
    frames = _frames(source, options.frames)
    conditions = {
        "model": options.model,
        "weights": weights_key(source),
        "width": size[0],
        "height": size[1],
        "steps": options.steps,
        "attention": options.attention,
        "scheduler": options.scheduler,
        "guidance": options.guidance,
        "dtype": dtype_name(dtype),
        "device": device.type,
        "versions": versions(),
        "commit": source_commit(),
        **({} if frames is None else {"frames": frames}),
    }
    return Evaluation(
        source=source,
        size=size,
        dtype=dtype,
        prompts=tuple(prompts),
        items=tuple(items_of(prompts, range(options.seed, options.seed + options.seeds))),
        variants=tuple(
            plan_variants(
                specs,
                options.steps,
                conditions,
                options.out.parent,
                partial(_counted, sketch, size, options.steps),
            )
        ),
        store=PictureStore(options.out, conditions),
        reference=reference,
        frames=frames,
    )


def _frames(source: ModelSource, wanted: int | None) -> int | None:
    """Number of frames of the videos that a model draws; None: it draws pictures.

    Raises:
        ConfigError: a number is given but the model draws pictures, or none is given and there is no default.
    """
    import diffusers

    name = None if source.kind is SourceKind.CHECKPOINT else read_index(source).get("_class_name")
    pipeline = getattr(diffusers, str(name), None)
    if pipeline is not None and draws_videos(pipeline):
        return default_frames(pipeline) if wanted is None else wanted
    if wanted is not None:
        raise ConfigError(f"frames: {name or 'a single checkpoint'} draws pictures; leave --frames out")
    return None


def _counted(sketch: ModelSketch | None, size: tuple[int, int], steps: int, variant: Variant) -> float | None:
    """Speed-up of a variant by counted operations; None if they cannot be counted."""
    if sketch is None or variant.merging is None:
        return None
    width, height = check_size(size, sketch.scale)
    config = variant.merging.config(sketch.denoiser, follows_steps=True)
    return counted_speedup(sketch.denoiser, config, height, width, steps=steps)


def _pictures_in(folder: Path) -> Reference:
    """Find all pictures in a folder and its subfolders."""
    # A leading dot marks hidden files, and pictures that are still being written.
    found = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in _FILES and not path.name.startswith(".")
    )
    if len(found) < 2:
        raise ConfigError(
            f"reference: expected a folder with at least 2 pictures ({', '.join(_FILES)}), got {folder} with "
            f"{len(found)}"
        )
    return Reference(folder, tuple(found))
