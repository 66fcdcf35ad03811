"""Whatever way the same steps are told in, they mean the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
from agent_logs import episodes_by_hand
from drawn_agents import Drawn, drawn_settings, envs_of, made, run
from drawn_turns import plain
from fragment_equality import in_time
from hypothesis import given, settings, strategies as st
from numbered_agents import NumberedAgents
from piece_forms import equal
from property_examples import examples
from serial_module import at_of

from rollflow import GeneralAdvantageEstimation, MultiAgentEpisode
from rollflow.nodes import ArrayStep, MultiAgentEnv, MultiAgentVectorEnv
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

few = settings(max_examples=examples(12))
COUNT = st.integers(1, 5)


def outputs_of(fragments: list[MultiAgentFragment]) -> Callable[[str, tuple[int, ...]], dict[str, Any]]:
    """Return the outputs of an agent's module for an observation: of steps and of hanging actions."""
    known: dict[tuple[int, ...], dict[str, Any]] = {}
    for fragment in fragments:
        for part in fragment.parts:
            columns = {name: part.columns[name].tree for name in part.extra_columns}
            slots = range(part.layout.num_slots)
            for slot in slots:
                for row in range(part.first_row, int(part.stops[slot]) + int(part.waits[slot])):
                    at = tuple(at_of(part.columns["obs"].tree)[row, slot].tolist())
                    names = (*part.outputs[part.module_ids[part.module_of[row, slot]]], "policy_version")
                    known[at] = {name: columns[name][row, slot] for name in names}
    return lambda agent, at: known[at]


def chunks_by_env(fragments: list[MultiAgentFragment]) -> dict[int, list[MultiAgentEpisode]]:
    """The multi-agent chunks of each environment, in the order of time."""
    by_env: dict[int, list[MultiAgentEpisode]] = {}
    for fragment in in_time(fragments):
        for chunk in fragment.episodes():
            slot = next(int(at_of(each.get_observations(-1))[0]) for each in chunk.agent_episodes.values())
            by_env.setdefault(slot, []).append(chunk)
    return by_env


NAMES = ["observations", "infos", "actions", "rewards", "extra_model_outputs"]


def assert_same_episodes(one: MultiAgentEpisode, other: MultiAgentEpisode, lookback: int) -> None:
    """Getters by env steps and by agents' own steps, with the lookback of each agent; flags and clocks."""
    assert (one.env_t_started, one.env_t, len(one)) == (other.env_t_started, other.env_t, len(other))
    assert (one.is_terminated, one.is_truncated) == (other.is_terminated, other.is_truncated)
    assert one.agent_ids == other.agent_ids
    assert one.get_terminateds() == other.get_terminateds()
    assert one.get_truncateds() == other.get_truncateds()
    assert one.get_agents_that_stepped() == other.get_agents_that_stepped()
    assert one.get_agents_to_act() == other.get_agents_to_act()
    assert one.agent_steps() == other.agent_steps()
    for hanging in (False, True):
        assert one.get_return(include_hanging_rewards=hanging) == other.get_return(include_hanging_rewards=hanging)
    for agent, mine in one.agent_episodes.items():
        theirs = other.agent_episodes[agent]
        assert (mine.t_started, mine.t, mine.is_terminated, mine.is_truncated) == (
            theirs.t_started, theirs.t, theirs.is_terminated, theirs.is_truncated,
        )  # fmt: skip
    for name in NAMES:
        by_agent_steps = [plain(getattr(each, f"get_{name}")(env_steps=False)) for each in (one, other)]
        assert by_agent_steps[0] == by_agent_steps[1], name
        by_env_steps = [plain(getattr(each, f"get_{name}")()) for each in (one, other)]
        assert by_env_steps[0] == by_env_steps[1], name
        listed = [plain(getattr(each, f"get_{name}")(return_list=True)) for each in (one, other)]
        if name != "extra_model_outputs":
            assert listed[0] == listed[1], name


@few
@given(drawn_settings, COUNT)
def test_chunks_are_the_episodes_that_were_built_by_hand(drawn: Drawn, count: int) -> None:
    envs, rollout = made(drawn._replace(lanes=1))
    fragments = run(rollout, count)
    by_env = chunks_by_env(fragments)
    cuts = [fragment.clock.first + fragment.num_rows for fragment in fragments]
    cuts += [fragment.clock.first for fragment in fragments if fragment.clock.first]
    last = max(cuts)
    outputs = outputs_of(fragments)
    for env in envs:
        by_hand = episodes_by_hand(env, cuts, drawn.lookback, outputs, last)
        missing = [chunk for chunk in by_hand if not chunk.agent_ids]
        assert not missing
        for mine, theirs in zip(by_env[env.slot], by_hand, strict=True):
            assert_same_episodes(mine, theirs.to_numpy(), drawn.lookback)


@few
@given(drawn_settings, COUNT)
def test_returns_are_all_rewards_that_the_environment_gave(drawn: Drawn, count: int) -> None:
    """Also those of agents that had no observation yet, or never get one, or get their first one as they end."""
    envs, rollout = made(drawn)
    finished: dict[int, list[float]] = {env.slot: [] for env in envs}
    per_lane = [len(each) for each in np.array_split(range(drawn.envs), drawn.lanes)]
    rollout.on_episode(lambda ended: finished[sum(per_lane[: ended.lane]) + ended.slot].append(ended.episode_return))
    run(rollout, count)
    for env in envs:
        given: dict[int, float] = {}
        for told in env.log:
            given[told.episode] = given.get(told.episode, 0.0) + sum(told.rewards.values())
        assert finished[env.slot] == [given[episode] for episode in range(len(finished[env.slot]))]
    assert rollout.returns.count == sum(map(len, finished.values()))


@few
@given(drawn_settings, COUNT)
def test_batches_are_those_of_the_agents_episodes_built_by_hand(drawn: Drawn, count: int) -> None:
    envs, rollout = made(
        drawn._replace(lanes=1), learner_connector=lambda obs, act: GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)
    )
    fragments = run(rollout, count)
    outputs = outputs_of(fragments)
    cuts = [fragment.clock.first + fragment.num_rows for fragment in fragments]
    by_hand = {}
    for env in envs:
        for chunk in episodes_by_hand(env, cuts, drawn.lookback, outputs, max(cuts)):
            for episode in chunk.to_numpy().agent_episodes.values():
                by_hand[key_of(episode)] = episode
    for fragment in fragments:
        for module_id, batch in rollout.learner.batch_of([fragment]).items():
            keys = [key_of(episode) for episode in fragment.agent_episodes(module_id)]
            pipeline = rollout.learner.pipeline_of(module_id)
            expected = pipeline(rl_module=rollout.module[module_id], episodes=[by_hand[key] for key in keys])
            equal(batch, expected)
            equal(
                batch, pipeline(rl_module=rollout.module[module_id], episodes=list(fragment.agent_episodes(module_id)))
            )


def key_of(episode: Any) -> tuple[int, ...]:
    """Slot, agent, episode, and the agent's step at which the chunk begins."""
    at = at_of(episode.get_observations(0)) if len(episode) else at_of(episode.get_observations(-1))
    return (*(int(number) for number in at[:3]), episode.t_started, len(episode))


class WithGhost(MultiAgentEnv):
    """Has one more possible agent, which never comes."""

    def __init__(self, slot: int, **options: Any) -> None:
        env = NumberedAgents(slot, **options)
        self.reset, self.step = env.reset, env.step  # type: ignore[method-assign]
        last, ghost = env.possible_agents[-1], "agent 99"
        self.possible_agents = [*env.possible_agents, ghost]
        self.observation_spaces = {**env.observation_spaces, ghost: env.observation_spaces[last]}
        self.action_spaces = {**env.action_spaces, ghost: env.action_spaces[last]}


class AsArrays(MultiAgentVectorEnv):
    """Numbered environments whose agents act at once, as one that is vectorized."""

    def __init__(self, envs: list[NumberedAgents]) -> None:
        self.envs, self.num_envs = envs, len(envs)
        self.possible_agents = envs[0].possible_agents
        self.observation_spaces, self.action_spaces = envs[0].observation_spaces, envs[0].action_spaces

    def reset_arrays(self, seeds: Any) -> Any:
        told = [env.reset(seed=seed) for env, seed in zip(self.envs, seeds, strict=True)]
        return self._arrays([observations for observations, _ in told]), [infos for _, infos in told]

    def step_arrays(self, actions: Any) -> ArrayStep:
        given: list[dict[Any, Any]] = [{} for _ in self.envs]
        for part, of_part in zip(self.parts, actions, strict=True):
            for env, row in enumerate(of_part.tolist()):
                given[env] |= dict(zip(part.agents, row, strict=True))
        told = [env.step(each) for env, each in zip(self.envs, given, strict=True)]
        observations = self._arrays([each[0] for each in told])
        rewards = [
            np.array([[each[1][agent] for agent in part.agents] for each in told], np.float32) for part in self.parts
        ]
        flags = [np.array([each[place]["__all__"] for each in told]) for place in (2, 3)]
        infos = [dict(each[4]) for each in told]
        ended = [env for env, is_over in zip(self.envs, flags[0] | flags[1], strict=True) if is_over]
        first = [env.reset() for env in ended]
        return ArrayStep(
            observations,
            rewards,
            *flags,
            first=self._arrays([each for each, _ in first]) if ended else (),
            infos=infos,
            first_infos=[each for _, each in first],
        )

    def _arrays(self, told: list[Any]) -> list[Any]:
        arrays = []
        for part in self.parts:
            rows = [[each[agent] for agent in part.agents] for each in told]
            at = np.array([[at_of(item) for item in row] for row in rows])
            agents = (
                np.array([[item["agent"] for item in row] for row in rows]) if isinstance(rows[0][0], dict) else None
            )
            arrays.append(at if agents is None else {"at": at, "agent": agents})
        return arrays


@few
@given(drawn_settings, COUNT)
def test_environments_whose_agents_act_at_once_are_the_same_in_any_form(drawn: Drawn, count: int) -> None:
    drawn = drawn._replace(lanes=1, at_once=True, by_episode=False)
    options = {"agents": drawn.agents, "nested": drawn.nested, "length": drawn.length, "at_once": True}
    forms: list[Any] = [
        envs_of(drawn)[1],
        [lambda slot=slot: WithGhost(slot, **options) for slot in range(drawn.envs)],
        AsArrays(envs_of(drawn)[0]),
    ]
    told = [[told_by(fragment) for fragment in run(made(drawn, env=env)[1], count)] for env in forms]
    assert told[0] == told[1]
    assert told[0] == told[2]


def told_by(fragment: MultiAgentFragment) -> Any:
    """All that a fragment holds of its agents, by module, but for the ids of their episodes."""
    told: dict[str, list[Any]] = {}
    for module_id in fragment.module_ids:
        for chunk in fragment.agent_episodes(module_id):
            outputs = {name: plain(buffer.data) for name, buffer in chunk.extra_model_outputs.items()}
            flags = chunk.t_started, chunk.rewards.lookback, chunk.is_terminated, chunk.is_truncated
            columns = (chunk.actions, chunk.rewards)
            observations = plain(
                chunk.get_observations(slice(-chunk.rewards.lookback, None), neg_index_as_lookback=True)
            )
            told.setdefault(module_id, []).append(
                (
                    chunk.agent_id,
                    *flags,
                    *(plain(each.data) for each in columns),
                    observations,
                    outputs,
                    chunk.get_infos(),
                )
            )
    return told
