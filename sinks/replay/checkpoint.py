"""Checkpoints of a replay: a folder with the newest one. What has not changed since is not written again. No pickle.

    manifest.json                  names the files below with their digests: the checkpoint is there once this file is
    index-TOKEN.npz                all but the rows: counts, priorities, the index of the rows, the generator
    rows-TOKEN-TABLE-NUMBER.npz    a block of a table's rows, with all columns

A replay has one table, or of several agents one for each module, in the order in which their first steps came. The rows
of a table form a ring and are written in its order. So the blocks that changed are those with rows behind the position
that the last checkpoint went up to. They go into new files, and files that the manifest names stay as they are until
another manifest has taken its place: after a kill at any moment, the last whole checkpoint stands.
"""

import hashlib
import io
import json
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.nodes.policies.artifact_files import write_file
from rollflow.nodes.policies.part_records import ArraysByName, from_plain, to_plain
from rollflow.sinks.locked_folder import LockedFolder
from rollflow.stream.data.errors import PolicyError, ReplayError

MANIFEST = "manifest.json"
_FORMAT = "rollflow replay 2"
_PLAIN = "plain"  # name of the JSON text among the arrays of a file
_OURS = "index-*.npz", "rows-*.npz", ".*.new"


class CheckpointFolder(LockedFolder):
    """Folder with the newest checkpoint of a replay, which one replay at a time writes.

    path    of the folder, which is made
    """

    description, noun, error = MANIFEST, "a replay's checkpoint", ReplayError
    writer = "another replay, or a replay host,"
    _newest: dict[str, Any] | None = None  # the manifest that was written or read last

    @property
    def is_there(self) -> bool:
        """True if the folder has a checkpoint, or something else is at its path."""
        return (self.path / MANIFEST).exists() or self.path.is_file()

    def since(self) -> list[int]:
        """For each table, the position up to which a state for `write` may leave out rows.

        Nothing where another replay has written here.
        """
        try:
            known = self._manifest()
        except ReplayError:
            return []
        return [int(table["end"]) for table in known["tables"]] if known == self._newest else []

    def write(self, state: Mapping[str, Any]) -> None:
        """Write a state of plain values and arrays, as `Replay.get_state(since())` gave it, in a block of `held`.

        Raises OSError; what was there stays then.
        """
        self.check_held()
        token, made = secrets.token_hex(8), list[str]()

        def written(name: str, part: Any) -> dict[str, str]:
            made.append(name)
            data = _packed(part)
            write_file(self.path / name, data)
            return {"name": name, "sha256": hashlib.sha256(data).hexdigest()}

        tables: list[dict[str, Any]] = []
        try:
            for each, (_, table) in enumerate(state["tables"]):
                blocks, columns = [], table["columns"] or {"num_blocks": 0}
                for number in range(columns["num_blocks"]):
                    changed = columns["blocks"].get(number)
                    if changed is None:
                        assert self._newest is not None
                        blocks.append(self._newest["tables"][each]["blocks"][number])
                    else:
                        blocks.append(written(f"rows-{token}-{each:03d}-{number:06d}.npz", changed))
                tables.append({"end": table["rows"]["counts"]["end"], "blocks": blocks})
            index = written(f"index-{token}.npz", {**state, "tables": [*map(_without_blocks, state["tables"])]})
            manifest = {"index": index, "tables": tables}
            self.write_description({"format": _FORMAT, "sha256": _digest(manifest), **manifest})
        except BaseException:
            for name in made:
                (self.path / name).unlink(missing_ok=True)
            raise
        self._newest = manifest
        self._remove_all_but({index["name"], *(block["name"] for table in tables for block in table["blocks"])})

    def read(self) -> dict[str, Any]:
        """The state that was written last. Raises ReplayError, with its name, for a file that is missing or altered."""
        manifest = self._manifest()
        try:
            state = self._state_of(manifest)
        except ReplayError:
            if self._manifest() == manifest:
                raise
            return self.read()  # another one was written meanwhile, and the files of this one are gone
        self._newest = manifest
        return state

    def _state_of(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self._part(manifest["index"])
        for (_, table), record in zip(state["tables"], manifest["tables"], strict=True):
            if table["columns"] is not None:
                table["columns"]["blocks"] = dict(enumerate(map(self._part, record["blocks"])))
        return state

    def _manifest(self) -> dict[str, Any]:
        """What the manifest says, but for its format and its own digest."""
        try:
            manifest = self.read_description()
            if manifest.pop("format") != _FORMAT or manifest.pop("sha256") != _digest(manifest):
                raise ValueError("it was altered, or is of another version")
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self.path / MANIFEST, error) from None
        return manifest

    def _part(self, record: Mapping[str, str]) -> Any:
        """The state, or the block, in a file of the manifest's."""
        path = self.path / record["name"]
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != record["sha256"]:
                raise ValueError("it was truncated or altered: its digest is not the manifest's")
            return _unpacked(data)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, PolicyError) as error:
            raise _damaged(path, error) from None

    def _remove_all_but(self, names: set[str]) -> None:
        """Remove the files of older checkpoints, and of those that were never finished."""
        for pattern in _OURS:
            for path in self.path.glob(pattern):
                if path.name not in names:
                    path.unlink(missing_ok=True)


def _without_blocks(table: Sequence[Any]) -> list[Any]:
    """A module's id and the state of its table, but for the blocks of rows."""
    module_id, state = table
    columns = state["columns"]
    if columns is not None:
        columns = {name: part for name, part in columns.items() if name != "blocks"}
    return [module_id, {**state, "columns": columns}]


def _packed(state: Any) -> bytes:
    """A value of plain values and arrays as the bytes of a file of arrays, with all else as JSON."""
    arrays: ArraysByName = {}
    text = json.dumps(to_plain(state, "state", arrays)).encode()
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{_PLAIN: np.frombuffer(text, np.uint8)}, **arrays)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return from_plain(json.loads(arrays.pop(_PLAIN).tobytes()), "state", arrays)


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, error: Exception) -> ReplayError:
    return ReplayError(f"{path}: expected a replay's checkpoint, {_FORMAT!r}: {error}")
