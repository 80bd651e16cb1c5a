"""Patching a model, and what runs in a patched one, in four rooms.

A room imports only those below it: ``patching``, ``blocks``, ``memory``, ``steps``. All may import
``errors``, ``ops``, ``config``, ``planners`` and the words of ``models`` (``base``, ``call``,
``placement``), never a family's file.
"""
