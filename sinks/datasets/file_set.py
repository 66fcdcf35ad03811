"""FileSet: the files that are written, and committed, together."""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollflow.sinks.datasets.arrow_columns import import_pyarrow, whole_numbers
from rollflow.sinks.datasets.dataset_folder import (
    ENV_EPISODES,
    ENV_EPS_ID,
    EPISODES,
    MARK,
    STEPS,
    DatasetFolder,
    make_folder,
    sync,
)
from rollflow.sinks.datasets.fragment_tables import FragmentRows, tables_of
from rollflow.stream.data.columns import Columns

# Columns of steps that are written with a dictionary: numbers take longer, for no less.
_REPEATED = [Columns.EPS_ID, Columns.AGENT_ID, Columns.MODULE_ID, ENV_EPS_ID]
_SOUGHT = ["run", Columns.EPS_ID, Columns.T]  # and those with least and largest values, by which readers seek rows
_GROUP_BYTES = 2 << 20  # before compression, that make a row group


class FileSet:
    """Files of one number, written together: of steps, of their episodes, and of what else a dataset has.

    folder      of the dataset, which is locked
    number      of the files

    Small fragments wait, and become one row group: to make a table and to write it takes a while, however small it is.
    """

    def __init__(self, folder: DatasetFolder, number: int) -> None:
        self._folder, self.number = folder, number
        self._files: dict[str, Any] = {}
        self._writers: dict[str, Any] = {}
        self._rows: dict[str, list[FragmentRows]] = {}
        self._env_episodes: list[Any] = []
        self._waiting_bytes = self._written_bytes = 0
        self._mark = secrets.token_hex(8)  # of the set: steps are not read with episodes of another one

    @property
    def nbytes(self) -> int:
        """Bytes of all files, and of what waits for them."""
        return self._waiting_bytes + self._written_bytes

    def write(self, rows: Mapping[str, FragmentRows], env_episodes: Any | None) -> None:
        """Write what is stored of a fragment, or let it wait for others.

        rows            by the folder of their steps and episodes, such as "" or "modules/red/"
        env_episodes    Arrow table of the environments' chunks; None: of one agent
        """
        for folder, each in rows.items():
            self._rows.setdefault(folder, []).append(each)
            self._waiting_bytes += each.nbytes
        if env_episodes is not None:
            self._env_episodes.append(env_episodes)
            self._waiting_bytes += env_episodes.get_total_buffer_size()
        if self._waiting_bytes >= _GROUP_BYTES:
            self._write_waiting()

    def _write_waiting(self) -> None:
        """Write a row group of each kind of table that waits."""
        pa, _ = import_pyarrow()
        for folder, rows in self._rows.items():
            steps, episodes = tables_of(rows)
            self._write_table(folder + EPISODES, episodes)
            self._write_table(folder + STEPS, steps)
        if self._env_episodes:
            self._write_table(ENV_EPISODES, pa.concat_tables(self._env_episodes))
        self._rows, self._env_episodes, self._waiting_bytes = {}, [], 0
        self._written_bytes = sum(file.tell() for file in self._files.values())

    def _write_table(self, kind: str, table: Any) -> None:
        """Write a row group."""
        pa, pq = import_pyarrow()
        has_steps = Path(kind).name == STEPS
        if kind not in self._writers:
            make_folder(self._folder.path / kind, self._folder.path)
            # Arrow's own file: it waits for no interpreter lock, which a rollout holds nearly all the time.
            file = self._files[kind] = pa.OSFile(os.fspath(self._folder.partial(kind, self.number)), "wb")
            self._writers[kind] = pq.ParquetWriter(
                file,
                table.schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=_REPEATED if has_steps else False,
                column_encoding=dict.fromkeys(whole_numbers(table.schema), "DELTA_BINARY_PACKED"),
                write_statistics=_SOUGHT if has_steps else True,
                write_page_checksum=True,
            )
            self._writers[kind].add_key_value_metadata({MARK: self._mark})
        self._writers[kind].write_table(table, row_group_size=max(1, table.num_rows))

    def commit(self) -> None:
        """End the files, write them to the disk, and name them; the one that commits the others comes last."""
        self._write_waiting()
        for kind, writer in self._writers.items():
            writer.close()
            self._files[kind].close()
            sync(self._folder.partial(kind, self.number))
        last = self._folder.last_kind
        for kind in sorted(self._writers, key=lambda kind: kind == last):
            self._folder.partial(kind, self.number).replace(self._folder.file(kind, self.number))
            sync(self._folder.path / kind)

    def discard(self) -> None:
        """Close the files and remove them, as far as the disk allows."""
        for kind, file in self._files.items():
            # A disk that has failed may fail again, of which nobody needs to know.
            with suppress(OSError, ValueError):
                if kind in self._writers:
                    self._writers[kind].close()
            with suppress(OSError, ValueError):
                file.close()
            with suppress(OSError):
                self._folder.partial(kind, self.number).unlink()
