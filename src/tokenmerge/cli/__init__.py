"""The command line: parse, call, print. One file for each command; may import everything."""

from tokenmerge.cli.entry import main

__all__ = ["main"]
