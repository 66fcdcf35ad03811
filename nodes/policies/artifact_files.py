"""Files of a saved policy, in a folder or a zip: written atomically, read with checksums and bounds."""

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollflow.stream.data.errors import PolicyError, refused
from rollflow.stream.data.stored_files import StoredKind, replacing, write_file, write_synced

POLICY = StoredKind("rollflow policy", 1, "policy.json", "a saved policy", PolicyError)
MANIFEST, CARD = POLICY.manifest, "README.md"
ARRAYS = ("module.safetensors", "state.safetensors", "examples.safetensors")
ONNX = "policy.onnx"
OPTIONAL = (ONNX, "programs.json", "programs.safetensors")  # programs are of older versions, and nobody reads them
_TIME = (1980, 1, 1, 0, 0, 0)  # of every file in a zip, so that the same policy gives the same bytes


def folder_of(id_: str) -> str:
    """Name of the folder of a module, by the text of its id, with what no folder's name may have replaced."""
    name = quote(id_, safe=" ")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest of a saved policy, and its files of arrays.

    Raises PolicyError, with the file's name, if one is missing, altered, truncated or another's.
    """
    with _opened(path) as root:
        manifest = POLICY.read_manifest(root)
        listed = manifest.get("files")
        if not isinstance(listed, dict) or not set(ARRAYS) <= set(listed) <= {*ARRAYS, *OPTIONAL}:
            raise PolicyError(
                f"{MANIFEST}: files are {str(listed)[:80]}, expected {', '.join(ARRAYS)}, and maybe "
                f"{', '.join(OPTIONAL)}"
            )
        files = {name: POLICY.read_file(root, name, listed) for name in (*ARRAYS, ONNX) if name in listed}
    return manifest, files


def read_manifest(files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest among files that are not written yet, and the files of arrays."""
    return POLICY.manifest_of(files[MANIFEST]), {name: files[name] for name in ARRAYS}


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a policy's files to a folder, or to a zip if the path ends in `.zip`: all of them, or none.

    Raises PolicyError if something else is at the path.
    """
    check_target(path)
    if path.suffix == ".zip":
        write_file(path, _zip_of(files))
        return
    with replacing(path) as made:
        made.mkdir()
        for name, data in files.items():
            write_synced(made / name, data)


def check_target(path: Path) -> None:
    """Raise PolicyError if a policy can't be written to a path, since something else is there."""
    is_policy = (path / MANIFEST).is_file() or (path.is_dir() and not any(path.iterdir()))
    if path.exists() and (path.is_file() != (path.suffix == ".zip") or (path.is_dir() and not is_policy)):
        raise PolicyError(f"there is something else at {path}, expected a policy to be replaced, or nothing")


def _zip_of(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return data.getvalue()


@contextmanager
def _opened(path: Path) -> Iterator[Path | zipfile.Path]:
    """A policy's folder, or its zip, which is read where it lies: no file in it may be compressed."""
    if path.is_dir():
        others = sorted(each.parent for each in path.glob(f"*/{MANIFEST}"))
        if others and not (path / MANIFEST).is_file():  # as the `save_policy` of several agents' rollout writes them
            of = ", ".join(each.name for each in others)
            raise PolicyError(
                f"{path} has the policies of {of}: load one of them, such as Policy.load({str(others[0])!r})"
            )
        yield path
        return
    if not path.is_file():
        raise PolicyError(f"there is no policy at {path}, expected a folder or a .zip file")
    with refused(f"{path} can't be read as a zip"), zipfile.ZipFile(path) as archive:
        _check_zip(path, archive.infolist())
        yield zipfile.Path(archive)


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
