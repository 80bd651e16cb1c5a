"""``tokenmerge bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmerge.config.checks import one_of, optional
from tokenmerge.errors import ConfigError
from tokenmerge_tools.bench.grid import PRESETS, BenchOptions, read_grid
from tokenmerge_tools.bench.runner import CellProgress, run_grid
from tokenmerge_tools.cli import terminal
from tokenmerge_tools.cli.arguments import takes
from tokenmerge_tools.pipelines.loading import quiet_libraries
from tokenmerge_tools.pipelines.options import option
from tokenmerge_tools.records.kinds import CellRecord
from tokenmerge_tools.reporting.tables import call_name, measured_tables, times, what_of


@takes(BenchOptions, all_optional=True)
def bench(
    preset: Annotated[
        str | None, typer.Option(help=f"Repeat the grid of a published table: {', '.join(PRESETS)}.")
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(help="TOML file with the variants, sizes and other values; options override them."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Results file, one JSON line per measurement; continued if it exists."
        ),
    ] = Path("outputs/bench.jsonl"),
    *,
    given: dict[str, Any],
    compile: Annotated[
        bool | None,
        option("Settings", "Use torch.compile, also for dense. Default: no.", "--compile/--no-compile"),
    ] = None,
) -> None:
    """Measure time and memory of single calls of the denoiser, dense and merged.

    To time whole images, use tokenmerge evaluate. A variant is a method with its settings. At each size,
    batch and dtype, the calls of all variants take turns, and the median and quartiles of each variant are
    printed. A variant that runs out of memory is marked, and the others continue. After Ctrl-C, run the same
    command again to continue. The defaults below apply to options that neither a preset nor a grid file sets.
    """
    if compile is not None:
        given["compile"] = compile
    optional(one_of(tuple(PRESETS)))("preset", preset)
    if preset is not None and grid is not None:
        raise ConfigError("preset, grid: give only one of them; flags override single values")
    path = grid if preset is None else PRESETS[preset]
    options = BenchOptions.from_dict(({} if path is None else read_grid(path)) | given, where="bench")
    quiet_libraries("tokenmerge bench")
    done: list[CellRecord] = []

    def cell_is_done(progress: CellProgress) -> None:
        done.append(progress.record)
        terminal.say(_line(progress))

    try:
        run_grid(options, out, cell_is_done, on_note=lambda note: terminal.say(f"note: {note}"))
    except KeyboardInterrupt:
        terminal.say(f"{len(done)} finished cells are in {out}; run the same command again to continue")
        raise
    finally:
        for table in measured_tables(done):
            terminal.show(table)
    terminal.say(f"{len(done)} cells are in {out}; next: tokenmerge report {out}")


def _line(progress: CellProgress) -> str:
    record = progress.record
    time = "" if record.median is None else f"{record.median:.3f} s {times(record.speedup)}"
    outcome = time.strip() or f"{record.status}: {record.message}"
    resumed = ", measured before" if progress.resumed else ""
    cell = f"{call_name(record.conditions)} · {what_of(record)}"
    return f"[{progress.number}/{progress.total}] {cell}: {outcome}{resumed}"
