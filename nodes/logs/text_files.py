"""Text files as destinations of a log: CSV and JSON lines."""

import csv
import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

from rollflow.nodes.logs.figures import PLACE, Row
from rollflow.stream.data.errors import MetricsError
from rollflow.stream.data.system import lock_file, unlock_file

_BEGINNING = ",".join(PLACE)
_LONGEST = 1 << 20  # a header, in characters


class _TextFile:
    """File that lines are added to, also to those that are there.

    target, kind    as in `log="kind:target"`

    Raises MetricsError where the file can't be written.
    """

    def __init__(self, target: str, kind: str) -> None:
        self._path = checked_path(target, kind)
        self._file: TextIO | None = None

    def open(self) -> None:
        """Open the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _appended(self._path)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class CsvFile(_TextFile):
    """File of comma-separated values: a column for each name, and `steps`, `updates` and `time`, seconds since 1970.

    A file that is there is added to. Where a new name comes up the file is written anew, with one more column, in which
    the rows before have nothing.

    Raises MetricsError where the file can't be written, has other columns, or another log writes to it.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target, "csv")
        self._target = target
        self._names: list[str] = []
        line = self._first_line()
        if line and not line.startswith(_BEGINNING):
            raise MetricsError(
                f"log='csv:{target}' begins with {line[:40]!r}, expected a new file, or one that begins with "
                f"{_BEGINNING!r}"
            )

    def open(self) -> None:
        """Open the file, with a header where it is new."""
        super().open()
        assert self._file is not None
        if not _locked(self._file, self._path):
            self.close()
            raise MetricsError(
                f"log='csv:{self._target}': another run, or one that was not closed, writes to this file, and each "
                "would lose rows of the other; expected a file for each"
            )
        self._names = next(csv.reader([self._first_line()]), [])
        if not self._names:
            self._names = list(PLACE)
            self._write(self._names)

    def write(self, row: Row) -> None:
        """Write one line."""
        new = [name for name in row.values if name not in self._names]
        if new:
            self._widen([*self._names, *new])
        fields = {**row.place, **row.values}
        self._write([fields.get(name, "") for name in self._names])

    def close(self) -> None:
        """Close the file, and let others write to it, also where a process that was forked still has it."""
        if self._file is not None and not self._file.closed:
            unlock_file(self._file)
        super().close()

    def _first_line(self) -> str:
        if not self._path.exists():
            return ""
        with self._path.open(newline="", errors="replace") as file:
            return file.readline(_LONGEST)

    def _widen(self, names: list[str]) -> None:
        """Write the file anew with more columns; a kill leaves the old one or the new one."""
        wider, before = self._path.with_name(f"{self._path.name}.new"), self._file
        with self._path.open(newline="") as old, wider.open("w", newline="") as new:
            lines, rows = csv.writer(new), csv.reader(old)
            next(rows)
            lines.writerow(names)
            lines.writerows([*row, *[""] * (len(names) - len(row))] for row in rows)
        self._names, self._file = names, _appended(wider)
        _locked(self._file, wider)
        os.replace(wider, self._path)
        assert before is not None
        unlock_file(before)  # held until now, so that nobody else takes the file meanwhile
        before.close()

    def _write(self, fields: list[Any]) -> None:
        assert self._file is not None
        csv.writer(self._file).writerow(fields)
        self._file.flush()


class JsonLines(_TextFile):
    """File with an object a line: `steps`, `updates`, `time` in seconds since 1970, and every figure by its name.

    A file that is there is added to. JSON knows no NaN and no infinity: they are null.

    Raises MetricsError where the file can't be written.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target, "jsonl")

    def write(self, row: Row) -> None:
        """Write one line."""
        assert self._file is not None
        values = {name: value if math.isfinite(value) else None for name, value in row.values.items()}
        self._file.write(json.dumps({**row.place, **values}) + "\n")
        self._file.flush()


def checked_path(target: str, kind: str, *, is_folder: bool = False) -> Path:
    """The path of a file or folder that can be written. Raises MetricsError where it can't be; nothing is made yet."""
    noun = "folder" if is_folder else "file"
    path = Path(target).expanduser()
    expected = f"expected a {noun} that can be written, or a new one"
    if not target:
        raise MetricsError(f"log='{kind}:' names no {noun}, expected '{kind}:PATH'")
    if path.exists() and not (path.is_dir() if is_folder else path.is_file()):
        raise MetricsError(f"log='{kind}:{target}' is no {noun}, {expected}")
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir() and there != path:
        raise MetricsError(f"log='{kind}:{target}': {there} is a file, {expected}")
    if not os.access(there, os.W_OK):
        raise MetricsError(f"log='{kind}:{target}': {there} may not be written, {expected}")
    return path.absolute()


def _locked(file: TextIO, path: Path) -> bool:
    """Lock a file for as long as it is open; False where another one has, or has put a new one in its place."""
    return lock_file(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _appended(path: Path) -> TextIO:
    """The file, opened to add lines; what a kill has left of a last line is ended."""
    file = path.open("a", newline="")
    if file.tell():
        with path.open("rb") as written:
            written.seek(-1, os.SEEK_END)
            if written.read() != b"\n":
                file.write("\n")
    return file
