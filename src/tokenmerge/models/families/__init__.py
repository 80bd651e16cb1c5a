"""One file for each family of models, with the names of its classes and ``describe(root)`` → :class:`Host`.

``find`` imports every file here. A file may import the modules of ``models`` and other families, but not
``find``.
"""
