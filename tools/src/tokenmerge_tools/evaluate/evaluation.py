"""The options of an evaluation, and what it draws: planned and checked before any weights are loaded."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

from tokenmerge.config.checks import integer, one_of, optional
from tokenmerge.errors import ConfigError
from tokenmerge.report import predict
from tokenmerge_tools import demo
from tokenmerge_tools.evaluate.distances import DISTANCES, pictures_in
from tokenmerge_tools.evaluate.metrics import METRIC_NAMES, parse_metrics
from tokenmerge_tools.evaluate.picture_store import PictureStore
from tokenmerge_tools.evaluate.prompts import (
    PRESETS,
    PROMPTS_HELP,
    Item,
    built_in_prompts,
    download_prompts,
    items_of,
    read_prompts,
)
from tokenmerge_tools.machine import source_commit, versions
from tokenmerge_tools.pipelines.call import default_frames, draws_videos
from tokenmerge_tools.pipelines.loading import ModelSource, SourceKind, find_model, read_index
from tokenmerge_tools.pipelines.meta_model import check_drawable, check_merging, load_sketch
from tokenmerge_tools.pipelines.options import GenerateOptions, PipelineOptions, image_option, machine, option
from tokenmerge_tools.pipelines.settings import (
    check_size,
    dtype_name,
    resolve_device,
    resolve_dtype,
    scheduler_class_name,
)
from tokenmerge_tools.records.kinds import key_of
from tokenmerge_tools.variants.variant import (
    DENSE,
    EVERY_RIVAL,
    FEWER_STEPS,
    VARIANTS,
    Variant,
    parse_variant,
)

_SMALLEST_SIDE = 11  # in pixels, the window of SSIM
CHOICES = (*(name for name, kind in VARIANTS.items() if kind.is_faster), EVERY_RIVAL, FEWER_STEPS)
_WEIGHTS = (".safetensors", ".bin", ".json", ".txt")


# What a preset sets, unless it is given.
OF_PRESET = {
    "variants": ("auto", FEWER_STEPS, EVERY_RIVAL),
    "metrics": ("lpips", "clip-score", "image-reward"),
    "limit": 200,
}
_prompts, _compared, _results = (partial(option, panel) for panel in ("Prompts", "Compared", "Results"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PipelineOptions):
    """The options of ``tokenmerge evaluate``, checked before anything is loaded."""

    prompts: Annotated[Path | None, _prompts(PROMPTS_HELP)] = None
    preset: Annotated[
        str | None,
        _prompts(
            f"Protocol of papers: {', '.join(PRESETS)}. Prompts come from the hub, or from --prompts. It "
            "compares auto, fewer steps and all rivals on 200 prompts, by lpips, clip-score and image-reward."
        ),
    ] = None
    limit: Annotated[int | None, _prompts("Use only the first N prompts.", parser="integer")] = None
    every_nth: Annotated[int, _prompts("Of these, use only every N-th.", parser="integer")] = 1
    seeds: Annotated[int, _prompts("Images per prompt.", parser="integer")] = 1
    seed: Annotated[
        int, _prompts("Seed of the first image of each prompt; each later one adds 1.", parser="integer")
    ] = 0
    variants: Annotated[
        tuple[str, ...],
        _compared(
            f"{', '.join(CHOICES)}; or one of them with settings of ToMeConfig, such as toma:ratio=0.6 or "
            "tome:proportional,scope=block,reuse.every=2. tomesd is the package of that name. rivals are all "
            "other packages and papers; RIVAL:all and rivals:all have weaker and stronger settings too.",
            "--variant",
        ),
    ] = ("auto", "tome", "fewer-steps")
    speedup: Annotated[tuple[float, ...], _compared("Speed-up that auto should reach.")] = (1.5, 2.0, 3.0)
    ratio: Annotated[tuple[float, ...], _compared("Fraction of tokens that the other methods remove.")] = (
        0.25,
        0.5,
    )
    metrics: Annotated[
        tuple[str, ...],
        _compared(
            f"In addition to psnr and ssim: {', '.join(METRIC_NAMES[2:])}. NAME=NETWORK uses the network in "
            "a folder or with a hub id.",
            "--metric",
        ),
    ] = ()
    reference: Annotated[
        Path | None,
        _compared("Folder of images that fid and kid compare with. Default: the dense images."),
    ] = None
    frames: Annotated[
        int | None,
        image_option(
            "Frames of a video, for a model that draws videos. Default: the pipeline's.", parser="integer"
        ),
    ] = None
    out: Annotated[
        Path,
        _results(
            "Results file, one JSON line per record. Images go to a folder of the same name.", "--out", "-o"
        ),
    ] = Path("outputs/evaluate.jsonl")
    samples: Annotated[int, _results("How many prompts the report shows.", parser="integer")] = 4
    batch: Annotated[
        int, machine("Images per call. It changes the images only by rounding.", parser="integer")
    ] = 4
    timed: Annotated[
        bool,
        machine(
            "Time each image. --untimed is for a busy machine: it counts the operations of rivals in each "
            "image instead of in one.",
            "--timed/--untimed",
        ),
    ] = True

    def __post_init__(self) -> None:
        self.drawing("a prompt")
        for name, lowest in (("limit", 1), ("every_nth", 1), ("seeds", 1), ("samples", 0), ("frames", 2)):
            optional(integer(lowest))(name, getattr(self, name))
        self.specs()
        wanted = self.wanted()
        if self.reference is not None and not wanted.keys() & set(DISTANCES):
            raise ConfigError("reference: only fid and kid compare with it; add --metric fid or --metric kid")
        optional(one_of(tuple(PRESETS)))("preset", self.preset)
        if self.uses_own_prompts and self.model not in demo.NAMES:
            raise ConfigError(
                f"prompts: only bundled models ({', '.join(demo.NAMES)}) have their own; give --prompts with "
                "a file, one prompt per line, or --preset"
            )
        if self.out.suffix != ".jsonl":
            raise ConfigError(f"out: expected a file ending in .jsonl, got {self.out}")

    @property
    def uses_own_prompts(self) -> bool:
        """Whether the prompts are those of the bundled models."""
        return self.prompts is None and self.preset is None

    def drawing(self, prompt: str) -> GenerateOptions:
        """Return the options of ``tokenmerge generate`` for drawing a prompt."""
        shared = [field.name for field in dataclasses.fields(PipelineOptions)]
        values = {name: getattr(self, name) for name in (*shared, "seed", "batch")}
        return GenerateOptions(prompt=prompt, **values)

    def specs(self) -> list[Variant]:
        """Return the variants. ``fewer-steps`` is one of them, however many variants it is compared with."""
        return parse_variants(self.variants, self.ratio, self.speedup)

    def wanted(self) -> dict[str, str | None]:
        """Return the metrics with their networks. The built-in prompts add the retrieval of glyphs."""
        return parse_metrics(self.metrics) | ({"glyphs": None} if self.uses_own_prompts else {})

    def read_prompts(self) -> list[str]:
        """Return the prompts to draw."""
        if self.prompts is not None:
            found = read_prompts(self.prompts)
        else:
            found = built_in_prompts() if self.preset is None else download_prompts(self.preset, self.limit)
        return found[: self.limit][:: self.every_nth]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What an evaluation draws, and where.

    The size is (width, height) in pixels, and dense is the first variant. ``frames`` is the length of videos,
    or None if images are drawn. ``reference`` is the folder that FID and KID compare with, or None if they
    compare with the dense images. ``counted`` has the speed-up by operations of each label for which it is
    known without a run. ``left_out`` has the reason for each rival that does not run here.
    """

    source: ModelSource
    size: tuple[int, int]
    dtype: torch.dtype
    prompts: tuple[str, ...]
    items: tuple[Item, ...]
    variants: tuple[Variant, ...]
    store: PictureStore
    frames: int | None = None
    reference: Path | None = None
    counted: Mapping[str, float] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plan_evaluation(options: EvaluateOptions, device: torch.device) -> Evaluation:
    """Read the prompts and the model's configs, and look for the reference images."""
    prompts = options.read_prompts()
    if options.reference is not None:
        pictures_in(options.reference)
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
            if options.size is not None:
                check_drawable(sketch, size)
            for method in (spec.merging for spec in specs):
                if method is not None:
                    check_merging(sketch, size, method)
    if size is None:
        raise ConfigError("size: this model has no default size; give --size")
    if min(size) < _SMALLEST_SIDE:
        raise ConfigError(f"size: SSIM needs at least {_SMALLEST_SIDE} pixels, got {size[0]}x{size[1]}")
    frames = _frames(source, options.frames)
    same = ("model", "steps", "attention", "scheduler", "guidance")
    conditions = {
        **{name: getattr(options, name) for name in same},
        "weights": weights_key(source),
        "width": size[0],
        "height": size[1],
        "dtype": dtype_name(dtype),
        "device": device.type,
        "versions": versions(),
        "commit": source_commit(),
        **({} if frames is None else {"frames": frames}),
        **({"device_name": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
    }
    known: dict[str, float] = {}
    if sketch is not None and FEWER_STEPS in [spec.name for spec in specs]:
        width, height = check_size(size, sketch.scale)
        facts = {"height": height, "width": width, "steps": options.steps}
        for spec in specs:
            config = spec.config(sketch.pipeline, guidance=options.guidance, follows_steps=True, **facts)
            if config is not None:
                known[spec.label] = predict(sketch.denoiser, config, height, width, 2, options.steps).speedup
    variants = plan_variants(specs, options.steps, list(known.values()) or options.speedup)
    known |= {v.label: options.steps / v.steps(options.steps) for v in variants if v.name == FEWER_STEPS}
    return Evaluation(
        source=source,
        size=size,
        dtype=dtype,
        prompts=tuple(prompts),
        items=tuple(items_of(prompts, range(options.seed, options.seed + options.seeds))),
        variants=tuple(variants),
        store=PictureStore(options.out, conditions),
        frames=frames,
        reference=options.reference,
        counted=known,
    )


def parse_variants(texts: Sequence[str], ratios: Sequence[float], speedups: Sequence[float]) -> list[Variant]:
    """Read the variants to compare with dense. They keep their order, and each appears once."""
    specs: list[Variant] = []
    for text in texts:
        name = text.partition(":")[0]
        if name not in (*CHOICES, DENSE):
            raise ConfigError(f"variant: expected some of {', '.join(CHOICES)}, got {name!r}")
        if name != EVERY_RIVAL and (missing := VARIANTS[name].missing()):
            raise ConfigError(f"variant {name}: {missing}; or leave it out")
        specs += parse_variant(text, ratios, speedups)
    found = list(dict.fromkeys(spec for spec in specs if spec.name != DENSE))
    if FEWER_STEPS in [spec.name for spec in found] and len(found) == 1:
        raise ConfigError("variant: fewer-steps needs a merged variant to compare with; give one too")
    return found


def plan_variants(specs: Sequence[Variant], steps: int, speedups: Sequence[float]) -> list[Variant]:
    """List dense, the variants, and ``fewer-steps`` for each speed-up if it is requested."""
    merged = [spec for spec in specs if VARIANTS[spec.name].is_faster]
    found = [Variant(DENSE), *merged]
    if len(merged) < len(specs):
        numbers = dict.fromkeys(max(1, round(steps / speedup)) for speedup in speedups)
        found += [Variant(FEWER_STEPS, (("steps", n),)) for n in numbers if n < steps]
    return found


def _frames(source: ModelSource, wanted: int | None) -> int | None:
    """Return the number of frames of the videos that a model draws, or None if it draws images."""
    import diffusers

    name = None if source.kind is SourceKind.CHECKPOINT else read_index(source).get("_class_name")
    pipeline = getattr(diffusers, str(name), None)
    if pipeline is not None and draws_videos(pipeline):
        return default_frames(pipeline) if wanted is None else wanted
    if wanted is not None:
        raise ConfigError(f"frames: {name or 'a single checkpoint'} draws images; leave --frames out")
    return None


def weights_key(source: ModelSource) -> str | None:
    """Make a key from the sizes and modification times of a model's files, or from the commit of a hub model.

    The configs of a hub model must have been read before. A bundled model has no key, since its weights
    belong to the version of this package.
    """
    if source.kind is SourceKind.DEMO:
        return None
    if source.kind is SourceKind.HUB:
        from huggingface_hub import try_to_load_from_cache

        # The path is …/snapshots/COMMIT/model_index.json.
        index = try_to_load_from_cache(source.location, "model_index.json")
        return Path(index).parent.name if isinstance(index, str) else None
    place = Path(source.location)
    files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix in _WEIGHTS)
    found = {f.relative_to(place).as_posix(): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}
    return key_of(found)


def dry_run(options: EvaluateOptions, seconds: float | None) -> list[str]:
    """Return lines about what a run would draw.

    ``seconds`` is the time of a dense image. If it is None, it is the median of the dense images that an
    earlier run of the same command timed.
    """
    evaluation = plan_evaluation(options, resolve_device(options.device))
    store = evaluation.store
    items = evaluation.items
    variants = evaluation.variants
    left = {v: sum(not store.picture(v, item).exists() for item in items) for v in variants}
    total = len(items) * len(variants)
    images = "videos" if evaluation.frames else "images"
    lines = [
        f"{len(variants)} variants × {len(evaluation.prompts)} prompts × {options.seeds} seeds: {total:,} "
        f"{images}, of which {sum(left.values()):,} are not drawn yet",
    ]
    origin = "given"
    if seconds is None:
        dense = (item for item in items if store.picture(variants[0], item).exists())
        seconds_of_dense = [store.seconds(variants[0], item) for item in dense]
        timed = [one for one in seconds_of_dense if math.isfinite(one)]
        if not timed:
            return [
                *lines,
                "how long they take is unknown: give --seconds-per-picture, or run the same command with "
                "--limit 1 first, which times a dense image",
            ]
        seconds = statistics.median(timed)
        origin = f"measured on {len(timed)} {images}"
    hours = sum(n * seconds / evaluation.counted.get(v.label, 1.0) for v, n in left.items()) / 3600
    guessed = [v.label for v in variants[1:] if v.label not in evaluation.counted]
    return [
        *lines,
        f"{hours:.3g} hours on this device, at {seconds:.3g} s for a dense image ({origin})",
        *([f"reckoned as slow as dense: {', '.join(guessed)}"] if guessed else []),
    ]
