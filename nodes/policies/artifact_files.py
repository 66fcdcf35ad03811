"""Files of a saved policy, in a folder: written atomically, read with checksums and bounds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollflow.stream.data.errors import PolicyError
from rollflow.stream.data.stored_files import StoredKind, replacing, write_synced

POLICY = StoredKind("rollflow policy", 1, "policy.json", "a saved policy", PolicyError)
MANIFEST = POLICY.manifest
ARRAYS = ("module.safetensors", "state.safetensors", "examples.safetensors")
ONNX = "policy.onnx"
OPTIONAL = (ONNX, "programs.json", "programs.safetensors")  # programs are of older versions, and nobody reads them


def folder_of(id_: str) -> str:
    """Name of the folder of a module, by the text of its id, with what no folder's name may have replaced."""
    name = quote(id_, safe=" ")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest of a saved policy, and its files of arrays.

    Raises PolicyError, with the file's name, if one is missing, altered, truncated or another's.
    """
    _check_folder(path)
    manifest = POLICY.read_manifest(path)
    listed = manifest.get("files")
    if not isinstance(listed, dict) or not set(ARRAYS) <= set(listed) <= {*ARRAYS, *OPTIONAL}:
        raise PolicyError(
            f"{MANIFEST}: files are {str(listed)[:80]}, expected {', '.join(ARRAYS)}, and maybe {', '.join(OPTIONAL)}"
        )
    return manifest, {name: POLICY.read_file(path, name, listed) for name in (*ARRAYS, ONNX) if name in listed}


def read_manifest(files: Mapping[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest among files that are not written yet, and the files of arrays."""
    return POLICY.manifest_of(files[MANIFEST]), {name: files[name] for name in ARRAYS}


def write_files(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a policy's files to a folder: all of them, or none. Raises PolicyError if something else is at the path."""
    check_target(path)
    with replacing(path) as made:
        made.mkdir()
        for name, data in files.items():
            write_synced(made / name, data)


def check_target(path: Path) -> None:
    """Raise PolicyError if a policy can't be written to a path, since it is no folder's, or something else is there."""
    if path.suffix == ".zip":
        raise PolicyError(f"{path} is one file, expected a folder: shutil.make_archive makes a zip of it")
    is_policy = (path / MANIFEST).is_file() or (path.is_dir() and not any(path.iterdir()))
    if path.exists() and not is_policy:
        raise PolicyError(f"there is something else at {path}, expected a policy to be replaced, or nothing")


def _check_folder(path: Path) -> None:
    """Raise PolicyError for what is no policy's folder."""
    others = sorted(each.parent for each in path.glob(f"*/{MANIFEST}"))
    if others and not (path / MANIFEST).is_file():  # as the `save_policy` of several agents' rollout writes them
        of = ", ".join(each.name for each in others)
        raise PolicyError(f"{path} has the policies of {of}: load one of them, such as Policy.load({str(others[0])!r})")
    if path.is_file():
        raise PolicyError(f"{path} is a file, expected a policy's folder: unpack it if it is the zip of one")
    if not path.is_dir():
        raise PolicyError(f"there is no policy at {path}, expected its folder")
