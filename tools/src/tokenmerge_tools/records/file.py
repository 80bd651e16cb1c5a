"""The results file: JSON lines, each flushed to disk when it is appended."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from tokenmerge.errors import ConfigError, TokenMergingError
from tokenmerge_tools.files import check_regular, read_bytes, writing
from tokenmerge_tools.records.kinds import KIND, CellRecord


class RecordNotWrittenError(TokenMergingError):
    """A record could not be appended to the results file. The message says where it was saved instead."""


class Record(Protocol):
    """A record of a results file."""

    @property
    def key(self) -> str:
        """A later record replaces earlier ones with the same key."""

    def to_line(self) -> str:
        """One line of JSON, its newline included."""


R = TypeVar("R", bound=Record)


class ResultsFile(Generic[R]):
    """A file of JSON lines that a run appends to. Records of earlier runs stay in it.

    If a killed run left the last line incomplete, this line is moved to ``<name>.torn`` beside the file.

    ``read`` returns the records of a file that matter to the run. ``records`` has the last one of each key,
    and ``notes`` are messages for the user about the file.

    Raises:
        ConfigError: the file cannot be written, another run is writing to it, or it holds something else.
    """

    def __init__(self, path: Path, read: Callable[[Path], Iterable[R]]) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            check_regular(path)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"out: cannot write to {path} ({error.strerror or error}); choose another file with --out"
            ) from error
        try:
            self.notes: list[str] = []
            self._lock()
            self.records = {record.key: record for record in read(path)}
            self._set_torn_line_aside()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultsFile[R]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, record: R) -> None:
        """Append one record and flush it to disk.

        Raises:
            RecordNotWrittenError: the disk is full or failing. Earlier records are safe.
        """
        line = record.to_line().encode()
        before = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            # If this fails too, the next run moves the incomplete line away.
            with contextlib.suppress(OSError):
                self._file.truncate(before)
            kept = _keep_elsewhere(line)
            raise RecordNotWrittenError(
                f"out: cannot write to {self.path} ({error.strerror or error}); the {len(self.records)} "
                f"records in it are safe, and the new one is {kept}; free some space, append it to "
                f"{self.path.name}, and run the same command again: it continues where it stopped"
            ) from error
        self.records[record.key] = record

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"out: another run is writing to {self.path}; wait for it, or choose another file with --out"
            ) from error
        except OSError as error:  # some network file systems have no locks
            self.notes.append(
                f"{self.path} cannot be locked here ({error.strerror or error}): let no other run write to it"
            )

    def _set_torn_line_aside(self) -> None:
        text = self.path.read_bytes()
        torn = _torn_end(text)
        aside = self.path.with_name(self.path.name + ".torn")
        advice = "free some space, and run the same command again"
        if torn:
            with writing(aside, "out", advice), aside.open("ab") as file:
                file.write(torn + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._file.truncate(len(text) - len(torn))
            done = f"it was moved to {aside.name}, and its cell is measured again"
            self.notes.append(_torn_note(self.path, done))
        elif text and not text.endswith(b"\n"):
            with writing(self.path, "out", advice):
                self._file.write(b"\n")


def read_cells(path: Path, notes: list[str] | None = None) -> Iterator[CellRecord]:
    """Read the cells of a results file, in order. Lines of other kinds are skipped.

    ``notes`` gets a message if the last line is incomplete.

    Raises:
        ConfigError: as for :func:`read_lines`, or a line is not a valid record.
    """
    return read_records(path, {KIND: CellRecord}, notes)


def read_records(
    path: Path, kinds: Mapping[str, Any], notes: list[str] | None = None, only: bool = False
) -> Iterator[Any]:
    """Read the records of some kinds in a results file, in order.

    ``kinds`` maps the name of each kind to its class. Lines of other kinds are skipped, or refused if
    ``only`` is true. ``notes`` gets a message if the last line is incomplete.

    Raises:
        ConfigError: as for :func:`read_lines`, or a line is not a valid record of an allowed kind.
    """
    for number, values in read_lines(path, notes):
        name = str(values.get("kind"))
        try:
            if name in kinds:
                yield kinds[name].from_dict(values)
            elif only:
                raise ConfigError(f"kind: expected one of {', '.join(kinds)}, got {values.get('kind')!r}")
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def read_lines(path: Path, notes: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the objects of a JSON-lines file with their line numbers. An incomplete last line is skipped.

    ``notes`` gets a message about that line.

    Raises:
        ConfigError: the file cannot be read, or a line before the last is not a JSON object.
    """
    text = read_bytes(path, "results", "give a file of tokenmerge bench or evaluate")
    torn = _torn_end(text)
    if torn and notes is not None:
        notes.append(_torn_note(path, "it is skipped"))
    for number, line in enumerate(text[: len(text) - len(torn)].splitlines(), start=1):
        if line.strip():
            values = _parse(line)
            if values is None:
                raise ConfigError(
                    f"results: line {number} of {path} is not a JSON object; give a file that tokenmerge "
                    "bench or evaluate wrote, or remove that line"
                )
            yield number, values


def _torn_end(text: bytes) -> bytes:
    """The last line, if writing was interrupted: part of an object, or zero bytes of a lost block."""
    last = text[text.rstrip(b"\n").rfind(b"\n") + 1 :]
    if last[:1] not in (b"{", b"\0"):
        return b""
    try:
        return b"" if isinstance(json.loads(last), dict) else last
    except RecursionError:  # too deeply nested, but complete
        return b""
    except ValueError:
        return last


def _torn_note(path: Path, what_was_done: str) -> str:
    return f"the last line of {path} is incomplete, because a run was killed: {what_was_done}"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _keep_elsewhere(line: bytes) -> str:
    """Save a line that could not be appended, and return a text that says where."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="tokenmerge-", suffix=".jsonl")
        with os.fdopen(descriptor, "wb") as file:
            file.write(line)
    except OSError:
        return f"this line: {line.decode().strip()}"
    return f"in {name}"
