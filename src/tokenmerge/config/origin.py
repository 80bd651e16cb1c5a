"""Where settings came from, for messages: users know what they gave, and not what a method chose for them."""

from __future__ import annotations

DEFAULT = "speedup"  # the argument that asks for the default method
RATIO = "ratio"  # the name of token merging alone


def is_default(method: str) -> bool:
    """Return whether settings with this name are those of the default method.

    >>> is_default("speedup=2, min_psnr=35"), is_default("speedup.json")
    (True, False)
    """
    return method.partition("=")[0] == DEFAULT


def named(method: str, given: str) -> str:
    """Return how a message names a setting that is ``given`` with its value.

    ``method`` is the name of the settings, as the handle of a patch has it, or an empty string if the user
    gave them all.

    >>> named("", "reuse.every=3"), named("speedup=2", "reuse.every=3"), named("sdtm", "reuse.every=3")
    ('reuse.every=3', 'the default method', "'sdtm' with reuse.every=3")
    """
    if is_default(method):
        return "the default method"
    return f"{method!r} with {given}" if method and method != RATIO else given


def instead(method: str, change: str) -> str:
    """Return what to do in the call that was made, where ``change`` is what to do with a user's own settings.

    >>> instead("", "take reuse.every=1"), instead("tuned.json", "take reuse.every=1")
    ('take reuse.every=1', "take reuse.every=1 in 'tuned.json'")
    >>> instead("speedup=2", "take reuse.every=1")
    'pass settings of your own, such as ToMeConfig(ratio=0.5)'
    """
    if method.endswith(".json"):
        return f"{change} in {method!r}"
    return "pass settings of your own, such as ToMeConfig(ratio=0.5)" if method else change
