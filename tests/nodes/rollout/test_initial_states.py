"""The state before an episode's first step is the one that acted, in every place where steps come from or go to."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from feeding_rollouts import fed, trainer
from newest_sampler import Newest
from places import PLACES
from replayed import write_dataset
from small_env import SmallEnv

from rollflow import DatasetSource, MultiAgentRollout, Replay, RLModule, Rollout
from rollflow.nodes import MultiAgentEnv
from rollflow.sinks import Sequences
from rollflow.stream.multi_agent.whole_episodes import EpisodeCollector

SEEN, CHOSEN, LENGTH = gym.spaces.Box(0, 99, (2,)), gym.spaces.Discrete(2), 6


class Six(SmallEnv):
    """Episodes of 6 steps; an observation has the step, from 1 on, and the number of the episode."""

    observation_space, action_space = SEEN, CHOSEN
    length, truncates = LENGTH, True
    episode = -1

    def look(self) -> Any:
        self.episode += self.t == 0
        return np.array([self.t + 1, self.episode], np.float32)


class SixOfTwo(MultiAgentEnv):
    """`Six` for two agents; the second comes one step later."""

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a", "b"]
        self.observation_spaces, self.action_spaces = dict.fromkeys("ab", SEEN), dict.fromkeys("ab", CHOSEN)
        self.episode = -1

    def look(self) -> Any:
        seen = {"a": self.t, "b": self.t - 1}
        return {each: np.array([t, self.episode], np.float32) for each, t in seen.items() if t}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents, self.episode = 1, ["a", "b"], self.episode + 1
        return self.look(), {}

    def step(self, action_dict: Any) -> Any:
        self.t += 1
        ended, seen = self.t == LENGTH + 1, self.look()
        no = {**dict.fromkeys(seen, False), "__all__": False}
        return seen, dict.fromkeys(seen, 0.0), no, {**dict.fromkeys(seen, ended), "__all__": ended}, {}


class Remembers(RLModule):
    """Its state begins at a weight, 1000 at first, in a tuple, and adds up the first number of observations."""

    def setup(self) -> None:
        self.begin = torch.nn.Parameter(torch.full((1,), 1000.0))

    def get_initial_state(self) -> Any:
        return {"s": (self.begin.detach().clone(), torch.zeros(()))}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        sums = batch["state_in"]["s"][0][:, None] + batch["obs"][..., :1].cumsum(1)
        logits = torch.cat([sums, sums], -1) * 0
        steps = batch["state_in"]["s"][1] + batch["obs"].shape[1]
        return {"action_dist_inputs": logits, "state_out": {"s": (sums[:, -1], steps)}}


def before(t: Any, begin: float = 1000.0) -> Any:
    """The state before step t, from 1 on."""
    return begin + np.asarray(t) * (np.asarray(t) - 1) / 2


def rollout(*, several: bool = False, **options: Any) -> Any:
    chosen = {"num_envs": 2, "fragment_length": 4, "num_fragments": 5, "seed": 0, **options}
    if not several:
        return Rollout(**({"env": Six, "module": Remembers} | chosen))
    modules = {"one": Remembers, "two": Remembers}
    return MultiAgentRollout(SixOfTwo, module=modules, agent_to_module_mapping_fn={"a": "one", "b": "two"}, **chosen)


SEVERAL = pytest.mark.parametrize("several", [False, True])


def check_rows(batch: Any) -> None:
    """Every row's state is that before its first step."""
    obs, state = np.asarray(batch["obs"]), np.asarray(batch["state_in"]["s"][0])
    first = obs[:, 0, 0] if obs.ndim == 3 else obs[:, 0]
    assert len(first)
    assert (first == 1).any()
    assert state[:, 0].tolist() == before(first).tolist()
    steps = np.asarray(batch["state_in"]["s"][1])
    assert steps.tolist() == (first - 1).tolist()


def check_fragments(fragments: list[Any], *, several: bool = False) -> None:
    """A replay of single steps, one of sequences, and the episodes of fragments know the state."""
    if several:
        for module_id in ("one", "two"):
            check_fragments([each.of_module(module_id) for each in fragments if module_id in each.module_ids])
        return
    for sampler in (Newest(), Sequences(3), Sequences(3, burn_in=2)):
        replay = Replay(500, sampler=sampler, batch_size=60, seed=0)
        for fragment in fragments:
            replay.insert(fragment)
        check_rows(replay.sample())
    for episode in (episode for fragment in fragments for episode in fragment.episodes()):
        if episode.t_started:
            assert episode.initial_state is None
        else:
            assert episode.initial_state["s"][0].tolist() == [1000.0]
            assert type(episode).from_state(episode.get_state()).initial_state["s"][0].tolist() == [1000.0]


NEXT_STEP = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
WAYS: dict[str, dict[str, Any]] = {**PLACES, "next step": NEXT_STEP, "lanes": {"lanes": 2}}


@pytest.mark.parametrize("way", WAYS)
def test_fragments_of_one_agent(way: str) -> None:
    with rollout(**WAYS[way]) as made:
        fragments = list(made.fragments())
    check_fragments(fragments)
    module = Remembers(SEEN, CHOSEN)
    with torch.no_grad():
        module.begin.fill_(7.0)  # that is not what acted
    for form in (made.learner_pipeline.of_fragments(fragments, module), by_episode(made, fragments, module)):
        check_rows(form)


def test_whole_episodes() -> None:
    collector = EpisodeCollector()
    with rollout(fragment_length=5) as made:
        episodes = [collector.add(fragment) for fragment in made.fragments()]
    check_fragments([each for each in episodes if each is not None])


def by_episode(made: Any, fragments: list[Any], module: Any) -> Any:
    """The train batch of the fragments' episodes as a list, which pieces see one by one."""
    episodes = [episode for fragment in fragments for episode in fragment.episodes()]
    return made.learner_pipeline(rl_module=module, episodes=episodes)


@pytest.mark.parametrize("place", ["inline", "processes", "rollouts"])
def test_fragments_of_several_agents(place: str) -> None:
    with rollout(several=True, **PLACES[place]) as made:
        fragments = list(made.fragments())
    check_fragments(fragments, several=True)
    replay = Replay(500, sampler=Sequences(3), batch_size=60, seed=0)
    for fragment in fragments:
        replay.insert(fragment)
    for batch in replay.sample().values():
        check_rows(batch)


def test_a_state_that_is_learnt_is_recorded_as_it_was_when_the_episode_began() -> None:
    begins: dict[float, float] = {}
    replay = Replay(500, sampler=Newest(), seed=0)
    with rollout(num_envs=1, fragment_length=5, num_fragments=6) as made:
        module: Any = made.module
        for number, fragment in enumerate(made.fragments()):
            replay.insert(fragment)
            for episode in fragment.episodes():
                if not episode.t_started:
                    begins[float(episode.get_observations(0)[1])] = float(episode.initial_state["s"][0][0])
            with torch.no_grad():
                module.begin.fill_(2000.0 + 100 * number)
            made.publish(module.state_dict())
    assert len(set(begins.values())) > 3
    batch = replay.sample(len(replay))
    state, (t, episode) = batch["state_in"]["s"][0][:, 0], batch["obs"].T
    assert state.tolist() == [float(before(a, begins[b])) for a, b in zip(t.tolist(), episode.tolist(), strict=True)]


@SEVERAL
@pytest.mark.parametrize("batch_size", [3, 16])
def test_a_dataset_gives_what_was_recorded(batch_size: int, several: bool, tmp_path: Path) -> None:
    with rollout(several=several) as made:
        write_dataset(made.fragments(), tmp_path / "first", rollout=made)
    source = DatasetSource(tmp_path / "first", batch_size=batch_size, window_steps=8)
    write_dataset(source.fragments(), tmp_path / "second")
    for folder in ("first", "second"):
        fragments = DatasetSource(tmp_path / folder, batch_size=batch_size).fragments()
        check_fragments(list(fragments), several=several)
        if several:
            continue
        module = Remembers(SEEN, CHOSEN)
        source = DatasetSource(tmp_path / folder, batch_size=batch_size, module=module, window_steps=8)
        with torch.no_grad():
            module.begin.fill_(7.0)
        for batch in source.batches():
            first = batch["obs"][:, 0, 0]
            assert batch["state_in"]["s"][0][:, 0].tolist() == before(first).tolist()


@SEVERAL
def test_a_trainer_elsewhere_gets_what_was_recorded(several: bool) -> None:
    stream = trainer(yields="fragments")
    with fed(stream, rollout(several=several), sends="fragments"):
        check_fragments(list(stream), several=several)


class Dies(Six):
    """Kills its process at one step, once."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def step(self, action: Any) -> Any:
        if self.episode == 2 and self.t == 2 and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_fragments_after_a_lost_worker(where: str, tmp_path: Path) -> None:
    envs = [partial(Dies, str(tmp_path / "mark"))]
    with rollout(env=envs, num_envs=None, where=where, workers=1, fragment_length=7, num_fragments=4) as made:
        fragments = list(made.fragments())
    assert (tmp_path / "mark").exists()
    check_fragments(fragments)
