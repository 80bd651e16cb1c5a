"""The tools of tokenmerge, which use the library only by the public modules that a layering test lists."""

from tokenmerge import __version__

__all__ = ["__version__"]
