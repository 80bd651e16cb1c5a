"""Patching a model, and what runs in a patched one: hooks, merging around a call, caches, step tracking.

``patch`` patches and restores whole models with ``select`` and ``swap``; only ``swap`` changes classes.
``hooks`` builds the ``context`` of a call, and ``forward`` has the methods that blocks and layers get.
``state`` holds facts and a place for each thread, ``caches`` what outlives a call.

May import ``errors``, ``ops``, ``config``, ``planners`` and the words of ``models`` (``base``, ``layout``,
``call``, ``parallel``), never a family's file.
"""
