"""These tests need the extra ``paddle``; the main suite, which runs without it, skips them."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ppdiffusers") else ["*.py"]
