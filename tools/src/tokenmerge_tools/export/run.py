"""Exports a denoiser, checks the result against PyTorch, and describes it in a file."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from tokenmerge.api import token_merging
from tokenmerge.config import ToMeConfig
from tokenmerge.config.checks import integer, one_of
from tokenmerge.errors import ConfigError, UnsupportedModelError
from tokenmerge.report import predict
from tokenmerge_tools.export import record
from tokenmerge_tools.export.first_call import DenoiserCall, first_call
from tokenmerge_tools.export.formats import FORMATS
from tokenmerge_tools.export.graph import Plans, onnx_graph, tensors
from tokenmerge_tools.export.plans import TakenPlans
from tokenmerge_tools.export.record import Check, ExportRecord, check_new, new_folder
from tokenmerge_tools.files import write_json
from tokenmerge_tools.method_spec import SPEEDUP, MethodSpec, merging_alone
from tokenmerge_tools.pipelines.call import latent_scale, own_size
from tokenmerge_tools.pipelines.loading import DEFAULT_MODEL, load_pipeline
from tokenmerge_tools.pipelines.meta_model import checked_source
from tokenmerge_tools.pipelines.options import Guidance, Size, picture
from tokenmerge_tools.pipelines.settings import check_guidance, check_size

# Largest accepted difference, as a fraction of the largest output.
LARGEST_DIFFERENCE = 1e-3
# Features that differ by this fraction of their length turn by as much. A cosine similarity of two of them
# then differs by twice as much, and the gap between two similarities by four times as much.
LARGEST_GAP = 4 * LARGEST_DIFFERENCE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export. The settings of token merging must be the same at every denoising step."""

    to: Annotated[str, typer.Option(help=f"{', '.join(FORMATS)}.")]
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the files, which must be new or empty.")
    ]
    model: str = DEFAULT_MODEL
    merging: MethodSpec = dataclasses.field(default_factory=MethodSpec)
    size: Size = None
    batch: Annotated[int, picture("Pictures per call.", parser="integer")] = 1
    guidance: Guidance = None

    def __post_init__(self) -> None:
        one_of(tuple(FORMATS))("to", self.to)
        integer(1)("batch", self.batch)
        check_guidance("guidance", self.guidance)


def export(options: ExportOptions) -> ExportRecord:
    """Export the denoiser of a pipeline."""
    FORMATS[options.to].require()
    check_new(options.out)
    source = checked_source(options.model, options.size, options.merging)

    def call() -> DenoiserCall:
        pipe = load_pipeline(source, torch.float32, torch.device("cpu"))
        pipe.set_progress_bar_config(disable=True)
        size = options.size or own_size(pipe)
        latent = check_size(size, latent_scale(pipe))
        return first_call(pipe, options.batch, options.guidance, size, latent)

    return export_denoiser(call, options.merging, options.out, options.to, options.model)


def export_denoiser(
    make_call: Callable[[], DenoiserCall], merging: MethodSpec, out: Path, to: str = "onnx", model: str = ""
) -> ExportRecord:
    """Export a denoiser with the arguments of one call, whose shapes become fixed.

    ``make_call`` makes the call, with the same weights each time. It is called again after the exported model
    has run. Nothing else should hold its denoiser, which is freed before that.
    """
    form = FORMATS[to]
    form.require()
    with new_folder(out) as folder:
        call = make_call()
        config = settings_of(merging, call)
        report = predict(call.denoiser, config, *call.latent, call.batch)
        other = call.other_arguments()
        with token_merging(call, config) as patch:
            patch.at_size(*call.latent)
            expected = _result(call.denoiser, other)
            graph = onnx_graph(call.denoiser, call.arguments, form.opset)
        arrays = {name: value.numpy() for name, value in zip(graph.inputs, tensors(other), strict=True)}
        about: dict[str, Any] = {
            "denoiser": type(call.denoiser).__name__,
            "size": call.size,
            "latent": call.latent,
            "batch": call.batch,
            "guided": call.do_classifier_free_guidance,
        }
        del call, patch
        form.write(graph.program, folder)
        plans = graph.plans
        del graph
        gc.collect()
        engine = f"{form.packages[0]} {metadata.version(form.packages[0])}"
        (by_itself,) = form.load(folder, (), None)(arrays)
        check = Check(engine, _largest(by_itself - expected), _largest(expected))
        if plans:
            inner = form.load(folder, [name for names in plans for name in names if name], None)(arrays)
            gc.collect()
            check = _with_the_same_plans(check, make_call(), config, other, plans, inner)
        _refuse_different(check)
        found = ExportRecord(
            model=model,
            to=to,
            file=form.file,
            opset=form.opset,
            inputs={name: (value.shape, str(value.dtype)) for name, value in arrays.items()},
            output=(expected.shape, str(expected.dtype)),
            method=merging.to_dict(),
            settings=config,
            merging=report,
            check=check,
            **about,
        )
        write_json(folder / record.FILE, found.to_dict(folder))
    return found


def _without_steps(merging: MethodSpec) -> MethodSpec:
    """Return what can be exported instead of the default method, whose plan follows the steps."""
    if SPEEDUP in merging.changes:
        raise ConfigError(
            "speedup: an exported model is the same at every denoising step, and skips none; give --ratio 0.5"
        )
    return merging_alone(ToMeConfig.ratio, merging.changes)


def settings_of(merging: MethodSpec, call: DenoiserCall) -> ToMeConfig:
    """Return the settings, which must be the same at every step."""
    if merging.needs_model:
        merging = _without_steps(merging)
    config = merging.config(call.denoiser)
    if config.follows_steps:
        raise ConfigError(
            f"{' and '.join(config.over_steps)}: an exported model is the same at every denoising step, and "
            "caches nothing for the next; leave these settings out, or give --ratio 0.5 alone"
        )
    return config


@torch.no_grad()
def _result(model: torch.nn.Module, arguments: dict[str, Any]) -> Any:
    """Return the output of a call as an array."""
    found = model(**arguments, return_dict=False)[0]
    if not isinstance(found, torch.Tensor):
        raise UnsupportedModelError(
            f"model: {type(model).__name__} returns several pictures instead of one tensor, and cannot be "
            "exported yet; take another model"
        )
    return found.numpy()


def _with_the_same_plans(
    plain: Check,
    call: DenoiserCall,
    config: ToMeConfig,
    arguments: dict[str, Any],
    names: Plans,
    inner: list[Any],
) -> Check:
    """Compare the exported model with PyTorch on the same plans, after comparing the plans.

    ``plain`` is the comparison with PyTorch's own plans, ``names`` are the names of the tensors of each plan,
    and ``inner`` is the output of the exported model, followed by the named tensors.
    """
    found, *values = inner
    taken = TakenPlans.read(names, values, LARGEST_GAP)
    with token_merging(call, config) as patch:
        patch.at_size(*call.latent)
        with taken.in_use_of(call.denoiser):
            expected = _result(call.denoiser, arguments)
    plans = {
        "plans": taken.done,
        "other_choices": taken.other_choices,
        "largest_gap": taken.gap,
        "relative_difference_with_own_plans": plain.relative,
        "values": names,
    }
    return Check(plain.engine, _largest(found - expected), _largest(expected), plans)


def _refuse_different(check: Check) -> None:
    """Raise a ConfigError if the exported model differs from PyTorch."""
    if not check.relative <= LARGEST_DIFFERENCE:
        where = " with the same plans" if check.plans else ""
        raise ConfigError(
            f"to: in {check.engine} the exported model differs from PyTorch{where} by {check.relative:.1e} "
            f"of its largest output, more than {LARGEST_DIFFERENCE:g}, so no files were kept; take another "
            "format or method"
        )


def _largest(x: Any) -> float:
    return float(np.abs(x).max())
