"""The tools of tokenmerge: the command line, and what it loads, draws, times, judges and reports with.

They use the library only by its public modules; ``tools/tests/test_layering.py`` lists them.
"""

__version__ = "0.1.0"
