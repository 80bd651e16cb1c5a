"""The ``tokenmerge`` command. An error becomes one line on stderr and an exit code."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenmerge.errors import MissingExtraError, TokenMergingError

__all__ = ["main"]

_BAD_INPUT = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows ``tokenmerge``; ``None`` takes them from the process.

    Returns:
        Exit code: 0; 2 for an error that the user can mend; 130 after Ctrl-C.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without a character shows a question mark
            stream.reconfigure(errors="replace")
    try:
        code = _commands(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
        return code
    except TokenMergingError as error:
        print(f"tokenmerge: {error}", file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        # What is left in the buffer would fail once more when Python ends.
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
        print(f"tokenmerge: the system refused: {error}; nothing that was finished is lost", file=sys.stderr)
        return _BAD_INPUT
    except KeyboardInterrupt:
        print("tokenmerge: interrupted; what was finished is kept", file=sys.stderr)
        return _INTERRUPTED


def _commands(arguments: Sequence[str]) -> int:
    if not all(importlib.util.find_spec(package) for package in ("typer", "rich")):
        raise MissingExtraError("diffusers", needed_by="the tokenmerge command")
    from tokenmerge.cli.app import run

    return run(arguments)
