"""Patching a model, and what runs in a patched one: hooks, merging around a call, caches, step tracking.

``patch`` is the only file that changes a module. May import ``ops``, ``config``, ``planners`` and the words
of ``models`` (``base``, ``layout``, ``call``), never a family's file.
"""
