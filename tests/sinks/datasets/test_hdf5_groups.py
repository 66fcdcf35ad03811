"""Files that are written without the HDF5 library are files of HDF5: the library reads them, and changes them."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from rollflow.sinks.datasets.hdf5_groups import Hdf5Groups
from rollflow.stream import DatasetError

DTYPES = ("bool", "int8", "uint8", "int16", "uint32", "int64", "float16", "float32", "float64")


def written(path: Path, *counts: int) -> np.ndarray:
    """Groups, added so many at a time, of which the number n has n % 7 + 1 rows; the rows of "column", end to end."""
    lengths = np.arange(sum(counts)) % 7 + 1
    rows = np.random.default_rng(0).random((lengths.sum(), 2, 3))
    group_ends = np.cumsum(counts)
    with Hdf5Groups(path) as file:
        for end, count in zip(group_ends.tolist(), counts, strict=True):
            numbers = np.arange(end - count, end)
            mine = rows[lengths[: end - count].sum() : lengths[:end].sum()]
            columns = {"column": mine, "tree": ({"ä": mine > 0.5},)}
            names = [f"group_{each}" for each in numbers]
            file.add(names, columns, dict.fromkeys(columns, lengths[numbers]), number=numbers)
    return rows


@pytest.mark.parametrize("counts", [(1,), (3, 5), (127, 1), (128, 1), (1000, 300)])
def test_the_library_reads_what_is_written(tmp_path: Path, counts: tuple[int, ...]) -> None:
    rows = written(tmp_path / "file.hdf5", *counts)
    end = 0
    with h5py.File(tmp_path / "file.hdf5", "r") as file:
        assert sorted(file.keys()) == sorted(f"group_{number}" for number in range(sum(counts)))
        assert "group" not in file
        for number in range(sum(counts)):
            group, begin, end = file[f"group_{number}"], end, end + number % 7 + 1
            assert dict(group.attrs) == {"number": number}
            np.testing.assert_array_equal(group["column"][()], rows[begin:end])
            np.testing.assert_array_equal(group["tree/_index_0/ä"][()], rows[begin:end] > 0.5)


def test_every_type_comes_back(tmp_path: Path) -> None:
    columns = {name: np.arange(6).astype(name) for name in DTYPES}
    with Hdf5Groups(tmp_path / "file.hdf5") as file:
        file.add(["one"], columns, dict.fromkeys(columns, np.array([6])))
    with h5py.File(tmp_path / "file.hdf5", "r") as file:
        for name, column in columns.items():
            assert file["one"][name].dtype == column.dtype
            np.testing.assert_array_equal(file["one"][name][()], column)


def test_the_library_changes_what_is_written(tmp_path: Path) -> None:
    written(tmp_path / "file.hdf5", 200)
    with h5py.File(tmp_path / "file.hdf5", "a") as file:
        for number in range(200, 500):
            file.create_group(f"group_{number}").attrs["number"] = number
        for number in range(100):
            del file[f"group_{number}"]
        file["group_150"].attrs["more"] = np.arange(100)
        file["group_150/column"][0] = 7
        file["group_150"]["another"] = "text"
    with h5py.File(tmp_path / "file.hdf5", "r") as file:
        assert sorted(file.keys()) == sorted(f"group_{number}" for number in range(100, 500))
        assert all(file[f"group_{number}"].attrs["number"] == number for number in range(100, 500))
        assert (file["group_150/column"][0] == 7).all()
        assert file["group_150/another"][()] == b"text"
        assert file["group_150"].attrs["more"].tolist() == list(range(100))


def test_more_groups_than_a_file_can_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.sinks.datasets.hdf5_groups._MOST_LINKS", 3)
    with pytest.raises(DatasetError, match="4 groups for one HDF5 file, expected 3 at most"):
        written(tmp_path / "file.hdf5", 4)
