"""The command line: parse options, call the library, print results. Each command has its own file.

May import what its line in ``tests/test_layering.py`` lists.
"""

from tokenmerge.cli.entry import main

__all__ = ["main"]
