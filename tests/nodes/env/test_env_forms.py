"""One meaning: however one and the same environment is given, and wherever it steps, its episodes are the same."""

from collections import defaultdict
from contextlib import ExitStack
from itertools import chain
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from env_forms import NUM_ACTIONS, EnvForm, Episode, SeededEnv, TenfoldSyncVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import Phase, example, given, settings, strategies as st
from numbered_agents import NumberedAgents
from property_examples import examples, strategies
from remote_hosts import hosting, listening

from rollflow import Fragment, RemoteEnvs, RemoteRollouts, RLModule, Rollout
from rollflow.nodes import EnvHost, RolloutHost
from rollflow.stream import EnvError
from rollflow.stream.graph.seeding import env_seed_for

NAMES = ["id", "callable", "wrapped callable", "list", "id of sync", "id of subclass", "id of wrapped"]
READY = ["sync", "subclass", "wrapped"]


class SumModule(RLModule):
    """Takes the actions that `actions_for` takes."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        chosen = torch.as_tensor(batch["obs"]).long().sum(-1) % NUM_ACTIONS
        return {"action_dist_inputs": torch.nn.functional.one_hot(chosen, NUM_ACTIONS).float()}


class Setting(NamedTuple):
    """Random settings of a rollout."""

    sizes: list[int]
    fragment_length: int
    lookback: int
    seed: int


parts_drawn = strategies(sizes=[[1], [3], [1, 1], [2, 2], [3, 2]], fragment_length=(1, 8), lookback=(0, 4))
parts_drawn |= strategies(seed=(0, 2**32 - 1))
drawn_settings = st.builds(Setting, **parts_drawn)


def forms(*names: str) -> st.SearchStrategy[EnvForm]:
    return st.builds(
        EnvForm, st.sampled_from(names), mode=st.sampled_from(list(AutoresetMode)), longest=st.integers(1, 6)
    )


def rollout_of(env: Any, drawn: Setting, **options: Any) -> Rollout:
    options |= {"fragment_length": drawn.fragment_length, "lookback": drawn.lookback, "seed": drawn.seed}
    return Rollout(env, module=SumModule(), explore=False, num_fragments=3, **options)


def check_episodes(rollout: Rollout, form: EnvForm, drawn: Setting) -> None:
    """Run it; its episodes are those of direct stepping, each transition once."""
    with rollout:
        fragments = list(rollout.fragments())
    seeds = [env_seed_for(drawn.seed, "env", slot) for slot in range(sum(drawn.sizes))]
    expected = dict(zip(seeds, form.episodes(seeds, 3 * drawn.fragment_length), strict=True))
    assert episodes_of(fragments) == expected
    assert rollout.lost == {}
    assert rollout.num_steps == sum(len(episode.actions) for episode in chain(*expected.values()))


def episodes_of(fragments: list[Fragment]) -> dict[int, list[Episode]]:
    """The seed of a slot -> its episodes, of chunks that join."""
    episodes: dict[int, dict[str, Episode]] = defaultdict(dict)
    for chunk in chain(*(fragment.episodes() for fragment in sorted(fragments, key=lambda each: each.sequence))):
        observations = np.asarray(chunk.get_observations()).tolist()
        known = episodes[observations[0][0]].setdefault(chunk.id_, Episode([observations[0]], [], [], []))
        assert chunk.t_started == len(known.actions)
        assert observations[0] == known.observations[-1]
        known.observations.extend(observations[1:])
        known.actions.extend(np.asarray(chunk.get_actions()).tolist())
        known.rewards.extend(np.asarray(chunk.get_rewards()).tolist())
        known.ends.extend([(False, False)] * (len(chunk) - 1) + [(chunk.is_terminated, chunk.is_truncated)])
    return {seed: list(of_slot.values()) for seed, of_slot in episodes.items()}


@given(form=forms(*NAMES, *READY), drawn=drawn_settings, where=st.sampled_from(["inline", "threads"]))
@settings(max_examples=examples(150))
def test_every_form_gives_the_episodes_of_direct_stepping(form: EnvForm, drawn: Setting, where: Any) -> None:
    env, numbers = form.env(drawn.sizes)
    check_episodes(rollout_of(env, drawn, where=where, **numbers), form, drawn)


@pytest.mark.parametrize(("remote", "host"), [(RemoteEnvs, EnvHost), (RemoteRollouts, RolloutHost)])
@given(form=forms(*NAMES, *READY), drawn=drawn_settings)
@example(form=EnvForm("sync", AutoresetMode.NEXT_STEP, 1), drawn=Setting([3], 8, 2, 3))
@example(form=EnvForm("sync", AutoresetMode.SAME_STEP, 1), drawn=Setting([3], 8, 2, 3))
@example(form=EnvForm("sync", AutoresetMode.DISABLED, 1), drawn=Setting([3], 8, 2, 3))
@settings(max_examples=examples(40), phases=[Phase.explicit, Phase.generate])
def test_so_does_every_form_on_a_host(remote: Any, host: Any, form: EnvForm, drawn: Setting) -> None:
    env, numbers = form.env(drawn.sizes)
    if host is RolloutHost:
        numbers["module"] = SumModule()
    envs = listening(remote)
    with ExitStack() as opened:
        opened.enter_context(hosting(envs.addresses[0], env, kind=host, **numbers))
        check_episodes(rollout_of(envs, drawn), form, drawn)


@pytest.mark.parametrize("where", ["worker processes", "rollouts"])
@given(form=forms(*NAMES), drawn=drawn_settings)
@settings(max_examples=examples(12), phases=[Phase.explicit, Phase.generate])
def test_so_does_every_form_in_workers(where: str, form: EnvForm, drawn: Setting) -> None:
    env, numbers = form.env(drawn.sizes)
    check_episodes(rollout_of(env, drawn, where=where.removeprefix("worker "), workers=1, **numbers), form, drawn)


class WholeVectorEnv(SyncVectorEnv):
    """Steps and closes all of its environments at once: those can't be stepped or closed one by one."""

    closed_names: list[str] = []  # noqa: RUF012  # of all that were closed

    def __init__(self, num_envs: int) -> None:
        super().__init__([Unsteppable] * num_envs)

    def step(self, actions: Any) -> Any:
        zeros = np.zeros(self.num_envs)
        return np.zeros((self.num_envs, 3), np.int64), zeros, zeros > 0, zeros > 0, {}

    def close_extras(self, **kwargs: Any) -> None:
        self.closed_names.append("whole")


class Unsteppable(SeededEnv):
    def step(self, action: Any) -> Any:
        raise AssertionError("stepped by itself")

    def close(self) -> None:
        raise AssertionError("closed by itself")


@pytest.fixture
def whole_id() -> str:
    """An id whose vector form is a `WholeVectorEnv`; none has been closed."""
    WholeVectorEnv.closed_names.clear()
    gym.registry["Whole-v0"] = EnvSpec("Whole-v0", Unsteppable, vector_entry_point=WholeVectorEnv)
    return "Whole-v0"


def test_a_vector_form_is_closed_by_its_own_close(whole_id: str) -> None:
    with Rollout(whole_id, num_envs=4, lanes=2, module=SumModule(), fragment_length=2, seed=0) as rollout:
        next(iter(rollout.fragments()))
        assert WholeVectorEnv.closed_names == []
    assert WholeVectorEnv.closed_names == ["whole", "whole"]


# The mode of the vector environments that are made of plain ones


@pytest.mark.parametrize("where", ["inline", "threads", "processes"])
@pytest.mark.parametrize("asked", [None, "NextStep", *AutoresetMode])
def test_connectors_are_shown_the_autoreset_mode_that_was_asked_for(where: Any, asked: Any) -> None:
    modes = []

    def look(env: Any) -> list[Any]:
        modes.append(env.metadata["autoreset_mode"])
        return []

    with Rollout(SeededEnv, where=where, autoreset_mode=asked, env_to_module_connector=look, seed=0):
        assert modes == [AutoresetMode.SAME_STEP if asked is None else AutoresetMode(asked)]


@pytest.mark.slow
def test_vector_environments_keep_the_mode_that_they_have(whole_id: str) -> None:
    ready = TenfoldSyncVectorEnv([SeededEnv])
    asked: Any = {"autoreset_mode": AutoresetMode.SAME_STEP, "seed": 0}
    expected = "autoreset_mode is AutoresetMode.SAME_STEP, expected AutoresetMode.NEXT_STEP, which is that of"
    with pytest.raises(EnvError, match=f"{expected} this vector environment: leave it out"):
        Rollout(ready, **asked)
    assert not ready.closed
    for where in ("inline", "threads", "processes", "rollouts", "auto"):
        with pytest.raises(EnvError, match=f"{expected} the vectorized form of 'Whole-v0': leave it out"):
            Rollout(whole_id, where=where, workers=1 if where in ("processes", "rollouts") else None, **asked)
    assert set(WholeVectorEnv.closed_names) == {"whole"}
    with Rollout(ready, module=SumModule(), autoreset_mode=AutoresetMode.NEXT_STEP, seed=0, num_fragments=1) as rollout:
        assert len(list(rollout.fragments())) == 1


@pytest.mark.parametrize("kind", [Rollout, EnvHost, RolloutHost])
def test_what_is_no_autoreset_mode_is_refused(kind: Any) -> None:
    modes = "'NextStep', 'SameStep', 'Disabled'"
    expected = f"autoreset_mode is 'SAME', expected a gymnasium.vector.AutoresetMode, or one of {modes}"
    with pytest.raises(EnvError, match=expected):
        kind(SeededEnv, autoreset_mode="SAME")


@pytest.mark.parametrize("remote", [RemoteEnvs, RemoteRollouts])
def test_remote_environments_have_the_mode_of_their_hosts(remote: Any) -> None:
    envs = listening(remote)
    with pytest.raises(ValueError, match="expected it to be given to each EnvHost or RolloutHost"):
        Rollout(envs, autoreset_mode=AutoresetMode.NEXT_STEP)
    assert [sock.fileno() for sock in envs.sockets] == [-1]


def test_environments_with_several_agents_have_no_autoreset_mode() -> None:
    with pytest.raises(EnvError, match="autoreset_mode is 'NextStep', but these environments have several agents"):
        EnvHost(lambda: NumberedAgents(0), autoreset_mode="NextStep")
