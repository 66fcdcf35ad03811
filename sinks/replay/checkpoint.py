"""Checkpoints of a replay: a folder with the newest one. What has not changed since is not written again. No pickle.

    manifest.json                   the files below with their digests: the checkpoint is there once this file is
    index-TOKEN.safetensors         all but the rows: counts, priorities, the index of the rows, the generator
    rows-TOKEN-TABLE-NUMBER.…       a block of a table's rows, with all columns

A replay has one table, or of several agents one for each module, in the order in which their first steps came. The rows
of a table form a ring and are written in its order. So the blocks that changed are those with rows behind the position
that the last checkpoint went up to. They go into new files, and files that the manifest names stay as they are until
another manifest has taken its place: after a kill at any moment, the last whole checkpoint stands.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollflow.nodes.policies.part_records import packed, unpacked
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.stored_files import LockedFolder, StoredKind, checksums, link, write_file

REPLAY = StoredKind("rollflow replay", 3, "manifest.json", "a replay's checkpoint", ReplayError, oldest=3)
_OURS = *(f"{kind}-{'[0-9a-f]' * 16}*" for kind in ("index", "rows")), ".*.new"


class CheckpointFolder(LockedFolder):
    """Folder with the newest checkpoint of a replay, which one replay at a time writes.

    path      of the folder, which is made
    newest    the manifest that was written or read last; None: none was
    """

    kind, writer = REPLAY, "another replay, or a replay host,"

    def __init__(self, path: str | os.PathLike[str], newest: dict[str, Any] | None = None) -> None:
        super().__init__(path)
        self.newest = newest

    @property
    def is_there(self) -> bool:
        """True if the folder has a checkpoint, or something else is at its path."""
        return (self.path / REPLAY.manifest).exists() or self.path.is_file()

    def since(self) -> list[int]:
        """For each table, the position up to which a state for `write` may leave out rows.

        Nothing if another replay has written here.
        """
        try:
            known = REPLAY.read_manifest(self.path)
        except ReplayError:
            return []
        return [int(table["end"]) for table in known["tables"]] if known == self.newest else []

    def write(self, state: Mapping[str, Any], into: Path | None = None) -> None:
        """Write a state of plain values and arrays, as `Replay.get_state(since())` gave it, in a block of `held`.

        into    new folder, with links to the files that have not changed; None: this one

        Raises OSError; what was there stays then.
        """
        path = self.path if into is None else into
        if into is None:
            self.check_held()
        else:
            into.mkdir()
        token, files = secrets.token_hex(8), dict[str, Any]()

        def written(name: str, part: Any) -> str:
            data = packed(part)
            files.update(checksums({name: data}))
            write_file(path / name, data)
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
                    assert self.newest is not None
                    blocks.append(self.newest["tables"][each]["blocks"][number])
                    if into is not None:
                        link(self.path / blocks[-1], into / blocks[-1])
                tables.append({"end": table["rows"]["counts"]["end"], "blocks": blocks})
            index = written(f"index-{token}.safetensors", {**state, "tables": [*map(_without_blocks, state["tables"])]})
            named = {index, *(name for table in tables for name in table["blocks"])}
            known = {} if self.newest is None else self.newest["files"]
            listed = {name: each for name, each in {**known, **files}.items() if name in named}
            manifest = REPLAY.manifest_bytes({"index": index, "tables": tables, "files": listed})
            write_file(path / REPLAY.manifest, manifest)
        except BaseException:
            for name in files:
                (path / name).unlink(missing_ok=True)
            raise
        self.newest = REPLAY.manifest_of(manifest)
        for left in () if into is not None else _OURS:  # of older checkpoints, and of those that were never finished
            for file in self.path.glob(left):
                if file.name not in named:
                    file.unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        """The state that was written last. Raises ReplayError, with its name, for a file that is missing or altered."""
        manifest = REPLAY.read_manifest(self.path)
        try:
            state = self._state_of(manifest)
        except ReplayError:
            if REPLAY.read_manifest(self.path) == manifest:
                raise
            return self.read()  # another one was written meanwhile, and the files of this one are gone
        self.newest = manifest
        return state

    def _state_of(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        def read(name: str) -> Any:
            return unpacked(REPLAY, REPLAY.read_file(self.path, name, manifest["files"]), name)

        state: dict[str, Any] = read(manifest["index"])
        for (_, table), record in zip(state["tables"], manifest["tables"], strict=True):
            if table["columns"] is not None:
                table["columns"]["blocks"] = dict(enumerate(map(read, record["blocks"])))
        return state


def _without_blocks(table: Sequence[Any]) -> list[Any]:
    """A module's id and the state of its table, but for the blocks of rows."""
    module_id, state = table
    columns = state["columns"]
    if columns is not None:
        columns = {name: part for name, part in columns.items() if name != "blocks"}
    return [module_id, {**state, "columns": columns}]
