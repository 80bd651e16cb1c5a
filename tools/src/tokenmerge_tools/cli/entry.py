"""The entry point of the ``tokenmerge`` command.

Each error becomes one line on stderr and an exit code, and each warning becomes one line. The libraries take
seconds to load, so this module first prints a message and then imports them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BAD_INPUT = 2
# Commands that load PyTorch and diffusers, and then a model.
_SLOW = ("generate", "inspect", "bench", "evaluate", "tune", "export", "play")
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments, or those of the process, and return the exit code.

    It is 0 for success, 2 for an error that the user can fix, 3 if ``tune`` cannot reach its
    goal, 130 after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # replace characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in _SLOW and "--help" not in given and sys.stderr.isatty():
        print("Loading PyTorch and diffusers …", file=sys.stderr, flush=True)
    try:
        return _run(given)
    except KeyboardInterrupt:  # while the libraries load
        print("tokenmerge: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(arguments: Sequence[str]) -> int:
    """Run the command line, and return the exit code."""
    from tokenmerge.errors import TokenMergingError, reason_of
    from tokenmerge_tools.files import results_written

    before = results_written()

    def kept() -> str:
        return "; finished results are kept" if results_written() > before else ""

    try:
        with _warnings_in_one_line():
            from tokenmerge_tools.cli.app import run

            code = run(arguments)
        sys.stdout.flush()
        return code
    except TokenMergingError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        # Flushing the rest of the buffer would fail again when Python exits.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        print(f"tokenmerge: system error: {error}{kept()}", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        print(f"tokenmerge: interrupted{kept()}", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        from tokenmerge_tools.failures import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print(
            f"tokenmerge: out of memory ({reason_of(error)}); take a smaller size, batch or model, a "
            f"dtype with 16 bits, or close other programs{kept()}",
            file=sys.stderr,
        )
        return _BAD_INPUT


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show each warning of these packages once, without the line of code that it comes from."""
    import tokenmerge

    packages = (Path(tokenmerge.__file__).parent, Path(__file__).parent.parent)
    shown: set[str] = set()
    usual = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
        text = f"tokenmerge: warning: {message}"
        if not any(map(Path(filename).is_relative_to, packages)):
            usual(message, category, filename, *rest, **named)
        elif text not in shown:
            shown.add(text)
            print(text, file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
