"""Facts about host models: where the blocks are, the token grid, the arguments with an entry per token.

``base`` and ``call`` define the classes that hold these facts. ``families`` has the families of models, and
``family`` what they share. ``find`` finds those of a pipeline. Nothing here knows planners or patching.
"""
