"""The entry point of the ``tokenmerge`` command.

Errors become one line on stderr and an exit code, and warnings one line each.
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

import tokenmerge
from tokenmerge.errors import TokenMergingError, reason_of

_PACKAGES = (Path(tokenmerge.__file__).parent, Path(__file__).parent.parent)
_BAD_INPUT = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments, or those of the process, and return the exit code.

    It is 0 for success, 2 for an error that the user can fix, 3 if ``tune`` cannot reach the
    speed-up, 130 after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # replace characters that the terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        with _warnings_in_one_line():
            from tokenmerge_tools.cli.app import run

            code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except TokenMergingError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        # Flushing the rest of the buffer would fail again when Python exits.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        print(f"tokenmerge: system error: {error}; finished results are kept", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        print("tokenmerge: interrupted; finished results are kept", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        from tokenmerge_tools.failures import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        print(
            f"tokenmerge: out of memory ({reason_of(error)}); take a smaller size, batch or model, a "
            "dtype with 16 bits, or close other programs; finished results are kept",
            file=sys.stderr,
        )
        return _BAD_INPUT


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Show each warning of these packages once, without a place in the code."""
    shown: set[str] = set()
    usual = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
        text = f"tokenmerge: warning: {message}"
        if not any(map(Path(filename).is_relative_to, _PACKAGES)):
            usual(message, category, filename, *rest, **named)
        elif text not in shown:
            shown.add(text)
            print(text, file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual
