"""RLlib's files of episodes, packed by hand: how chunks become episodes, and what is refused."""

import base64
import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollflow.sinks import DatasetSource
from rollflow.stream import DatasetError

OBSERVATIONS = gym.spaces.Dict({"at": gym.spaces.Box(-1, 9, (2,), np.float32), "kind": gym.spaces.Discrete(4, start=2)})
ACTIONS = gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3])])


def text_of(array: Any) -> str:
    """An array as RLlib writes the bounds of a space."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(zlib.compress(file.getvalue())).decode()


def described(space: Any) -> dict[str, Any]:
    """A space as RLlib describes it."""
    if isinstance(space, gym.spaces.Dict):
        return {"space": "dict", "spaces": {name: described(part) for name, part in space.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return {"space": "tuple", "spaces": [described(part) for part in space]}
    if isinstance(space, gym.spaces.Discrete):
        return {"space": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.MultiDiscrete):
        return {"space": "multi-discrete", "nvec": text_of(space.nvec), "dtype": space.dtype.str}
    bounds = {"low": text_of(space.low), "high": text_of(space.high)}
    return {"space": "box", "shape": space.shape, "dtype": space.dtype.str, **bounds}


def packed(value: Any) -> Any:
    """An array or number in the form of msgpack-numpy."""
    if isinstance(value, np.ndarray):
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()}
    return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}


def chunk(name: str, begin: int, end: int, terminated: bool = False, lookback: int = 0, **changed: Any) -> bytes:
    """The row of a chunk whose observation before step t is t, [t, -t]."""
    first = begin - lookback
    seen = [{"at": np.array([t, -t], np.float32), "kind": np.int64(2 + t % 2)} for t in range(first, end + 1)]
    actions = [(np.array([t % 2, t % 3]),) for t in range(first, end)]
    state = {
        "id_": name,
        "t_started": begin,
        "t": end,
        "observations": {"data": seen, "lookback": lookback, "finalized": False},
        "actions": {"data": actions, "lookback": lookback, "finalized": False},
        "rewards": {"data": np.arange(first, end, dtype=np.float64), "lookback": lookback, "finalized": True},
        "is_terminated": np.bool_(terminated),
        "is_truncated": False,
        "_observation_space": described(OBSERVATIONS),
        "_action_space": described(ACTIONS),
        **changed,
    }
    row: bytes = msgpack.packb(state, default=packed)
    return row


def written(folder: Path, *files: list[bytes]) -> Path:
    """A folder with files that have these rows."""
    for number, rows in enumerate(files):
        path = folder / "env" / f"run-000001-0000{number}" / "part.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"item": pa.array(rows, pa.binary())}), path)
    return folder


def test_chunks_are_put_together_and_come_once(tmp_path: Path) -> None:
    one, other = chunk("a", 0, 3), chunk("b", 0, 2, terminated=True)
    source = DatasetSource(written(tmp_path, [one, other], [one, other, chunk("a", 3, 5, terminated=True, lookback=2)]))
    assert (source.observation_space, source.action_space) == (OBSERVATIONS, ACTIONS)
    assert source.observation_space["at"].dtype == np.float32
    episodes = list(source.episodes())
    assert [(each.id_, len(each), each.t_started, each.is_terminated) for each in episodes] == [
        ("a", 5, 0, True),
        ("b", 2, 0, True),
    ]
    assert episodes[0].get_observations()["at"].tolist() == [[t, -t] for t in range(6)]
    assert episodes[0].get_observations()["kind"].tolist() == [2, 3, 2, 3, 2, 3]
    assert episodes[0].get_actions()[0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 0], [0, 1]]
    assert episodes[0].get_rewards().tolist() == [0, 1, 2, 3, 4]
    shuffled = DatasetSource(tmp_path, shuffle_seed=0, batch_size=3)
    assert sorted(reward for batch in shuffled.batches() for reward in batch["rewards"].tolist()) == [
        0,
        0,
        1,
        1,
        2,
        3,
        4,
    ]


def test_of_a_chunk_that_comes_again_with_more_steps_the_longer_one_counts(tmp_path: Path) -> None:
    short, rest, longer = chunk("a", 0, 2), chunk("a", 2, 3), chunk("a", 0, 5, terminated=True)
    source = DatasetSource(written(tmp_path, [short, rest], [longer]))
    (episode,) = source.episodes()
    assert (len(episode), episode.is_terminated) == (5, True)
    assert episode.get_rewards().tolist() == [0, 1, 2, 3, 4]


def test_chunks_that_overlap_in_part_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="episode a has chunks of steps 0 to 3 and 2 to 5, expected none that overl"):
        DatasetSource(written(tmp_path, [chunk("a", 0, 3), chunk("a", 2, 5)]))


def test_episodes_with_other_spaces_are_refused(tmp_path: Path) -> None:
    other = chunk("b", 0, 2, _action_space=described(gym.spaces.Discrete(2)))
    with pytest.raises(
        DatasetError, match=r"-00001/part\.parquet has the spaces .*, expected those of the episodes bef"
    ):
        DatasetSource(written(tmp_path, [chunk("a", 0, 2)], [other]))


def test_where_a_chunk_is_missing_another_episode_begins(tmp_path: Path) -> None:
    source = DatasetSource(written(tmp_path, [chunk("a", 4, 6, terminated=True), chunk("a", 0, 2), chunk("c", 7, 7)]))
    first, second = source.episodes()
    assert (first.t_started, len(first), first.is_truncated, "cut" in first.custom_data) == (0, 2, True, True)
    assert (second.t_started, len(second), second.is_terminated, second.custom_data) == (4, 2, True, {})
    assert source.summary().is_whole.tolist() == [False, False]


class Bomb:
    """Raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_what_is_pickled_stays_so(tmp_path: Path) -> None:
    bomb = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [1], b"data": pickle.dumps(Bomb())}
    source = DatasetSource(written(tmp_path, [chunk("a", 0, 2, infos={"data": bomb, "lookback": 0})]))
    assert source.num_steps == 2


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (msgpack.packb({"agent_episodes": {}}), "expected states of episodes of one agent"),
        (b"\xc1", r"part\.parquet can't be read: "),
        (chunk("a", 0, 2, _action_space={"space": "text"}), "expected box, discrete, multi-discrete, dict or tuple"),
        (chunk("a", 2, 2), "has no steps"),
    ],
)
def test_other_rows_are_refused(row: bytes, text: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=text):
        DatasetSource(written(tmp_path, [row]))


def test_a_chunk_with_other_items_than_its_space_has_is_named(tmp_path: Path) -> None:
    source = DatasetSource(written(tmp_path, [chunk("a", 0, 2, _observation_space=described(ACTIONS))]))
    with pytest.raises(DatasetError, match=r"part\.parquet can't be read: "):
        next(source.episodes())


def test_a_truncated_file_and_other_columns_are_refused(tmp_path: Path) -> None:
    written(tmp_path, [chunk("a", 0, 2)])
    (path,) = tmp_path.rglob("*.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DatasetError, match=r"part\.parquet can't be read: "):
        DatasetSource(tmp_path)
    pq.write_table(pa.table({"obs": [1.0], "rewards": [1.0]}), path)
    with pytest.raises(DatasetError, match="there is no dataset at"):
        DatasetSource(tmp_path)
