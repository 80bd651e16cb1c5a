"""Plug-ins for servers that run diffusers pipelines, one file for each server, and what they share.

A server finds its plug-in by an entry point of this package. The plug-in does nothing unless the environment
of the server asks for token merging. Nothing heavy is imported before a pipeline is there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Collection, Iterator

from tokenmerge.config.checks import at_least_1
from tokenmerge.errors import ConfigError, UnsupportedModelError

SPEEDUP = "TOKENMERGE_SPEEDUP"
SETTINGS = "TOKENMERGE_SETTINGS"
REQUESTED = "tokenmerge_speedup"  # what a request calls its own speed-up
PREFIX = "tokenmerge_"
DENSE = 1.0


def is_asked() -> bool:
    """Return whether the environment asks for token merging."""
    return bool(os.environ.get(SPEEDUP) or os.environ.get(SETTINGS))


def by_environment() -> float | str:
    """Return the wanted speed-up, or the path of a file of settings, and refuse other values."""
    text = os.environ.get(SPEEDUP)
    path = os.environ.get(SETTINGS)
    if text and path:
        raise ConfigError(
            f"{SPEEDUP}, {SETTINGS}: expected one of them, got {text!r} and {path!r}; unset the other one"
        )
    if path:
        return path
    try:
        value: object = float(text or "")
    except ValueError:
        value = text
    return at_least_1(SPEEDUP, value)


class ServedPipeline:
    """A pipeline with the speed-up of the server, or of the request that runs.

    Requests take turns: a model has one set of settings, and a scheduler holds the state of one generation.

    Args:
        pipe: the diffusers pipeline. If its model is not supported, it stays dense, and a warning says why.
        wanted: speed-up of requests that ask for none, or the path of a file of settings.
        log: the server's own logger, so that the lines are shown where its lines are.
    """

    def __init__(self, pipe: object, wanted: float | str, log: logging.Logger) -> None:
        self._pipe = pipe
        self._wanted = wanted
        self._log = log
        self._in_force: float | str = DENSE
        self._turn = threading.RLock()
        try:
            self._apply(wanted, describe=True)
        except UnsupportedModelError as error:
            self._wanted = DENSE
            log.warning("token merging: the model is served dense: %s", error)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other request applies settings or generates, and keep others from it within."""
        with self._turn:
            yield

    def use(self, requested: object) -> None:
        """Apply the speed-up that the next request asks for: 1 is dense, and None is that of the server."""
        wanted = self._wanted if requested is None else at_least_1(REQUESTED, requested)
        with self._turn:
            if wanted != self._in_force:
                self._apply(wanted)

    def check_names(self, names: Collection[str]) -> None:
        """Refuse what a request calls a setting, and what nobody would read."""
        unknown = [name for name in names if name.startswith(PREFIX) and name != REQUESTED]
        if unknown:
            raise ConfigError(f"{', '.join(unknown)}: a request can ask for {REQUESTED} alone; leave it out")

    def _apply(self, wanted: float | str, describe: bool = False) -> None:
        """Apply what is wanted, and log it. ``describe`` adds the text of the patch."""
        from tokenmerge.api import apply_token_merging, remove_token_merging

        patch = None
        if isinstance(wanted, str):
            patch = apply_token_merging(self._pipe, wanted)
        elif wanted != DENSE:
            patch = apply_token_merging(self._pipe, speedup=wanted)
        elif self._in_force != DENSE:
            remove_token_merging(self._pipe)
        self._in_force = wanted
        name = wanted if isinstance(wanted, str) else f"{wanted:g}×"
        if wanted == DENSE:
            name = "dense"
        self._log.info("token merging: %s%s", name, f"\n{patch}" if describe and patch is not None else "")
