"""Files that are written whole or not at all, and manifests that say what they are, with digests.

A manifest is a JSON object: its `kind` and `format`; what its kind has there; in `files` the size and the SHA-256 of
files beside it; and last its own digest.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from rollflow.stream.data.errors import RollflowError, noted, refused
from rollflow.stream.data.system import lock_file, unlock_file

LOCK = ".lock"
_MOST_MANIFEST_BYTES = 16 << 20
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class StoredKind:
    """What is stored in files: what its manifest says, and the errors of reading it.

    name        in its manifests, such as "rollflow policy"
    format      of the manifests that are written
    manifest    name of their file
    noun        what it is, in errors
    error       class of the errors
    oldest      format of the oldest manifests that are read
    """

    name: str
    format: int
    manifest: str
    noun: str
    error: type[RollflowError]
    oldest: int = 1

    def manifest_bytes(self, content: Mapping[str, Any]) -> bytes:
        """The manifest as JSON. Raises ValueError for numbers that JSON has not."""
        fields = {"kind": self.name, "format": self.format, **content, "digest": _NO_DIGEST}
        text = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False).encode()
        return text.replace(_NO_DIGEST.encode(), _digest(text).encode())

    def manifest_of(self, data: bytes, path: object = None) -> dict[str, Any]:
        """The fields of a manifest, but for its digest. Raises `error`, with its name, for what is none of this kind.

        path    of its file, for the error
        """
        name = path or self.manifest
        manifest = self.json_of(data, name)
        digest = manifest.get("digest") if isinstance(manifest, dict) else None
        if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST) or data.count(digest.encode()) != 1:
            raise self.error(f"{name} has no digest, expected one of its other fields, as {self.noun} has")
        if _digest(data.replace(digest.encode(), _NO_DIGEST.encode())) != digest:
            raise self.error(f"{name} has another digest than it says: it was altered")
        del manifest["digest"]
        if manifest.get("kind") != self.name:
            raise self.error(f"{name} is of kind {str(manifest.get('kind'))[:40]!r}, expected {self.name!r}")
        version = manifest.get("format")
        if type(version) is not int or version < 1:
            raise self.error(f"{name}: format is {version!r}, expected a whole number, 1 or more")
        if not self.oldest <= version <= self.format:
            formats = f"up to {self.format}" if version > self.format else f"from {self.oldest} on"
            other = "a newer rollflow" if version > self.format else "the rollflow that wrote it"
            raise self.error(
                f"{name} has format {version}, and this rollflow reads formats {formats}; expected {other}"
            )
        checked: dict[str, Any] = manifest
        return checked

    def read_manifest(self, root: Path) -> dict[str, Any]:
        """The fields of the manifest in a folder. Raises `error` if it is missing, altered or of another kind."""
        return self.manifest_of(self._read(root, self.manifest, _MOST_MANIFEST_BYTES), root / self.manifest)

    def read_file(self, root: Path, name: str, files: Any) -> bytes:
        """The contents of a file. Raises `error` if it is missing, or not the one that `files` of the manifest says."""
        entry: Any = files.get(name) if isinstance(files, dict) else None
        size = entry.get("bytes") if isinstance(entry, dict) else None
        if type(size) is not int or not isinstance(entry.get("sha256"), str):
            raise self.error(f"{self.manifest}: the entry of {name} is {str(entry)[:80]}, expected bytes and sha256")
        data, path = self._read(root, name, size), root / name
        if len(data) != size:
            raise self.error(f"{path} has {len(data)} bytes, expected {size}: it was truncated, or is of another one")
        if _digest(data) != entry["sha256"]:
            raise self.error(
                f"{path} has another checksum than {self.manifest} says: it was altered, or is of another one"
            )
        return data

    def arrays_of(self, data: bytes, name: str) -> dict[str, NDArray[Any]]:
        """The arrays of a safetensors file. Raises `error`, with the file's name, for what is none."""
        with refused(f"{name} can't be read", error=self.error):
            arrays = {key: np.array(array) for key, array in safetensors.numpy.load(data).items()}
        return arrays

    def json_of(self, data: bytes, name: object) -> Any:
        """The value of a JSON file. Raises `error`, with the file's name, for what is none."""
        with refused(f"{name} can't be read", "; it was truncated or altered", error=self.error):
            value = json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
        return value

    def _read(self, root: Path, name: str, most: int) -> bytes:
        """The contents of a file. Raises `error`, before it is read, for one of more bytes."""
        file = root / name
        if not file.is_file() or file.is_symlink():  # which others may point elsewhere
            raise self.error(f"{name} is missing in {root}, expected {self.noun}")
        with refused(f"{file} can't be read", error=self.error), file.open("rb") as opened:
            if (size := opened.seek(0, os.SEEK_END)) > most:
                raise self.error(f"{file} has {size} bytes, expected {most} at most")
            opened.seek(0)
            data = bytes(opened.read())
        return data


def checksums(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Name -> size and SHA-256 of each file, for the manifest."""
    return {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in files.items()}


def array_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays in the safetensors format; the same arrays give the same bytes."""
    ordered = {name: np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in sorted(arrays)}
    return safetensors.numpy.save(ordered)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field comes twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


# Writing


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what was there."""
    with replacing(path) as made:
        write_synced(made, data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path for a file or a folder, which gets the name `path` at the end of the block.

    After an error what was there stays, and the new one is gone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    made, before = (path.parent / f".{path.name}.{os.getpid()}.{end}" for end in ("new", "old"))
    remove(made)
    try:
        with noted(f"while {path} was written; what was there stays"):
            yield made
            if made.is_dir() and path.exists():
                remove(before)
                os.rename(path, before)
            os.replace(made, path)
    finally:
        if before.exists() and not path.exists():
            os.rename(before, path)
        remove(made)
        remove(before)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and have it on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Write a file's contents, or a folder's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file another name, which stays when the first one goes; on a disk that can't, it is copied."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; nothing need be there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class LockedFolder:
    """Folder that one program at a time writes to. Nothing is made before a method is called.

    path      of the folder

    kind      of what is stored there
    writer    who else may write there, in errors
    """

    kind: ClassVar[StoredKind]
    writer: ClassVar[str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def lock(self) -> None:
        """Make the folder, and keep others from writing there. Raises the kind's error if one does, or none can."""
        if self.path.is_file():
            raise self.kind.error(f"{self.path} is a file, expected {self.kind.noun}, which is a folder, or nothing")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self.kind.error(f"{self.kind.noun} can't be written to {self.path}: {error}") from error
        if not lock_file(fd):
            os.close(fd)
            text = f"{self.writer} writes to {self.path}, expected one at a time: close it, or use another folder"
            raise self.kind.error(text)
        self._lock = fd

    def unlock(self) -> None:
        """Let others write."""
        if self._lock is not None:
            unlock_file(self._lock)
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder for a block."""
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def check_held(self) -> None:
        """Raise OSError if the folder is no longer the one that was locked: a disk may have gone, or come."""
        assert self._lock is not None
        if not os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK)):
            raise OSError(errno.ESTALE, "it is no longer the folder that it was", os.fspath(self.path))
