"""The command line: parse options, call the library, print results. Each command has its own file.

``tests/test_layering.py`` lists what this package may import.
"""

from tokenmerge_tools.cli.entry import main

__all__ = ["main"]
