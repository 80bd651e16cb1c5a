"""``tokenmerge bench``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenmerge.bench.grid import SCOPES, Grid
from tokenmerge.bench.grid_files import preset_names, read_grid, read_preset
from tokenmerge.bench.records import CellRecord
from tokenmerge.bench.runner import Progress, run_grid
from tokenmerge.bench.variants import VARIANTS
from tokenmerge.commands.quiet import quiet_libraries
from tokenmerge.errors import ConfigError
from tokenmerge.pipeline_settings import ATTENTION_CHOICES, DTYPE_CHOICES, SCHEDULER_NAMES

__all__ = ["bench"]

_WIDTH_OF_A_PIPE = 200


def _axis(help: str, *names: str) -> Any:
    return typer.Option(*names, help=f"{help} May be repeated.", rich_help_panel="Axes")


def _shared(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Settings")


def bench(
    preset: Annotated[str | None, typer.Option(help=f"Published table: {', '.join(preset_names())}.")] = None,
    grid: Annotated[Path | None, typer.Option(help="TOML or YAML file with the axes and settings.")] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Results, one JSON line a cell; continued where it exists.")
    ] = Path("outputs/bench.jsonl"),
    model: Annotated[
        list[str] | None,
        _axis("Bundled model, folder, hub id, or geometry:NAME with random weights; @0.5 halves its depth."),
    ] = None,
    size: Annotated[list[str] | None, _axis("WIDTHxHEIGHT or N in pixels.")] = None,
    batch: Annotated[list[int] | None, _axis("Pictures per call.")] = None,
    dtype: Annotated[list[str] | None, _axis(f"{', '.join(DTYPE_CHOICES)}.")] = None,
    attention: Annotated[list[str] | None, _axis(f"{', '.join(ATTENTION_CHOICES)}.")] = None,
    variant: Annotated[
        list[str] | None, _axis(f"{', '.join(VARIANTS)}; or with settings: tome:ratio=0.75,merge_mlp.")
    ] = None,
    ratio: Annotated[list[float] | None, _axis("Fraction of tokens removed.")] = None,
    compile: Annotated[
        bool | None, _shared("Use torch.compile, for dense too.", "--compile/--no-compile")
    ] = None,
    max_downsample: Annotated[int | None, _shared("Deepest level that merges. SDXL needs 2.")] = None,
    scope: Annotated[str | None, _shared(f"What a call is: {', '.join(SCOPES)}.")] = None,
    steps: Annotated[int | None, _shared("Denoising steps.")] = None,
    scheduler: Annotated[str | None, _shared(f"{', '.join(SCHEDULER_NAMES)}, or a class.")] = None,
    guidance: Annotated[float | None, _shared("Guidance scale; above 1 each picture counts twice.")] = None,
    frames: Annotated[int | None, _shared("Frames of a video model.")] = None,
    seed: Annotated[int | None, _shared("Of weights, inputs and noise.")] = None,
    device: Annotated[str | None, _shared("auto, cpu, cuda, cuda:1 or mps.")] = None,
    threads: Annotated[int | None, _shared("Of the CPU.")] = None,
    rounds: Annotated[int | None, _shared("Timed calls of each cell.")] = None,
    warmup: Annotated[int | None, _shared("Untimed calls before them.")] = None,
) -> None:
    """Measure time and memory of dense and merged runs over a grid of settings.

    All cells of a setting take turns; each gets its median and quartiles. A cell that does not fit into
    memory says so, and the run goes on. Ctrl-C keeps what is finished; the same command continues.
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
    return f"[{progress.number}/{progress.total}] {_where(record)} · {_what(record)}: {outcome}{resumed}"


def results_table(records: list[CellRecord]) -> Table:
    """Time, speed-up and memory of each cell; speed-up is t_dense / t with fused attention."""
    table = Table(title="Seconds of a call; speed-up is t_dense / t, dense with fused attention")
    for column in ("setting", "cell"):
        table.add_column(column, overflow="fold")
    for column in ("median (quartiles)", "peak memory", "speed-up", "same attention"):
        table.add_column(column, justify="right")
    for record in records:
        figures = _figures(record) if record.status == "ok" else [record.status.upper(), "", "", ""]
        table.add_row(Text(_where(record)), Text(_what(record)), *figures)
    return table


def _figures(record: CellRecord) -> list[str]:
    if record.median is None or record.iqr is None:
        return ["", "", "", ""]
    low, high = record.iqr
    peak = "" if record.peak_bytes is None else f"{record.peak_bytes / 2**30:.2f} GiB"
    ratios = (record.speedup, record.speedup_same_attention)
    return [
        f"{record.median:.3f} s ({low:.3f} to {high:.3f})",
        peak,
        *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
    ]


def _where(record: CellRecord) -> str:
    c = record.conditions
    return f"{c['model']} {c['scope']} {c['width']}x{c['height']} batch {c['batch']} {c['dtype']}"


def _what(record: CellRecord) -> str:
    compiled = ", compiled" if record.conditions["compile"] else ""
    return f"{record.label}, {record.conditions['attention']}{compiled}"
