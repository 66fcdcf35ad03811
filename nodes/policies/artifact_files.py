"""Files of a saved policy, in a folder or a zip: written atomically, read with checksums and bounds.

Manifests, files of arrays, and the one writer of files are those of replays and datasets as well.
"""

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from rollflow.stream.data.errors import PolicyError, noted, refused

MANIFEST, CARD = "policy.json", "README.md"
ARRAYS = ("module.safetensors", "state.safetensors", "examples.safetensors")
ONNX = "policy.onnx"
OPTIONAL = (ONNX, "programs.json", "programs.safetensors")  # programs are of older versions, and nobody reads them
_MOST_MANIFEST_BYTES = 16 << 20
_NO_DIGEST = "0" * 64
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file in a zip, so that the same policy gives the same bytes


def folder_of(id_: str) -> str:
    """Name of the folder of a module, by the text of its id, with what no folder's name may have replaced."""
    name = quote(id_, safe=" ")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON, with its digest as the last field."""
    text = json.dumps({**manifest, "digest": _NO_DIGEST}, indent=1, ensure_ascii=False, allow_nan=False).encode()
    return text.replace(_NO_DIGEST.encode(), _digest(text).encode())


def checksums(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Name -> size and SHA-256 of each file, for the manifest."""
    return {name: {"bytes": len(data), "sha256": _digest(data)} for name, data in files.items()}


def array_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Arrays in the safetensors format; the same arrays give the same bytes."""
    ordered = {name: np.ascontiguousarray(arrays[name]).reshape(arrays[name].shape) for name in sorted(arrays)}
    return safetensors.numpy.save(ordered)


def arrays_of(data: bytes, name: str) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file. Raises PolicyError, with the file's name, for what is none."""
    with refused(f"{name} can't be read"):
        arrays = {key: np.array(array) for key, array in safetensors.numpy.load(data).items()}
    return arrays


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest of a saved policy, and its files of arrays.

    Raises PolicyError, with the file's name, if one is missing, altered, truncated or another's.
    """
    with _opened(path) as root:
        manifest = manifest_of(_read(root, MANIFEST, _MOST_MANIFEST_BYTES), MANIFEST)
        listed = manifest.get("files")
        if not isinstance(listed, dict) or not set(ARRAYS) <= set(listed) <= {*ARRAYS, *OPTIONAL}:
            raise PolicyError(
                f"{MANIFEST}: files are {str(listed)[:80]}, expected {', '.join(ARRAYS)}, and maybe "
                f"{', '.join(OPTIONAL)}"
            )
        files = {name: _checked(root, name, listed[name]) for name in (*ARRAYS, ONNX) if name in listed}
    return manifest, files


def read_manifest(files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest among files that are not written yet, and the files of arrays."""
    return manifest_of(files[MANIFEST], MANIFEST), {name: files[name] for name in ARRAYS}


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a policy's files to a folder, or to a zip if the path ends in `.zip`: all of them, or none.

    Raises PolicyError if something else is at the path.
    """
    check_target(path)
    if path.suffix == ".zip":
        write_file(path, _zip_of(files))
        return
    with _replacing(path) as made:
        made.mkdir()
        for name, data in files.items():
            _write_synced(made / name, data)
        _replace_folder(made, path)


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what was there. Raises PolicyError if a folder is at the path."""
    if path.is_dir():
        raise PolicyError(f"there is a folder at {path}, expected a file to be replaced, or nothing")
    with _replacing(path) as made:
        _write_synced(made, data)
        os.replace(made, path)


def check_target(path: Path) -> None:
    """Raise PolicyError if a policy can't be written to a path, since something else is there."""
    is_policy = (path / MANIFEST).is_file() or (path.is_dir() and not any(path.iterdir()))
    if path.exists() and (path.is_file() != (path.suffix == ".zip") or (path.is_dir() and not is_policy)):
        raise PolicyError(f"there is something else at {path}, expected a policy to be replaced, or nothing")


# Writing


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A path beside another, for what is to take its place; it is gone at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.parent / f".{path.name}.{os.getpid()}.new"
    _remove(made)
    try:
        with noted(f"while {path} was written; what was there stays"):
            yield made
    finally:
        _remove(made)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _zip_of(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return data.getvalue()


def _replace_folder(made: Path, path: Path) -> None:
    """Put a folder into the place of another, which goes; it is back if that fails."""
    before = path.parent / f".{path.name}.{os.getpid()}.old"
    _remove(before)
    if path.exists():
        os.rename(path, before)
    try:
        os.rename(made, path)
    except BaseException:
        if before.exists():
            os.rename(before, path)
        raise
    _remove(before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()


# Reading


@contextmanager
def _opened(path: Path) -> Iterator[Path | zipfile.Path]:
    """A policy's folder, or its zip, which is read where it lies: no file in it may be compressed."""
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise PolicyError(f"there is no policy at {path}, expected a folder or a .zip file")
    with refused(f"{path} can't be read as a zip"), zipfile.ZipFile(path) as archive:
        _check_zip(path, archive.infolist())
        yield zipfile.Path(archive)


def _read(root: Path | zipfile.Path, name: str, most: int) -> bytes:
    """The contents of a file of a policy. Raises PolicyError, before it is read, for one of more bytes."""
    file = root / name
    if not file.is_file() or (isinstance(file, Path) and file.is_symlink()):
        inside = sorted(each.parent for each in root.glob(f"*/{MANIFEST}")) if isinstance(root, Path) else []
        if inside and name == MANIFEST:  # as the `save_policy` of several agents' rollout writes them
            of = ", ".join(each.name for each in inside)
            raise PolicyError(
                f"{root} has the policies of {of}: load one of them, such as Policy.load({str(inside[0])!r})"
            )
        raise PolicyError(f"{name} is missing in {root}, expected a file")
    with file.open("rb") as opened:
        if (size := opened.seek(0, os.SEEK_END)) > most:
            raise PolicyError(f"{name} has {size} bytes, expected {most} at most")
        opened.seek(0)
        return bytes(opened.read())


def _check_zip(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    names = [entry.filename for entry in entries]
    expected = {MANIFEST, CARD, *ARRAYS, *OPTIONAL}
    if unknown := sorted(set(names) - expected):
        raise PolicyError(f"{path} has {unknown[:4]}, expected {', '.join(sorted(expected))} alone")
    if len(set(names)) < len(names):
        raise PolicyError(f"{path} has a file more than once, expected each once")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
            raise PolicyError(f"{path}: {entry.filename} is compressed, expected files as they are")


def _checked(root: Path | zipfile.Path, name: str, entry: Any) -> bytes:
    size = entry.get("bytes") if isinstance(entry, dict) else None
    if type(size) is not int or not isinstance(entry.get("sha256"), str):
        raise PolicyError(f"{MANIFEST}: the entry of {name} is {str(entry)[:80]}, expected bytes and sha256")
    data = _read(root, name, size)
    if len(data) != size:
        raise PolicyError(f"{name} has {len(data)} bytes, expected {size}: it was truncated, or is another policy's")
    if _digest(data) != entry["sha256"]:
        raise PolicyError(f"{name} has another checksum than {MANIFEST} says: it was altered, or is another policy's")
    return data


def json_of(data: bytes, name: str) -> Any:
    """The value of a JSON file. Raises PolicyError, with the file's name, for what is none."""
    with refused(f"{name} can't be read", "; it was truncated or altered"):
        value = json.loads(data.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant)
    return value


def manifest_of(data: bytes, name: str) -> dict[str, Any]:
    """The fields that `manifest_bytes` was given. Raises PolicyError, with the file's name, for what is no manifest."""
    manifest = json_of(data, name)
    digest = manifest.get("digest") if isinstance(manifest, dict) else None
    if not isinstance(digest, str) or len(digest) != len(_NO_DIGEST) or data.count(digest.encode()) != 1:
        raise PolicyError(f"{name} has no digest, expected one of its other fields")
    if _digest(data.replace(digest.encode(), _NO_DIGEST.encode())) != digest:
        raise PolicyError(f"{name} has another digest than it says: it was altered")
    del manifest["digest"]
    checked: dict[str, Any] = manifest
    return checked


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field comes twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
