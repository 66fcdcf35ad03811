"""Fragments of numbered environments for a replay, and what must stand in a row that is sampled from it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
from feeding_rollouts import SHORT
from hypothesis import strategies as st
from numbered_module import NumberedModule, numbered_envs
from serial_module import at_of

from rollflow import DatasetSink, Replay, Rollout
from rollflow.sinks import ReplayClient, ReplayHost
from rollflow.stream.data.tree import map_tree

Step = tuple[int, int, int]  # slot, episode, step

MODES = [gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.SAME_STEP]


def write_dataset(fragments: Iterable[Any], path: Any, **options: Any) -> DatasetSink:
    """Write fragments to the dataset in a folder; the sink, which is closed."""
    with DatasetSink(path, **options) as sink:
        for fragment in fragments:
            sink(fragment)
    return sink


def insert_all(replay: Replay, fragments: Iterable[Any]) -> None:
    for fragment in fragments:
        replay.insert(fragment)


class Played:
    """The fragments of one rollout of numbered environments, and all steps that it has made."""

    def __init__(self, slots: int, fragments: int, seed: int = 0, **options: Any) -> None:
        lengths, nested = options.pop("lengths", (1, 12)), options.pop("nested", False)
        envs, makers = numbered_envs(slots, lengths=lengths, nested=nested)
        options = {"num_fragments": fragments, "module": NumberedModule(), "fragment_length": 4} | options
        with Rollout(makers, seed=seed, **options) as rollout:
            self.fragments = list(rollout.fragments())
        self.steps: dict[Step, tuple[int, float, bool, bool]] = {
            (env.slot, episode, step): tuple(rest) for env in envs for episode, step, *rest in env.log
        }

    def check_row(self, row: dict[str, Any], frames: int = 1) -> Step:
        """Hold one row of a batch against the step that its observation names; returns that step."""
        obs, new_obs = at_of(row["obs"]), at_of(row["new_obs"])
        slot, episode, step = (int(each) for each in (obs[-1] if frames > 1 else obs))
        action, reward, terminated, truncated = self.steps[slot, episode, step]
        assert (row["actions"], row["rewards"]) == (action, reward)
        assert (row["terminateds"], row["truncateds"]) == (terminated, truncated)
        assert row["seen"].tolist() == [slot, episode, step]
        wanted = [[slot, episode, each] if each >= 0 else [0, 0, 0] for each in range(step + 1 - frames, step + 2)]
        if frames > 1:
            assert (obs.tolist(), new_obs.tolist()) == (wanted[:-1], wanted[1:])
        else:
            assert new_obs.tolist() == wanted[-1]
        return slot, episode, step


@st.composite
def plays(draw: Any) -> Played:
    """Rollouts of numbered environments, of one lane or two, in either autoreset mode."""
    lanes = draw(st.integers(1, 2))
    return Played(
        slots=lanes * draw(st.integers(1, 3)),
        fragments=draw(st.integers(1, 6)),
        seed=draw(st.integers(0, 99)),
        lanes=lanes,
        fragment_length=draw(st.integers(1, 7)),
        nested=draw(st.booleans()),
        lengths=draw(st.sampled_from([(1, 1), (1, 4), (5, 12)])),
        autoreset_mode=draw(st.sampled_from(MODES)),
    )


def rows_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a batch of single steps, as arrays and numbers."""
    count = len(batch["rewards"])
    return [map_tree(lambda leaf, place=place: leaf[place].numpy(), batch) for place in range(count)]


@contextmanager
def serving(replay: Replay, tmp_path: Path, scheme: str = "unix", **options: Any) -> Iterator[ReplayHost]:
    """A host; its addresses are in a folder, or with "tcp" on a port of this machine's."""
    anywhere = "tcp://127.0.0.1:0"
    settings = {
        "rollouts": anywhere if scheme == "tcp" else f"{scheme}:{tmp_path / 'rollouts'}",
        "trainers": anywhere if scheme == "tcp" else f"unix:{tmp_path / 'trainers'}",
        "limits": SHORT,
    }
    with ReplayHost(replay, **{**settings, **options}) as host:
        yield host


def client_of(host: ReplayHost, **options: Any) -> ReplayClient:
    return ReplayClient(str(host.trainers), **{"timeout": 20.0, **options})
