"""Checkpoints of a replay: one file of arrays, with all else as JSON. No pickle."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.nodes.policies.plain_values import ArraysByName, from_plain, to_plain
from rollflow.stream.data.errors import PolicyError, ReplayError

_FORMAT = "rollflow replay 1"
_PLAIN = "plain"  # name of the JSON text among the arrays


def write_state(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Write a state of plain values and arrays. A file that is there already is replaced at the end, as a whole."""
    arrays: ArraysByName = {}
    text = json.dumps({"format": _FORMAT, "state": to_plain(state, "state", arrays)}).encode()
    target = Path(path)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_PLAIN: np.frombuffer(text, np.uint8)}, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def read_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file. Raises ReplayError for a file that `write_state` has not written, or not to its end."""
    try:
        with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        told = json.loads(arrays.pop(_PLAIN).tobytes())
        if told["format"] != _FORMAT:
            raise ValueError(f"its format is {told['format']!r}")
        state: dict[str, Any] = from_plain(told["state"], "state", arrays)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, PolicyError) as error:
        raise ReplayError(f"{os.fspath(path)}: expected a replay's checkpoint, {_FORMAT!r}: {error}") from None
    return state
