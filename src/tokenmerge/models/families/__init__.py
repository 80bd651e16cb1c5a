"""One file for each family of models, with the names of its classes and ``describe(root)`` → :class:`Host`.

Families with few facts share a file. ``find`` imports every file, so none of them may import ``find``.
"""
