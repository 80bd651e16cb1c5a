"""Every error that tokenmerge raises on purpose; each is also the built-in error that it resembles."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from tokenmerge.origin import installable

_LONGEST_REASON = 300  # characters
_LONGEST_VALUE = 200


class TokenMergingError(Exception):
    """The base class of all errors below. The command line turns it into one line and exit code 2."""


class ConfigError(TokenMergingError, ValueError):
    """A setting is out of range or of the wrong type."""


class UnsupportedModelError(TokenMergingError, TypeError):
    """The object is not a model that tokens can be merged in."""


class NothingToMergeError(TokenMergingError, ValueError):
    """The model is supported, but with these settings none of its blocks would merge a token."""


class ModelInUseError(TokenMergingError, RuntimeError):
    """Another thread is running the model, so its settings cannot change until that run has ended."""


class MissingExtraError(TokenMergingError, ImportError):
    """An optional dependency is needed and not installed.

    Args:
        requirement: what to install, for example ``"tokenmerge-tools[metrics]"``. Where this package comes
            from a checkout, the message names the folder there instead.
        needed_by: what needs which package: ``"tokenmerge play needs gradio"``.
        packages: how many packages ``needed_by`` names, ≥ 1.

    >>> print(MissingExtraError("diffusers", needed_by="tokenmerge.pipeline_methods needs diffusers"))
    tokenmerge.pipeline_methods needs diffusers, which is not installed; run: pip install "diffusers"
    """

    def __init__(self, requirement: str, needed_by: str, packages: int = 1) -> None:
        verb = "is" if packages == 1 else "are"
        command = f'pip install "{installable(requirement)}"'
        super().__init__(f"{needed_by}, which {verb} not installed; run: {command}")


def short_repr(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened, or its type if ``repr`` raises an error.

    Python raises one for integers of more than 4,300 digits.

    >>> short_repr("a"), short_repr(10**5000)
    ("'a'", 'a value of type int that cannot be printed')
    """
    try:
        text = repr(value)
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def nearest_of(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name, with the known one that it resembles or contains.

    It is empty if there is no such name.
    """
    within = [one for one in known if one in name]  # such as "steps" in "num_inference_steps"
    near = difflib.get_close_matches(name, [*known], 1) or within
    return f"; did you mean {near[0]!r}?" if near else ""


def reason_of(error: BaseException) -> str:
    r"""Return the first line of another library's error, cut to fit a message, or its class if it is empty.

    >>> reason_of(RuntimeError("no such kernel.\nThis traceback is long"))
    'no such kernel'
    >>> reason_of(MemoryError())
    'MemoryError'
    """
    line = str(error).strip().partition("\n")[0][:_LONGEST_REASON].rstrip(".")
    return line or type(error).__name__


def why(error: BaseException) -> str:
    """Return the whole text of an error of this package, and the reason of any other."""
    return str(error) if isinstance(error, TokenMergingError) else reason_of(error)
