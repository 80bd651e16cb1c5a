"""``tokenmerge bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenmerge.cli.quiet import quiet_libraries
from tokenmerge.errors import ConfigError
from tokenmerge.measure.bench.grid import SCOPES, Grid
from tokenmerge.measure.bench.grid_files import preset_names, read_grid, read_preset
from tokenmerge.measure.bench.records import CellRecord
from tokenmerge.measure.bench.runner import Progress, run_grid
from tokenmerge.measure.bench.variants import VARIANTS
from tokenmerge.measure.pipelines.settings import ATTENTION_CHOICES, DTYPE_CHOICES, SCHEDULER_NAMES
from tokenmerge.measure.reporting.tables import call_name, times, what_of

__all__ = ["bench"]

_WIDTH_OF_A_PIPE = 200


def _axis(name: str, help: str) -> Any:
    """An option that may be repeated; ``name`` is that of an axis of a grid, whose default is told."""
    values = ", ".join(map(str, getattr(Grid, name))) or "each model's own"
    return typer.Option(help=f"{help} May be repeated. Default: {values}.", rich_help_panel="Axes")


def _shared(help: str, default: object, *names: str) -> Any:
    return typer.Option(*names, help=f"{help} Default: {default}.", rich_help_panel="Settings")


def bench(
    preset: Annotated[str | None, typer.Option(help=f"Published table: {', '.join(preset_names())}.")] = None,
    grid: Annotated[Path | None, typer.Option(help="TOML or YAML file with the axes and settings.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Results, one JSON line a cell; continued where it exists.")
    ] = Path("outputs/bench.jsonl"),
    model: Annotated[
        list[str] | None,
        _axis(
            "model",
            "Bundled model, folder, hub id, or geometry:NAME with random weights; @0.5 halves its depth.",
        ),
    ] = None,
    size: Annotated[list[str] | None, _axis("size", "WIDTHxHEIGHT or N in pixels.")] = None,
    batch: Annotated[list[int] | None, _axis("batch", "Pictures per call.")] = None,
    dtype: Annotated[list[str] | None, _axis("dtype", f"{', '.join(DTYPE_CHOICES)}.")] = None,
    attention: Annotated[list[str] | None, _axis("attention", f"{', '.join(ATTENTION_CHOICES)}.")] = None,
    variant: Annotated[
        list[str] | None,
        _axis(
            "variants",
            f"{', '.join(VARIANTS)}; or with any setting of ToMeConfig: toma:ratio=0.6, "
            "tome:proportional,scope=block,schedule.ratio=1.4/0.6. tomesd is the package of that name.",
        ),
    ] = None,
    ratio: Annotated[list[float] | None, _axis("ratio", "Fraction of tokens removed.")] = None,
    compile: Annotated[
        bool | None, _shared("Use torch.compile, for dense too.", "no", "--compile/--no-compile")
    ] = None,
    max_downsample: Annotated[
        int | None, _shared("Deepest level that merges. SDXL needs 2.", "the variant's own")
    ] = None,
    scope: Annotated[str | None, _shared(f"What a call is: {', '.join(SCOPES)}.", Grid.scope)] = None,
    steps: Annotated[int | None, _shared("Denoising steps.", Grid.steps)] = None,
    scheduler: Annotated[
        str | None, _shared(f"{', '.join(SCHEDULER_NAMES)}, or a class.", "the model's own")
    ] = None,
    guidance: Annotated[
        float | None, _shared("Guidance scale; above 1 each picture counts twice.", "the model's own")
    ] = None,
    frames: Annotated[int | None, _shared("Frames of a video model of the Wan family.", Grid.frames)] = None,
    seed: Annotated[int | None, _shared("Of weights, inputs and noise.", Grid.seed)] = None,
    device: Annotated[str | None, _shared("auto, cpu, cuda, cuda:1 or mps.", Grid.device)] = None,
    threads: Annotated[int | None, _shared("Of the CPU.", "torch's choice")] = None,
    rounds: Annotated[int | None, _shared("Timed calls of each cell.", Grid.rounds)] = None,
    warmup: Annotated[int | None, _shared("Untimed calls before them.", Grid.warmup)] = None,
) -> None:
    """Measure time and memory of dense and merged runs over a grid of settings.

    All cells of a setting take turns; each gets its median and quartiles. A cell that does not fit into
    memory says so, and the run goes on. Ctrl-C keeps what is finished; the same command continues. Defaults
    are those without a preset and a grid.
    """
    flags = {
        "model": model,
        "size": size,
        "batch": batch,
        "dtype": dtype,
        "attention": attention,
        "variants": variant,
        "ratio": ratio,
        "compile": compile,
        "max_downsample": max_downsample,
        "scope": scope,
        "steps": steps,
        "scheduler": scheduler,
        "guidance": guidance,
        "frames": frames,
        "seed": seed,
        "device": device,
        "threads": threads,
        "rounds": rounds,
        "warmup": warmup,
    }
    if preset is not None and grid is not None:
        raise ConfigError("preset, grid: give one of them; flags change single values of either")
    values = read_preset(preset) if preset is not None else read_grid(grid) if grid is not None else {}
    values |= {name: value for name, value in flags.items() if value not in (None, [])}
    plan = Grid.from_dict(values, where="bench")
    quiet_libraries("tokenmerge bench")
    done: list[CellRecord] = []

    def cell_is_done(progress: Progress) -> None:
        done.append(progress.record)
        _say(_line(progress))

    try:
        run_grid(plan, out, cell_is_done, on_note=lambda note: _say(f"note: {note}"))
    except KeyboardInterrupt:
        _say(f"{len(done)} finished cells are in {out}; the same command continues")
        raise
    finally:
        if done:
            console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE)
            console.print(results_table(done))
    _say(f"{len(done)} cells are in {out}; next: tokenmerge report {out}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _line(progress: Progress) -> str:
    record = progress.record
    figures = _figures(record)
    outcome = f"{figures[0]} {figures[2]}".strip() or f"{record.status}: {record.message}"
    resumed = ", measured before" if progress.resumed else ""
    cell = f"{call_name(record.conditions)} · {what_of(record)}"
    return f"[{progress.number}/{progress.total}] {cell}: {outcome}{resumed}"


def results_table(records: list[CellRecord]) -> Table:
    """Time, speed-up and memory of each cell; speed-up is t_dense / t with fused attention."""
    table = Table(title="Seconds of a call; speed-up is t_dense / t, dense with fused attention")
    for column in ("setting", "cell"):
        table.add_column(column, overflow="fold")
    for column in ("median (quartiles)", "peak memory", "speed-up", "same attention"):
        table.add_column(column, justify="right")
    for record in records:
        figures = _figures(record) if record.status == "ok" else [record.status.upper(), "", "", ""]
        table.add_row(Text(call_name(record.conditions)), Text(what_of(record)), *figures)
    return table


def _figures(record: CellRecord) -> list[str]:
    if record.median is None or record.iqr is None:
        return ["", "", "", ""]
    low, high = record.iqr
    peak = "" if record.peak_bytes is None else f"{record.peak_bytes / 2**30:.2f} GiB"
    return [
        f"{record.median:.3f} s ({low:.3f} to {high:.3f})",
        peak,
        times(record.speedup),
        times(record.speedup_same_attention),
    ]
