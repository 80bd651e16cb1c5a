"""The tools of tokenmerge, which use the library only by the public modules that a layering test lists."""

__version__ = "0.1.0"
