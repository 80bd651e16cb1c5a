"""One file for each family of models, with the names of its classes and ``describe(root)`` → :class:`Host`.

A file may import the modules of ``models`` and other families, but not ``find``.
"""
