"""The command line: parse options, call the library, print results. Each command has its own file.

May import everything.
"""

from tokenmerge.cli.entry import main

__all__ = ["main"]
