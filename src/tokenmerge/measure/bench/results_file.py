"""The results file: JSON lines, each appended and flushed to disk at once."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from tokenmerge.errors import ConfigError, TokenMergingError
from tokenmerge.measure.bench.records import KIND, CellRecord
from tokenmerge.measure.files import check_regular, read_bytes, writing

__all__ = ["Record", "RecordNotWrittenError", "ResultsFile", "read_cells", "read_lines"]


class RecordNotWrittenError(TokenMergingError):
    """A record could not be appended to the results file; the message says where it is instead."""


class Record(Protocol):
    """What a results file holds."""

    @property
    def key(self) -> str:
        """Equal for records of which the later one counts."""

    def to_line(self) -> str:
        """One line of JSON, its newline included."""


R = TypeVar("R", bound=Record)


class ResultsFile(Generic[R]):
    """A file of JSON lines that a run appends to. Records of earlier runs stay in it.

    A last line that a killed run left torn is moved to a file beside it, ``<name>.torn``.

    Args:
        path: the file; made with its folder where missing.
        read: path → the records that matter to the run; lines of other kinds may stand between them.

    Attributes:
        records: those in it, by key; of equal keys the last one.
        notes: messages for the user about the file as it was found.

    Raises:
        ConfigError: it cannot be written to, another run is writing to it, or it holds something else.
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
        """Write one record; when this returns, it is on the disk.

        Raises:
            RecordNotWrittenError: the disk is full or failing. The records before this one are safe.
        """
        line = record.to_line().encode()
        before = self._file.seek(0, os.SEEK_END)
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # what stays is a torn line, which the next run sets aside
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
        except OSError as error:  # some network file systems lock nothing
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
    """The cells of a results file, in order; lines of another kind are passed over.

    Args:
        path: the file.
        notes: a message is added if the last line is torn.

    Raises:
        ConfigError: as :func:`read_lines`, or a line is not a record.
    """
    for number, values in read_lines(path, notes):
        if values.get("kind") == KIND:
            try:
                yield CellRecord.from_dict(values)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error


def read_lines(path: Path, notes: list[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers, without a torn last line.

    Args:
        path: the file.
        notes: a message is added if the last line is torn.

    Raises:
        ConfigError: it cannot be read, or a line before the last is not a JSON object.
    """
    text = read_bytes(path, "results", "give a file of tokenmerge bench or evaluate")
    torn = _torn_end(text)
    if torn and notes is not None:
        notes.append(_torn_note(path, "it is left out"))
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
    """The last line, if it was cut off while it was written: part of an object, or zeros of a lost block."""
    last = text[text.rstrip(b"\n").rfind(b"\n") + 1 :]
    if last[:1] not in (b"{", b"\0"):
        return b""
    try:
        return b"" if isinstance(json.loads(last), dict) else last
    except RecursionError:  # nested by hand, not cut off
        return b""
    except ValueError:
        return last


def _torn_note(path: Path, what_was_done: str) -> str:
    return f"the last line of {path} is torn, as a killed run leaves it: {what_was_done}"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _keep_elsewhere(line: bytes) -> str:
    """Save a line that did not fit where it belongs, and say in words where it went."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="tokenmerge-", suffix=".jsonl")
        with os.fdopen(descriptor, "wb") as file:
            file.write(line)
    except OSError:
        return f"this line: {line.decode().strip()}"
    return f"in {name}"
