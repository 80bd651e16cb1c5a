"""One file for each family of models: the names of its classes, and ``describe(root)`` → its facts.

A file may import what stands beside this folder in ``models``, but not ``find``.
"""
