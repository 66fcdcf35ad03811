"""Checkpoints of a replay: a folder with the newest one. What has not changed since is not written again. No pickle.

    manifest.json                   the files below with their digests: the checkpoint is there once this file is
    index-TOKEN.safetensors         all but the rows: counts, priorities, the index of the rows, the generator
    rows-TOKEN-TABLE-NUMBER.…       a block of a table's rows, with all columns

A replay has one table, or of several agents one for each module, in the order in which their first steps came. The rows
of a table form a ring and are written in its order. So the blocks that changed are those with rows behind the position
that the last checkpoint went up to. They go into new files, and files that the manifest names stay as they are until
another manifest has taken its place: after a kill at any moment, the last whole checkpoint stands.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rollflow.nodes.policies.artifact_files import (
    array_bytes,
    arrays_of,
    checksums,
    manifest_bytes,
    manifest_of,
    write_file,
)
from rollflow.nodes.policies.part_records import ArraysByName, from_plain, to_plain
from rollflow.sinks.locked_folder import LockedFolder
from rollflow.stream.data.errors import ReplayError

MANIFEST = "manifest.json"
_KIND, _FORMAT = "rollflow replay", 3
_PLAIN = "plain"  # name of the JSON text among the arrays of a file
_OURS = *(f"{kind}-{'[0-9a-f]' * 16}*" for kind in ("index", "rows")), ".*.new"


class CheckpointFolder(LockedFolder):
    """Folder with the newest checkpoint of a replay, which one replay at a time writes.

    path    of the folder, which is made
    """

    noun, error = "a replay's checkpoint", ReplayError
    writer = "another replay, or a replay host,"
    _newest: dict[str, Any] | None = None  # the manifest that was written or read last

    @property
    def is_there(self) -> bool:
        """True if the folder has a checkpoint, or something else is at its path."""
        return (self.path / MANIFEST).exists() or self.path.is_file()

    def since(self) -> list[int]:
        """For each table, the position up to which a state for `write` may leave out rows.

        Nothing if another replay has written here.
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
        token, files = secrets.token_hex(8), dict[str, Any]()

        def written(name: str, part: Any) -> str:
            data = _packed(part)
            files.update(checksums({name: data}))
            write_file(self.path / name, data)
            return name

        tables: list[dict[str, Any]] = []
        try:
            for each, (_, table) in enumerate(state["tables"]):
                blocks, columns = list[str](), table["columns"] or {"num_blocks": 0}
                for number in range(columns["num_blocks"]):
                    changed = columns["blocks"].get(number)
                    if changed is not None:
                        blocks.append(written(f"rows-{token}-{each:03d}-{number:06d}.safetensors", changed))
                        continue
                    assert self._newest is not None
                    blocks.append(self._newest["tables"][each]["blocks"][number])
                tables.append({"end": table["rows"]["counts"]["end"], "blocks": blocks})
            index = written(f"index-{token}.safetensors", {**state, "tables": [*map(_without_blocks, state["tables"])]})
            named = {index, *(name for table in tables for name in table["blocks"])}
            known = {} if self._newest is None else self._newest["files"]
            listed = {name: each for name, each in {**known, **files}.items() if name in named}
            manifest = {"kind": _KIND, "format": _FORMAT, "index": index, "tables": tables, "files": listed}
            write_file(self.path / MANIFEST, manifest_bytes(manifest))
        except BaseException:
            for name in files:
                (self.path / name).unlink(missing_ok=True)
            raise
        self._newest = manifest
        self._remove_all_but(named)

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
        read = partial(self._part, manifest["files"])
        state: dict[str, Any] = read(manifest["index"])
        for (_, table), record in zip(state["tables"], manifest["tables"], strict=True):
            if table["columns"] is not None:
                table["columns"]["blocks"] = dict(enumerate(map(read, record["blocks"])))
        return state

    def _manifest(self) -> dict[str, Any]:
        """What the manifest says."""
        try:
            manifest = manifest_of((self.path / MANIFEST).read_bytes(), MANIFEST)
            if (manifest["kind"], manifest["format"]) != (_KIND, _FORMAT):
                raise ValueError("it is of another version")
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self.path / MANIFEST, error) from None
        return manifest

    def _part(self, files: Mapping[str, Any], name: str) -> Any:
        """The state, or the block, in a file of the manifest's."""
        try:
            data = (self.path / name).read_bytes()
            if checksums({name: data})[name] != files[name]:
                raise ValueError("it was truncated or altered: its digest is not the manifest's")
            return _unpacked(data, name)
        except (OSError, ValueError, KeyError) as error:
            raise _damaged(self.path / name, error) from None

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
    return array_bytes({**arrays, _PLAIN: np.frombuffer(text, np.uint8)})


def _unpacked(data: bytes, name: str) -> Any:
    arrays = arrays_of(data, name)
    return from_plain(json.loads(arrays.pop(_PLAIN).tobytes()), "state", arrays)


def _damaged(path: Path, error: Exception) -> ReplayError:
    return ReplayError(f"{path}: expected a replay's checkpoint, '{_KIND} {_FORMAT}': {error}")
