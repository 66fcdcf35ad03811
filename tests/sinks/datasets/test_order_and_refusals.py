"""Order, shares and resuming of a source; what a sink and a source refuse, and what their files look like."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from killed_sinks import held_writes
from numbered_module import NumberedModule
from replayed import Played, write_dataset
from replayed_agents import fragments_of
from torch.utils.data import DataLoader

from rollflow import DatasetSink, DatasetSource
from rollflow.sinks.datasets import dataset_source
from rollflow.sinks.datasets.dataset_folder import DATASET
from rollflow.stream import DatasetError
from rollflow.stream.data.tree import leaves_of

Step = tuple[int, ...]


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(slots=3, fragments=12, seed=5, fragment_length=8)


@pytest.fixture
def path(played: Played, tmp_path: Path) -> Path:
    """A dataset of several files."""
    write_dataset(played.fragments, tmp_path / "data", max_file_bytes=10_000, metadata={"env": "numbered", "seed": 5})
    return tmp_path / "data"


def steps_in(batch: Any) -> list[Step]:
    return [tuple(step) for step in batch["obs"].tolist()]


def all_steps(played: Played) -> list[Step]:
    return sorted(tuple(step) for fragment in played.fragments for step in fragment.gather("obs").tolist())


def column_of(path: Path, name: str) -> Any:
    """Parquet's record of a column in a file's first row group."""
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = (group.column(each) for each in range(group.num_columns))
    return next(column for column in columns if column.path_in_schema == name)


def test_a_shuffled_pass_has_every_step_and_another_order_than_the_next(path: Path, played: Played) -> None:
    source = DatasetSource(path, batch_size=1000, shuffle_seed=0, passes=2)
    first, second = (steps_in(batch) for batch in source.batches())
    assert first != second
    assert sorted(first) == sorted(second) == all_steps(played)
    again = DatasetSource(path, batch_size=1000, shuffle_seed=0)
    assert steps_in(next(again.batches())) == first
    third, fourth = (steps_in(batch) for batch in source.batches())  # the next loop has orders of its own
    assert len({tuple(each) for each in (first, second, third, fourth)}) == 4


def test_a_window_keeps_what_was_made_together(path: Path) -> None:
    in_order = [episode.id_ for episode in DatasetSource(path).episodes()]
    source = DatasetSource(path, shuffle_seed=1, window_steps=40)
    shuffled = [episode.id_ for episode in source.episodes()]
    places = [in_order.index(id_) for id_ in shuffled]
    jumps = sum(abs(one - other) > 20 for one, other in pairwise(places))
    assert shuffled != in_order
    assert sorted(shuffled) == sorted(in_order)
    assert jumps <= source.num_steps // 40  # between windows alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "complete", "agents"),
    [(None, False, "one"), (None, True, "several"), (4, True, "one"), (4, False, "several")],
)
def test_a_loaded_state_goes_on_exactly(
    path: Path, tmp_path: Path, seed: int | None, complete: bool, agents: str
) -> None:
    if agents == "several":
        path = tmp_path / "several"
        write_dataset(fragments_of(count=4), path)

    def source() -> DatasetSource:
        options: Any = {"passes": 2, "window_steps": 30, "complete_episodes": complete}
        return DatasetSource(path, batch_size=17, shuffle_seed=seed, **options)

    run = source()
    made, states = [], [run.state_dict()]
    for batch in run.batches():
        made.append(batch)
        states.append(json.loads(json.dumps(run.state_dict())))
    for done, state in enumerate(states):
        resumed = source()
        resumed.load_state_dict(state)
        left = list(resumed.batches())
        assert len(left) == len(made) - done
        for one, other in zip(left, made[done:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_loop_that_is_left_goes_on_in_the_next(path: Path, played: Played) -> None:
    source = DatasetSource(path, batch_size=10)
    steps = steps_in(next(source.batches()))
    for batch in source.batches():
        steps += steps_in(batch)
    assert sorted(steps) == all_steps(played)


def test_workers_of_a_data_loader_get_disjoint_shares(path: Path, played: Played) -> None:
    source = DatasetSource(path, batch_size=20, shuffle_seed=0, passes=2)
    loader: Any = DataLoader(source, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(step for batch in loader for step in steps_in(batch)) == sorted(2 * all_steps(played))


def test_a_source_within_a_pass_is_refused_by_workers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DatasetSource(path, batch_size=20)
    next(source.batches())
    monkeypatch.setattr(dataset_source, "get_worker_info", lambda: SimpleNamespace(id=0, num_workers=2))
    with pytest.raises(DatasetError, match="the source stands within a pass"):
        next(source.batches())


def test_a_state_of_another_order_is_refused(path: Path) -> None:
    state = DatasetSource(path, shuffle_seed=1).state_dict()
    with pytest.raises(DatasetError, match="the state has shuffle_seed=1, expected 2"):
        DatasetSource(path, shuffle_seed=2).load_state_dict(state)


def test_the_files_can_be_understood_without_rollflow(path: Path, played: Played) -> None:
    steps, episodes = pq.read_table(path / "steps"), pq.read_table(path / "episodes")
    recorded = ["obs", "actions", "rewards", "terminateds", "truncateds"]
    assert steps.column_names == ["run", "eps_id", "t", *recorded, *played.fragments[0].extra_columns]
    assert str(steps.schema.field("obs").type) == "fixed_size_list<element: int64 not null>[3]"
    rows = steps.select(["t", "obs", "actions", "rewards", "terminateds"]).to_pylist()
    assert sorted(tuple(row["obs"]) for row in rows) == all_steps(played)
    for row in rows:
        action, reward, terminated, _ = played.steps[tuple(row["obs"])]
        assert (row["actions"], row["rewards"], row["terminateds"]) == (action, reward, terminated)
        assert row["t"] == row["obs"][2]
    for row in episodes.to_pylist():
        slot, number, step = row["last_obs"]
        made = [played.steps[slot, number, each] for each in range(row["t_started"], step)]
        assert (row["slot"], row["num_steps"], row["return"]) == (slot, len(made), sum(each[1] for each in made))
    description = json.loads((path / "dataset.json").read_text())
    assert description["observation_space"]["type"] == "Box"
    (run,) = description["runs"]
    assert run["metadata"] == {"env": "numbered", "seed": 5}
    assert {"python", "rollflow", "torch", "pyarrow"} <= run["versions"].keys()
    rewards = column_of(next((path / "steps").iterdir()), "rewards")
    assert (rewards.compression, "RLE_DICTIONARY" in rewards.encodings) == ("ZSTD", False)


def test_episodes_are_chosen_by_numbers_or_by_a_mask(played: Played, tmp_path: Path) -> None:
    write_dataset(played.fragments, tmp_path)
    lengths = DatasetSource(tmp_path).summary().lengths
    mask = lengths > np.median(lengths)
    by_number, by_mask = (DatasetSource(tmp_path, episodes=each) for each in (np.flatnonzero(mask), mask))
    assert [each.id_ for each in by_mask.episodes()] == [each.id_ for each in by_number.episodes()]
    for wrong in (np.zeros(len(mask), bool), mask[:-1], [0.5], [len(mask)]):
        with pytest.raises(ValueError, match=rf"expected one or more numbers from 0 to .*, or bool\[{len(mask)}\]"):
            DatasetSource(tmp_path, episodes=wrong)  # type: ignore[arg-type]


def test_only_the_outputs_that_are_asked_for_are_written(played: Played, tmp_path: Path) -> None:
    write_dataset([played.fragments[0]], tmp_path, extra=("vf_preds",))
    (fragment,) = DatasetSource(tmp_path).fragments()
    assert set(fragment.extra_columns) == {"vf_preds", "policy_version"}
    with pytest.raises(DatasetError, match=r"has no output 'nothing', which is to be written; its outputs: .*vf_preds"):
        DatasetSink(tmp_path / "other", extra=("nothing",))(played.fragments[0])


def test_fragments_of_another_kind_are_refused_with_the_field(path: Path, played: Played) -> None:
    nested = Played(slots=1, fragments=1, nested=True).fragments[0]
    told = "observation_space is .* but .* in the fragment"
    with DatasetSink(path) as sink, pytest.raises(DatasetError, match=told):
        sink(nested)
    told = r"the columns \[.*vf_preds.*\] are in the dataset alone"
    with DatasetSink(path, extra=()) as sink, pytest.raises(DatasetError, match=told):
        sink(played.fragments[0])
    with DatasetSink(path) as sink:
        sink(played.fragments[0])
        with pytest.raises(DatasetError, match="observation_space"):
            sink(nested)


FULL = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
FAILURES: dict[str, Any] = {
    "No space left on device": lambda path, patch: patch.setattr(os, "fsync", FULL),
    "No space left": lambda path, patch: (path / "steps" / ".000002.parquet.part").symlink_to("/dev/full"),
    "No such file": lambda path, patch: shutil.rmtree(path),
}


@pytest.mark.parametrize("told", FAILURES)
def test_a_disk_that_fails_is_an_error_with_the_path_and_the_count(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    path, counts = tmp_path / "data", [fragment.num_steps for fragment in played.fragments]
    sink = DatasetSink(path)
    sink(played.fragments[0])
    sink.flush()
    with monkeypatch.context() as patch:
        FAILURES[told](path, patch)
        sink(played.fragments[1])
        lost = f"{counts[1]} steps that were handed over are not in the dataset, {counts[0]} are"
        with pytest.raises(DatasetError, match=f"writing to {path} has failed: .*{told}.*; {lost}"):
            sink.close()
    with pytest.raises(DatasetError, match=told):
        sink(played.fragments[2])
    if path.exists():
        assert DatasetSource(path).num_steps == counts[0]
        assert [each.name for each in (path / "steps").iterdir()] == ["000001.parquet"]
        write_dataset([played.fragments[2]], path)
        assert DatasetSource(path).num_steps == counts[0] + counts[2]


def test_a_damaged_file_is_named(path: Path) -> None:
    name = path / "steps" / "000002.parquet"
    whole = name.read_bytes()
    name.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=f"{name} can't be read: .*truncated or altered"):
        DatasetSource(path)
    name.write_bytes(whole)
    altered, rewards = bytearray(whole), column_of(name, "rewards")
    altered[rewards.data_page_offset + rewards.total_compressed_size - 3] ^= 1  # in the page's values
    name.write_bytes(altered)
    with pytest.raises(DatasetError, match=f"{name} can't be read"):
        list(DatasetSource(path).fragments())
    name.write_bytes((path / "steps" / "000001.parquet").read_bytes())
    with pytest.raises(DatasetError, match=f"{name} can't be read: it was not written together with"):
        DatasetSource(path)
    name.write_bytes(whole)
    (path / "episodes" / "000001.parquet").unlink()
    with pytest.raises(DatasetError, match=r"episodes/000001.parquet is missing"):
        DatasetSource(path)


def test_a_description_of_format_1_is_read_and_replaced(path: Path, played: Played) -> None:
    name, count = path / "dataset.json", DatasetSource(path).num_steps
    before = DATASET.manifest_of(name.read_bytes())
    name.write_text(json.dumps({**before, "format": "rollflow dataset", "version": 1}))
    assert DatasetSource(path).description == before
    write_dataset(played.fragments[:1], path)
    assert DATASET.manifest_of(name.read_bytes())["runs"][0] == before["runs"][0]
    assert DatasetSource(path).num_steps > count


def test_a_newer_a_damaged_and_a_missing_description_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="there is no dataset at"):
        DatasetSource(tmp_path / "nothing")
    name = path / "dataset.json"
    description = DATASET.manifest_of(name.read_bytes())
    name.write_bytes(DATASET.manifest_bytes(description | {"format": 4}))
    with pytest.raises(DatasetError, match=r"dataset.json has format 4, and .* up to 3; expected a newer rollflow"):
        DatasetSource(path)
    name.write_bytes(name.read_bytes().replace(b'"runs"', b'"runz"'))
    with pytest.raises(DatasetError, match=r"dataset.json has another digest than it says"):
        DatasetSource(path)
    name.write_bytes(DATASET.manifest_bytes(description | {"action_space": {"type": "Ball"}}))
    with pytest.raises(DatasetError, match=r"dataset.json: action_space: type is 'Ball'"):
        DatasetSource(path)
    name.write_text(name.read_text()[:50])
    with pytest.raises(DatasetError, match=r"dataset.json can't be read"):
        DatasetSource(path)
    name.unlink()  # which leaves no empty dataset
    with pytest.raises(DatasetError, match=r"has steps/.*, as a dataset without its dataset\.json has"):
        DatasetSource(path)


THEIRS = ["steps/000009.parquet", "episodes/000009.parquet", "data/metadata.json", "metadata.json", "meta/info.json"]


@pytest.mark.parametrize("name", [*THEIRS, "manifest.json"])
def test_files_of_somebody_else_are_left_alone(name: str, played: Played, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / name
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(DatasetError, match=f"theirs has {name}, as .* has, expected"):
        DatasetSink(tmp_path / "theirs")
    assert theirs.read_text() == "theirs"
    theirs.unlink()
    write_dataset(played.fragments[:1], tmp_path / "theirs")  # which the refused sink no longer holds


def test_a_committed_file_of_steps_that_is_missing_is_named(played: Played, tmp_path: Path) -> None:
    write_dataset(played.fragments[:3], tmp_path, max_file_bytes=1)
    (tmp_path / "steps" / "000002.parquet").unlink()
    for use in (DatasetSource, lambda path: DatasetSink(path)(played.fragments[3])):
        with pytest.raises(DatasetError, match=r"steps/000002.parquet is missing, expected a file for each"):
            use(tmp_path)
    assert (tmp_path / "episodes" / "000002.parquet").exists()


def test_batches_are_tensors_with_a_module_and_without(path: Path) -> None:
    for module in (None, NumberedModule()):
        batch = next(DatasetSource(path, module=module).batches())
        assert all(torch.is_tensor(leaf) for name in batch for leaf in leaves_of(batch[name]))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for make in (DatasetSink, DatasetSource):
        with pytest.raises(DatasetError, match=r"pip install 'rollflow\[datasets\]'"):
            make(tmp_path)


@pytest.mark.slow
def test_sinks_are_imported_without_pyarrow() -> None:
    program = "import sys, rollflow.sinks; rollflow.sinks.DatasetSink; print('pyarrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


def test_the_reason_of_a_loss_is_kept(tmp_path: Path) -> None:
    (fragment,) = Played(slots=2, fragments=1, seed=5, fragment_length=30).fragments
    chunks = fragment.chunks
    lost = int(chunks.truncated.argmax())
    fragment.custom_data[int(chunks.slot[lost]), int(chunks.number[lost])] = {"lost": "worker 0 was killed"}
    write_dataset([fragment], tmp_path)
    reasons = {episode.id_: episode.custom_data.get("lost") for episode in DatasetSource(tmp_path).episodes()}
    assert reasons == {chunk.id_: chunk.custom_data.get("lost") for chunk in fragment.episodes()}
    assert "worker 0 was killed" in reasons.values()


def test_arguments_out_of_bounds_are_refused(path: Path) -> None:
    for options in ({"max_file_bytes": 0}, {"queue_size": 0}, {"max_file_s": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DatasetSink(path, **options)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="has no form in JSON"):
        DatasetSink(path, metadata={"env": gym})
    with pytest.raises(DatasetError, match="rollout is a str, expected a rollout, or None"):
        DatasetSink(path, rollout="CartPole-v1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="metadata is 'x', expected a dict"):
        DatasetSink(path, metadata="x")  # type: ignore[arg-type]
    with DatasetSink(path) as sink, pytest.raises(DatasetError, match="a dataset takes fragments, got dict"):
        sink({})  # type: ignore[arg-type]
    wrong = {"batch_size": 0, "passes": 0, "lookback": -1, "window_steps": 0, "complete_episodes": 2}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=name):
            DatasetSource(path, **{name: value})  # type: ignore[arg-type]


def test_the_thread_that_writes_is_bounded(played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = held_writes(monkeypatch)
    with DatasetSink(tmp_path, queue_size=2) as sink:
        sink(played.fragments[0])
        sink(played.fragments[1])
        third = threading.Thread(target=sink, args=(played.fragments[2],))
        third.start()
        third.join(0.05)
        assert third.is_alive()  # it waits: two fragments are there already
        may_write.set()
        third.join(30)
    assert sink.num_steps == sum(fragment.num_steps for fragment in played.fragments[:3])
