"""Recorded runs: a replay gives the same batches, bit for bit, in the loop's thread, and names the first departure."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from kill_runs import digest, filtered, modules_of, weights_of
from together import Together

from rollflow import Checkpoints, Forward, MultiAgentRollout, Rollout, TrainerStream, Watch
from rollflow.nodes.rollout import schedule
from rollflow.stream import GraphError, RunError
from rollflow.stream.data.column import Column
from rollflow.stream.data.errors import CheckpointError, ModuleError

ROUNDS = 5
NAN = float("nan")


class Late(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole, some of whose steps take longer, as by chance; `threads` has those that have stepped one."""

    threads: ClassVar[set[int]] = set()

    def __init__(self, name: str = "CartPole-v1") -> None:
        super().__init__(gym.make(name))
        self.delays = random.Random()

    def step(self, action: Any) -> Any:
        self.threads.add(threading.get_ident())
        if self.delays.random() < 0.2:
            time.sleep(0.002 * self.delays.random())
        return super().step(action)


class LateTogether(Together):
    """Two agents in a `Late` environment each."""

    def __init__(self) -> None:
        super().__init__({agent: Late() for agent in "ab"})


def learnt(watch: Watch, rounds: int = ROUNDS, **options: Any) -> Iterator[str]:
    """Digests of the batches of a run that learns, with draws of torch's own generator, and of its weights."""
    torch.manual_seed(0)
    options = {"env": Late, "num_envs": 4, "fragment_length": 8, "seed": 3, "watch": watch} | options
    env = options.pop("env")
    rollout: Any = (MultiAgentRollout if env is LateTogether else Rollout)(env, **options)
    with rollout:
        for number, batch in enumerate(rollout.batches(), 1):
            yield digest(batch)
            for part in modules_of(rollout).values():
                for each in part.parameters():
                    each.data += 0.01 * torch.randn_like(each)
            rollout.publish(weights_of(rollout))
            if number == rounds:
                break
    yield digest(weights_of(rollout))


AGENTS: dict[str, Any] = {"env": LateTogether, "env_to_module_connector": filtered, "num_envs": 3, "lanes": 3}
AGENTS |= {"module": {"a": None, "b": None}}
WAYS: dict[str, dict[str, Any]] = {
    "inline": {"env_to_module_connector": filtered},
    "lanes": {"lanes": 2, "env_to_module_connector": filtered},
    "threads": {"where": "threads", "env_to_module_connector": filtered},
    "lstm": {"where": "threads", "model_config": {"use_lstm": True}},
    "next step": {"where": "threads", "autoreset_mode": "NextStep", "prefetch": 1},
    "ahead": {"where": "threads", "prefetch": 2, "env_to_module_connector": filtered},
    "processes": {"where": "processes", "workers": 2, "lanes": 3, "prefetch": 1, "env_to_module_connector": filtered},
    "too old": {"where": "threads", "prefetch": 3, "max_lag": 1},
    "in pace": {"where": "threads", "prefetch": 2, "max_lag": 1, "on_excess": "pace"},
    "to the end": {"where": "threads", "num_fragments": 4, "prefetch": 1, "rounds": 99},
    "in order": {"where": "threads", "deterministic": True, "prefetch": 1},
    "joint passes": {"where": "threads", "lanes": 4, "forward": Forward(max_batch=3), "prefetch": 1},
    "agents": {**AGENTS, "where": "threads", "prefetch": 1},
    "joint passes of agents": {**AGENTS, "where": "processes", "workers": 2, "forward": Forward(max_batch=4)},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_replay_gives_the_same_batches_in_the_loop_s_thread(way: str, tmp_path: Path) -> None:
    recorded = list(learnt(Watch(record=tmp_path / "run"), **WAYS[way]))
    torch.manual_seed(99)
    Late.threads.clear()
    assert list(learnt(Watch(replay=tmp_path / "run"), **WAYS[way])) == recorded
    assert Late.threads == {threading.get_ident()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_any_run_can_be_replayed(seed: int, tmp_path: Path) -> None:
    drawn = random.Random(seed)
    options = dict(drawn.choice(list(WAYS.values())))
    options |= {"seed": seed, "fragment_length": drawn.randint(1, 20)}
    recorded = list(learnt(Watch(record=tmp_path / "run"), **options))
    assert list(learnt(Watch(replay=tmp_path / "run"), **options)) == recorded


def test_a_run_that_is_saved_and_resumed_while_it_is_recorded_is_replayed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"where": "threads", "prefetch": 1, "checkpoints": Checkpoints(tmp_path, every_s=1e-3)}
    recorded = list(learnt(Watch(record=tmp_path / "first"), **options))
    assert list(learnt(Watch(replay=tmp_path / "first"), **options)) == recorded

    def resumed(**watch: Any) -> list[str]:
        options = {"checkpoints": None, "watch": Watch(**watch)}
        with Rollout.resume(sorted(tmp_path.glob("checkpoint-*"))[-1], Late, **options) as rollout:
            return [digest(batch) for batch, _ in zip(rollout.batches(), range(3), strict=False)]

    assert resumed(record=tmp_path / "second") == resumed(replay=tmp_path / "second")


def test_a_program_without_a_seed_is_replayed_with_the_one_that_was_drawn(tmp_path: Path) -> None:
    recorded = list(learnt(Watch(record=tmp_path / "run"), seed=None, where="threads"))
    assert list(learnt(Watch(replay=tmp_path / "run"), seed=None, where="threads")) == recorded


@pytest.mark.anyio
async def test_an_async_loop_is_replayed_in_its_own_thread(tmp_path: Path) -> None:
    async def batches(watch: Watch) -> list[str]:
        async with Rollout(Late, num_envs=3, where="threads", fragment_length=4, watch=watch, num_fragments=3) as run:
            return [digest(batch) async for batch in run.batches()]

    torch.manual_seed(0)
    recorded = await batches(Watch(record=tmp_path / "run"))
    Late.threads.clear()
    torch.manual_seed(0)
    assert await batches(Watch(replay=tmp_path / "run")) == recorded
    assert Late.threads == {threading.get_ident()}


def test_a_run_that_was_killed_is_replayed_up_to_its_last_whole_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "EVERY_S", 0.0)
    path, copied, recorded = tmp_path / "run", tmp_path / "copied", []
    for number, each in enumerate(learnt(Watch(record=path), where="threads", prefetch=1), 1):
        recorded.append(each)
        if number == 4:
            copied.write_bytes(path.read_bytes()[:-3])
    replayed = []
    with pytest.raises(RunError, match="copied ends here, behind 8 fragments: it was killed, or its file was cut"):
        for each in learnt(Watch(replay=copied), where="threads", prefetch=1):
            replayed.append(each)  # noqa: PERF402
    assert replayed == recorded[: len(replayed)]
    assert len(replayed) == 2
    with pytest.raises(RunError, match=r"run ends here, .* its program left it"):
        list(learnt(Watch(replay=path), where="threads", rounds=99))


class Mortal(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose process ends in its step number `at`, if a file is not there yet, which says how often it did."""

    def __init__(self, path: str, at: int, times: int) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.path, self.at, self.times, self.count = Path(path), at, times, 0

    def step(self, action: Any) -> Any:
        self.count += 1
        died = self.path.read_text() if self.path.exists() else ""
        if self.count == self.at and len(died) < self.times:
            self.path.write_text(died + "x")
            os._exit(1)
        return super().step(action)


def test_a_worker_that_was_lost_is_replayed_as_lost(tmp_path: Path) -> None:
    died, path = str(tmp_path / "died"), tmp_path / "run"
    options: dict[str, Any] = {"where": "processes", "workers": 2, "num_envs": 2}
    options |= {"env": lambda: Mortal(died, at=21, times=2)}
    recorded = list(learnt(Watch(record=path), **options))
    assert len(Path(died).read_text()) == 2
    assert list(learnt(Watch(replay=path), **options)) == recorded


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lane . is set aside")
def test_a_replay_ends_where_a_lane_was_set_aside(tmp_path: Path) -> None:
    died, path = tmp_path / "died", tmp_path / "run"
    options: dict[str, Any] = {"where": "processes", "workers": 2, "env": [Late, lambda: Mortal(str(died), 3, 6)]}
    options |= {"num_envs": 2, "num_fragments": 4, "rounds": 99}
    list(learnt(Watch(record=path), **options))
    assert len(died.read_text()) == 6
    with pytest.raises(RunError, match=r"run can't be replayed further: lane 1 was set aside: process \d+ exited with"):
        list(learnt(Watch(replay=path), **options))


def test_files_that_are_no_recorded_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    list(learnt(Watch(record=path)))
    whole = path.read_bytes()

    def refused(data: bytes, match: str) -> None:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=match):
            Rollout(Late, num_envs=4, watch=Watch(replay=path))

    altered = bytearray(whole)
    altered[-40] ^= 1
    refused(bytes(altered), "run was altered: the checksum of a block")
    refused(b"PK" + whole, "run is no recorded run: it begins with b'PKroll")
    refused(whole.replace(b"schedule 1", b"schedule 9"), "begins with b'rollflow schedule 9.*expected")
    refused(whole[:50], "has no whole block: its run was killed before it began")
    with pytest.raises(CheckpointError, match=r"there is no recorded run at .*absent"):
        Rollout(Late, watch=Watch(replay=tmp_path / "absent"))
    with pytest.raises(CheckpointError, match=r"can't be recorded in .*; expected a file"):
        next(learnt(Watch(record=tmp_path)))
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"there is such a file; expected another path, or replay="):
        next(learnt(Watch(record=path)))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 4}, "seed was 3, and is 4"),
        ({"fragment_length": 9}, "fragment_length was 8, and is 9"),
        ({"num_envs": 3}, r"slots was \[4\], and is \[3\]"),
        ({"env_to_module_connector": filtered}, "pieces of env_to_module was .*, and is .*'MeanStdFilter'"),
        ({"max_lag": 2}, "max_lag was None, and is 2"),
        ({"model_config": {"fcnet_hiddens": [8]}}, "first weights of default_policy was [0-9a-f]{8}, and is"),
    ],
)
def test_other_settings_than_those_of_the_run_are_named(options: Any, match: str, tmp_path: Path) -> None:
    list(learnt(Watch(record=tmp_path / "run")))
    with pytest.raises(CheckpointError, match=f"a run with other settings: .*{match}.*; expected the same program"):
        next(learnt(Watch(replay=tmp_path / "run"), **options))


class Altered(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole; of the observation and the reward of its step number `at` others are made."""

    at = 10**9

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.count = 0

    def made(self, observation: Any, reward: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        self.count += 1
        if self.count == self.at:
            observation, reward = self.made(observation, reward)
        return observation, reward, *rest


def alter(patch: pytest.MonkeyPatch, at: int, made: Any) -> None:
    patch.setattr(Altered, "at", at)
    patch.setattr(Altered, "made", lambda env, observation, reward: made(observation, reward))


@pytest.mark.parametrize(
    ("made", "step", "row", "named"),
    [
        (lambda observation, reward: (observation, 0.5), 20, 19, "'rewards'"),
        (lambda observation, reward: (observation + 1, reward), 13, 13, "'obs', .*'vf_preds'"),  # of the step behind
    ],
)
def test_the_first_departure_is_named(
    made: Any, step: int, row: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"env": Altered, "num_envs": 1, "where": "threads"}
    list(learnt(Watch(record=tmp_path / "run"), **options))
    alter(monkeypatch, step, made)
    with pytest.raises(RunError, match=f"the run departs from the one that .*: lane 0, vector step {row}: {named}"):
        list(learnt(Watch(replay=tmp_path / "run"), **options))


def test_other_weights_than_those_that_were_published_are_named(tmp_path: Path) -> None:
    def run(watch: Watch, publishes: int, scale: float) -> None:
        torch.manual_seed(0)
        with Rollout(Late, num_envs=2, where="threads", fragment_length=4, seed=1, watch=watch) as rollout:
            for number, _ in enumerate(rollout.batches()):
                for each in rollout.module.parameters():
                    each.data *= scale
                if number < publishes:
                    rollout.publish(rollout.module.state_dict())
                if number == 3:
                    return

    run(Watch(record=tmp_path / "run"), 3, 1.5)
    run(Watch(replay=tmp_path / "run"), 3, 1.5)
    with pytest.raises(RunError, match="the weights that were published as version 1 differ, though all fragments"):
        run(Watch(replay=tmp_path / "run"), 3, 1.4)
    with pytest.raises(RunError, match="version 2 of the weights was acted with, and 1 is published"):
        run(Watch(replay=tmp_path / "run"), 1, 1.5)


class Faulty(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that raises in its step number `at`."""

    at = 10**9

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.count == self.at:
            raise ValueError(f"broken at step {self.at}")
        return super().step(action)


@pytest.mark.parametrize("place", ["inline", "threads"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("lanes", [2, 4])
def test_an_error_that_ended_a_run_comes_once_more(
    place: str, prefetch: int, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**watch: Any) -> tuple[list[str], Exception]:
        batches = []
        options = {"where": place, "lanes": lanes, "prefetch": prefetch, "env": [Late] * 3 + [Faulty]}
        with pytest.raises((RunError, ValueError)) as raised:
            for each in learnt(Watch(**watch), **options, rounds=99):
                batches.append(each)  # noqa: PERF402
        return batches, raised.value

    monkeypatch.setattr(Faulty, "at", 21)
    recorded, error = run(record=tmp_path / "run")
    replayed, again = run(replay=tmp_path / "run")
    assert (replayed, str(again), again.__notes__) == (recorded, "broken at step 21", error.__notes__)
    monkeypatch.setattr(Faulty, "at", 10**9)
    replayed, ended = run(replay=tmp_path / "run")
    assert replayed == recorded
    assert "run ends here, behind" in str(ended)
    assert "fragments: its run was ended by ValueError: broken at step 21" in str(ended)


def test_a_replay_shows_the_episode_for_which_the_module_s_output_is_no_number(tmp_path: Path) -> None:
    def run(rounds: int, watch: Watch) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"num_envs": 4, "lanes": 2, "where": "threads", "fragment_length": 5, "seed": 0}
        with Rollout(Late, watch=watch, **options) as rollout:
            for number, _ in enumerate(rollout.batches(), 1):
                if number == rounds:
                    for each in rollout.module.parameters():
                        each.data *= NAN
                    rollout.publish(rollout.module.state_dict())

    with pytest.raises(ModuleError, match="'action_dist_inputs' is NaN"):
        run(2, Watch(record=tmp_path / "run"))
    with pytest.raises(RunError, match=r"lane ., slot 0, step \d+ of its episode: 'action_dist_inputs' is") as raised:
        run(2, Watch(replay=tmp_path / "run", until="nan"))
    episode = raised.value.episode
    assert (episode.t, len(episode), episode.get_observations(-1).shape) == (10, 0, (4,))
    assert raised.value.__notes__[1].startswith("step 10: obs [")
    assert isinstance(raised.value.__cause__, ModuleError)


def test_until_is_checked_and_what_it_does_not_find_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run"
    for wrong in ("NaN", "", True, NAN, [1], np.zeros(2)):
        with pytest.raises(ValueError, match=r"until is .*, expected 'nan', a number, an episode's id or a function"):
            Watch(replay=path, until=wrong)
    list(learnt(Watch(record=path)))
    for until in ("nan", 2, np.float32(1.5), "abc"):
        assert not caplog.messages
        list(learnt(Watch(replay=path, until=until)))
    assert caplog.messages == [f"the replay of {path} has ended, and no episode 'abc' has ended in it"]
    with pytest.raises(AttributeError) as raised:
        list(learnt(Watch(replay=path, until=lambda episode: episode.absent)))
    assert raised.value.__notes__[0] == "in until, lane 0, slot 0, step 0 of its episode"


@pytest.mark.parametrize("kind", ["nan", "reward", "episode", "function"])
def test_a_replay_stops_where_it_is_asked_to(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alter(monkeypatch, 11, lambda seen, reward: (seen * NAN, reward) if kind == "nan" else (seen, 7.0))
    fragments: list[Any] = []

    def run(watch: Watch) -> None:
        options: dict[str, Any] = {"num_envs": 2, "lanes": 2, "where": "threads", "fragment_length": 6, "seed": 0}
        with Rollout(Altered, module=lambda rows: np.zeros(len(rows), np.int64), watch=watch, **options) as rollout:
            for number, fragment in enumerate(rollout.fragments()):
                fragments.append(fragment)
                if number == 7:
                    return

    run(Watch(record=tmp_path / "run"))
    ended = next(each for fragment in fragments for each in fragment.episodes() if each.is_terminated)
    until: Any = {"nan": "nan", "reward": 6.5, "episode": ended.id_, "function": lambda each: each.t == 5}[kind]
    with pytest.raises(RunError) as raised:
        run(Watch(replay=tmp_path / "run", until=until))
    error, episode = raised.value, raised.value.episode
    assert f"episode {episode.id_}, {episode.t} steps so far" in error.__notes__
    if kind == "nan":
        assert "'obs' is NaN" in str(error)
        assert np.isnan(episode.get_observations(-1)).all()
    elif kind == "reward":
        assert "a reward is 7" in str(error)
        assert episode.get_rewards(-1) == 7
    elif kind == "episode":
        assert (episode.id_, episode.t, episode.is_terminated) == (ended.id_, ended.t, True)
        np.testing.assert_array_equal(episode.get_observations(), ended.get_observations())
    else:
        assert (episode.t, episode.is_done) == (5, False)
    steps = [note for note in error.__notes__ if note.startswith("step ")]
    assert len(steps) == min(5, len(episode))
    assert "action 0, reward" in steps[-1]


def test_a_replay_of_agents_stops_at_the_fragment_that_has_what_is_asked_for(tmp_path: Path) -> None:
    options = {"env": LateTogether, "num_envs": 2, "where": "threads"}
    list(learnt(Watch(record=tmp_path / "run"), **options))
    with pytest.raises(RunError, match="a reward is 1") as raised:
        list(learnt(Watch(replay=tmp_path / "run", until=0.5), **options))
    assert len(raised.value.episode)


def test_what_cannot_be_recorded_or_replayed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(ValueError, match="record and replay of Watch are both given"):
        Watch(record=path, replay=path)
    with pytest.raises(ValueError, match="until='nan' is where a replay stops, expected replay as well"):
        Watch(until="nan")
    with pytest.raises(
        ValueError, match=r"Watch\(record=…\) is for .*RolloutProcesses; .*'threads' or 'processes', with"
    ):
        Rollout(Late, where="rollouts", workers=1, watch=Watch(record=path))
    with pytest.raises(ValueError, match=r"Watch\(record=…\) is for .*ReadyThreads"):
        Rollout(Late, num_envs=2, where="threads", forward=Forward(max_batch=2), watch=Watch(record=path))
    with Rollout(Late, watch=Watch(record=path)) as rollout:
        next(rollout.batches())
    with pytest.raises(GraphError, match="record and replay of Watch are for a loop"):
        Rollout(Late, watch=Watch(record=path)).graph()
    with Rollout(Late, watch=Watch(replay=path)) as rollout:
        next(rollout.batches())
        with pytest.raises(RunError, match="a replay can't be saved"):
            rollout.save(tmp_path / "saved")
        with pytest.raises(RunError, match="a replay can't be drained"):
            rollout.drain()
    with pytest.raises(ValueError, match="record and replay of Watch are for a loop over a rollout"):
        TrainerStream("tcp://127.0.0.1:0", watch=Watch(record=path))


def test_checksums_tell_every_column_and_step_apart() -> None:
    with Rollout("CartPole-v1", num_envs=3, fragment_length=5, seed=0) as rollout:
        fragment = next(rollout.fragments())
    before = schedule.entry_of(fragment)
    for name, column in fragment.columns.items():
        leaf = column.tree.copy()
        for row, slot in np.ndindex(5, 3):
            other = leaf.copy()
            other[fragment.first_row + row, slot] = ~other[1, slot] if other.dtype == bool else other[1, slot] + 3
            fragment.columns[name] = Column(name, other)
            told = schedule.difference(before, schedule.entry_of(fragment), fragment)
            assert told == f"lane 0, vector step {row}: '{name}' differ"
        fragment.columns[name] = column
    assert schedule.entry_of(fragment) == before
