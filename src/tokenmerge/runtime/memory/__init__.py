"""What outlives a call of a patched model, what holds for one call, and who owns it.

``state`` has the facts about a patched model and its parts, ``context`` what holds for one call, and
``caches`` what a generation keeps.
"""
