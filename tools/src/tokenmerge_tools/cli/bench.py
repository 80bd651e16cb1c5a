"""``tokenmerge bench``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.geometry import PREFIX
from tokenmerge_tools.bench.grid import SCOPES, BenchOptions, preset_names, read_grid, read_preset
from tokenmerge_tools.bench.runner import CellProgress, run_grid
from tokenmerge_tools.cli import tables
from tokenmerge_tools.cli.merging import warn_of_differences
from tokenmerge_tools.cli.quiet import quiet_libraries
from tokenmerge_tools.pipelines.settings import ATTENTION_HELP, DTYPE_CHOICES, SCHEDULER_NAMES
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.tables import call_name, measured_tables, times, what_of
from tokenmerge_tools.settings_file import variant_of_file
from tokenmerge_tools.variants.variant import VARIANTS


def _axis(name: str, help: str) -> Any:
    """Make an option that may be repeated. ``name`` is the axis of :class:`BenchOptions` with its default."""
    values = ", ".join(map(str, getattr(BenchOptions, name))) or "each model's own"
    return typer.Option(help=f"{help} May be repeated. Default: {values}.", rich_help_panel="Axes")


def _shared(help: str, default: object, *names: str) -> Any:
    return typer.Option(*names, help=f"{help} Default: {default}.", rich_help_panel="Settings")


def bench(
    preset: Annotated[
        str | None, typer.Option(help=f"Repeat a published table: {', '.join(preset_names())}.")
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="TOML or YAML file with the axes and settings.")] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Results file, one JSON line per cell; continued if it exists."),
    ] = Path("outputs/bench.jsonl"),
    model: Annotated[
        list[str] | None,
        _axis(
            "model",
            "Bundled model, folder, hub id, or geometry:NAME for random weights; @0.5 halves its layers.",
        ),
    ] = None,
    size: Annotated[list[str] | None, _axis("size", "WIDTHxHEIGHT, or N for a square, in pixels.")] = None,
    batch: Annotated[list[int] | None, _axis("batch", "Pictures per call.")] = None,
    dtype: Annotated[list[str] | None, _axis("dtype", f"{', '.join(DTYPE_CHOICES)}.")] = None,
    attention: Annotated[list[str] | None, _axis("attention", ATTENTION_HELP)] = None,
    variant: Annotated[
        list[str] | None,
        _axis(
            "variants",
            f"{', '.join(VARIANTS)}; or one of them with settings of ToMeConfig, such as toma:ratio=0.6 or "
            "tome:proportional,scope=block,schedule.ratio=1.4/0.6. tomesd is the package of that name.",
        ),
    ] = None,
    settings: Annotated[
        list[Path] | None,
        typer.Option(
            help="File of settings, such as that of tokenmerge tune, as another variant. May be repeated.",
            rich_help_panel="Axes",
        ),
    ] = None,
    ratio: Annotated[list[float] | None, _axis("ratio", "Fraction of tokens removed.")] = None,
    compile: Annotated[
        bool | None, _shared("Use torch.compile, also for dense.", "no", "--compile/--no-compile")
    ] = None,
    max_downsample: Annotated[int | None, _shared("Deepest level that merges.", "the variant's own")] = None,
    scope: Annotated[
        str | None, _shared(f"What one call covers: {', '.join(SCOPES)}.", BenchOptions.scope)
    ] = None,
    steps: Annotated[int | None, _shared("Denoising steps.", BenchOptions.steps)] = None,
    scheduler: Annotated[
        str | None, _shared(f"{', '.join(SCHEDULER_NAMES)}, or a class name in diffusers.", "the model's own")
    ] = None,
    guidance: Annotated[
        float | None,
        _shared("Guidance scale; above 1, the denoiser's batch is doubled.", "the model's own"),
    ] = None,
    frames: Annotated[
        int | None, _shared("Frames of a video model of the Wan family.", BenchOptions.frames)
    ] = None,
    seed: Annotated[int | None, _shared("Seed of weights, inputs and noise.", BenchOptions.seed)] = None,
    device: Annotated[str | None, _shared("auto, cpu, cuda, cuda:1 or mps.", BenchOptions.device)] = None,
    threads: Annotated[int | None, _shared("CPU threads.", "torch's choice")] = None,
    rounds: Annotated[int | None, _shared("Timed calls of each cell.", BenchOptions.rounds)] = None,
    warmup: Annotated[int | None, _shared("Untimed calls before them.", BenchOptions.warmup)] = None,
) -> None:
    """Measure time and memory of dense and merged runs over a grid of settings.

    A cell is one variant at one setting. The calls of all cells of a setting are interleaved, and each cell
    reports its median and quartiles. A cell that runs out of memory is marked, and the benchmark continues.
    To continue after Ctrl-C or a kill, run the same command again. The defaults below apply if neither a
    preset nor a grid file is given.
    """
    flags = {name: value for name, value in locals().items() if value not in (None, [])}
    if variant or settings:
        flags["variants"] = [*(variant or ()), *map(variant_of_file, settings or ())]
    if preset is not None and grid is not None:
        raise ConfigError("preset, grid: give only one of them; flags override single values")
    values = read_preset(preset) if preset is not None else read_grid(grid) if grid is not None else {}
    axes_and_settings = {field.name for field in dataclasses.fields(BenchOptions)}
    values |= {name: value for name, value in flags.items() if name in axes_and_settings}
    options = BenchOptions.from_dict(values, where="bench")
    quiet_libraries("tokenmerge bench")
    for file in settings or ():
        for name in options.model:
            # Settings are never found for a geometry or a part of a model.
            if not name.startswith(PREFIX) and "@" not in name:
                for one in options.size or (None,):
                    warn_of_differences(file, name, one, options.steps)
    done: list[CellRecord] = []

    def cell_is_done(progress: CellProgress) -> None:
        done.append(progress.record)
        tables.say(_line(progress))

    try:
        run_grid(options, out, cell_is_done, on_note=lambda note: tables.say(f"note: {note}"))
    except KeyboardInterrupt:
        tables.say(f"{len(done)} finished cells are in {out}; run the same command again to continue")
        raise
    finally:
        for table in measured_tables(done):
            tables.show(tables.as_rich(table), *(f"note: {note}" for note in table.notes))
    tables.say(f"{len(done)} cells are in {out}; next: tokenmerge report {out}")


def _line(progress: CellProgress) -> str:
    record = progress.record
    time = "" if record.median is None else f"{record.median:.3f} s {times(record.speedup)}"
    outcome = time.strip() or f"{record.status}: {record.message}"
    resumed = ", measured before" if progress.resumed else ""
    cell = f"{call_name(record.conditions)} · {what_of(record)}"
    return f"[{progress.number}/{progress.total}] {cell}: {outcome}{resumed}"
