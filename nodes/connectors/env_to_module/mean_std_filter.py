"""Observations shifted and scaled by the mean and deviation of all that came by."""

import copy
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rollflow.nodes.connectors.agents import space_by_agents
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes
from rollflow.nodes.connectors.env_to_module.running_statistics import RunningStatistics
from rollflow.stream.episode import SingleAgentEpisode
from rollflow.stream.errors import ConnectorError, located
from rollflow.stream.live_episode import LaneEpisodes
from rollflow.stream.space import is_columnar, item_of
from rollflow.stream.tree import Tree, leaves_of, map_tree, stack_trees

_SMALLEST_DEVIATION = 1e-8


class MeanStdFilter(ConnectorV2):
    """Rewrites every episode's last observation as its distance from the running mean, in running deviations.

        multi_agent        a filter for each agent: see `of_agent`. The spaces are Dicts by agent ids then, and the
                           state is agent id -> state of its filter
        de_mean_to_zero    take the mean away
        de_std_to_one      divide by the sample's deviation, where that is more than 0
        clip_by_value      clip to -value … value; None: don't
        update_stats       whether what comes by is counted

    Boxes alone change, f32 of the same shape, also inside a Dict or Tuple. Every observation is counted before it is
    filtered, those of one vector step slot by slot; so the very first becomes 0.

    The state keeps what each filter has counted itself apart from what it was told of others. States of any number of
    copies merge, in any order and however often one comes in, into the statistics of each observation once: give every
    copy the merged state and go on. A filter that is given a state goes on counting on top of it; what it has counted
    itself since the state was made stays counted. `reset_state` first makes it start from the state alone.

    Raises ConnectorError for states of another space or another piece, for spaces without numbers or another number of
    them than has been counted, and for observations that are not finite.
    """

    columnar = True
    changes_episodes = True

    def __init__(
        self,
        input_observation_space: gym.Space[Any] | None = None,
        input_action_space: gym.Space[Any] | None = None,
        *,
        multi_agent: bool = False,
        de_mean_to_zero: bool = True,
        de_std_to_one: bool = True,
        clip_by_value: float | None = 10.0,
        update_stats: bool = True,
    ) -> None:
        if clip_by_value is not None and not clip_by_value > 0:
            raise ValueError(f"clip_by_value is {clip_by_value}, expected more than 0, or None")
        super().__init__(input_observation_space, input_action_space)
        self.multi_agent = multi_agent
        self.de_mean_to_zero = de_mean_to_zero
        self.de_std_to_one = de_std_to_one
        self.clip_by_value = clip_by_value
        self.update_stats = update_stats
        self._size = 0
        self._of_agents: dict[Any, MeanStdFilter] = {}
        self._filtered: Tree = None  # whether each leaf of an observation is a Box's
        self._own = RunningStatistics(0)
        self._others: dict[str, RunningStatistics] = {}
        self._forget()

    def recompute_output_observation_space(
        self, input_observation_space: gym.Space[Any], input_action_space: gym.Space[Any]
    ) -> gym.Space[Any]:
        if self.multi_agent:
            return space_by_agents(input_observation_space, None, self._space_of_agent)
        if not is_columnar(input_observation_space):
            raise ConnectorError(
                f"MeanStdFilter can't filter observations in {input_observation_space}; expected Box, Discrete, "
                "MultiDiscrete, MultiBinary, or a Dict or Tuple of those"
            )
        self._filtered = _boxes(input_observation_space)
        leaves = zip(leaves_of(item_of(input_observation_space)), leaves_of(self._filtered), strict=True)
        size = sum(np.size(leaf) for leaf, filtered in leaves if filtered)
        if size != self._size:
            if self.count:
                raise ConnectorError(
                    f"{self.name} has counted {self.count} observations of {self._size} numbers, but those in "
                    f"{input_observation_space} have {size}; expected as many, or reset_state() first"
                )
            self._size = size
            self._forget()
        return self._output_space(input_observation_space)

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: Batch,
        episodes: Episodes,
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> Batch:
        self._know_spaces()
        if self._of_agents:
            self._filter_by_agents(episodes)
            return batch
        if self._filtered is None:
            raise ConnectorError("MeanStdFilter has no input observation space: give it one, or a pipeline")
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self._filter(episodes.observations()))
            return batch
        alone = list(self.single_agent_episode_iterator(episodes))
        if not alone:
            return batch
        filtered = self._filter(stack_trees([episode.get_observations(-1) for episode in alone]))
        for i, episode in enumerate(alone):
            item = map_tree(lambda leaf, i=i: leaf[i], filtered)
            episode.set_observations(new_data=item, at_indices=-1)
            episode.observation_space = self.observation_space
        return batch

    # Statistics

    @property
    def count(self) -> int:
        """Observations counted, here and by those whose states were merged in; of all agents."""
        return self._total.count + sum(each.count for each in self._of_agents.values())

    @property
    def mean(self) -> NDArray[np.float64]:
        """f64[D]: of all numbers in Boxes, in the order of an observation's leaves; not for several agents."""
        self._refuse_several("mean")
        return self._total.mean

    @property
    def deviation(self) -> NDArray[np.float64]:
        """f64[D]: the sample's standard deviation, likewise."""
        self._refuse_several("deviation")
        return self._total.deviation

    def of_agent(self, agent_id: Any) -> "MeanStdFilter":
        """An agent's own filter. Raises ConnectorError for an agent that the observation space has no part for."""
        self._know_spaces()
        if agent_id not in self._of_agents:
            raise ConnectorError(
                f"{self.name} has no filter for agent '{agent_id}': the observation space is by agents "
                f"{', '.join(map(str, self._of_agents)) or 'none'}"
            )
        return self._of_agents[agent_id]

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """What every filter known here has counted, by its own id. Raises nothing; merge with `merge_states`."""
        if self.multi_agent:
            states = {agent_id: each.get_state() for agent_id, each in self._of_agents.items()}
            return {agent_id: state for agent_id, state in states.items() if state}
        sources = {**self._others, self._id: self._own}
        states = {source: each.get_state() for source, each in sources.items() if each.count}
        return {"space": self._told_space(), "sources": states} if states else {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take over what all of a state's filters have counted."""
        self._check_state(state)
        if self.multi_agent:
            for agent_id, filter_, theirs in [(each, self.of_agent(each), state[each]) for each in state]:
                with located(f"agent '{agent_id}'"):
                    filter_.set_state(theirs)
        if not state or self.multi_agent:
            return
        sources = self._sources_of(state)
        own = sources.pop(self._id, None)
        if own is not None and own.count > self._own.count:
            self._own = own
        self._others = sources
        self._add_up()

    def reset_state(self) -> None:
        """Forget all statistics, and count as another filter from now on."""
        self._forget()
        for each in self._of_agents.values():
            each.reset_state()

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """All filters of this state and all others, each as the state has it that has seen most of it."""
        if self.multi_agent:
            for agent_id in {agent_id: None for state in states for agent_id in state}:
                self.of_agent(agent_id)
            given = {agent_id: [each[agent_id] for each in states if agent_id in each] for agent_id in self._of_agents}
            of_agents = {agent_id: self._of_agents[agent_id].merge_states(theirs) for agent_id, theirs in given.items()}
            return {agent_id: state for agent_id, state in of_agents.items() if state}
        merged: dict[str, RunningStatistics] = {}
        for state in [self.get_state(), *states]:
            self._check_state(state)
            for source, each in self._sources_of(state).items() if state else ():
                if source not in merged or each.count > merged[source].count:
                    merged[source] = each
        if not merged:
            return {}
        ordered = {source: merged[source].get_state() for source in sorted(merged)}
        return {"space": self._told_space(), "sources": ordered}

    def __getstate__(self) -> dict[str, Any]:
        """For copies: a copy counts as another filter, so that both may go on and be merged."""
        state = self.__dict__.copy()
        state["_others"] = {**self._others, self._id: RunningStatistics.from_state(self._own.get_state(), self._size)}
        state["_own"], state["_id"] = RunningStatistics(self._size), uuid.uuid4().hex
        state["_of_agents"] = {agent_id: copy.copy(each) for agent_id, each in self._of_agents.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._add_up()

    # Inside

    def _space_of_agent(self, space: gym.Space[Any], _: Any, agent_id: Any) -> gym.Space[Any]:
        made = self._of_agents.setdefault(agent_id, MeanStdFilter())
        made.clip_by_value = self.clip_by_value
        with located(f"agent '{agent_id}'"):
            made.set_input_spaces(space, None)
        assert made.observation_space is not None
        return made.observation_space

    def _filter_by_agents(self, episodes: Episodes) -> None:
        """Each agent's own filter over its observations, episode by episode."""
        by_agent: dict[Any, list[SingleAgentEpisode]] = {}
        for episode in self.single_agent_episode_iterator(episodes):
            by_agent.setdefault(episode.agent_id, []).append(episode)
        for agent_id, theirs in by_agent.items():
            filter_ = self.of_agent(agent_id)
            for option in ("de_mean_to_zero", "de_std_to_one", "clip_by_value", "update_stats"):
                setattr(filter_, option, getattr(self, option))
            with located(f"agent '{agent_id}'"):
                filter_(rl_module=None, batch={}, episodes=theirs)

    def _refuse_several(self, what: str) -> None:
        if self.multi_agent:
            raise ConnectorError(f"{self.name} has a filter for each agent, expected of_agent(agent id).{what}")

    def _filter(self, observations: Tree) -> Tree:
        """A tree of arrays `any[N, ...]`, filtered."""
        leaves, flags = leaves_of(observations), leaves_of(self._filtered)
        if len(leaves) != len(flags):
            raise ConnectorError(
                f"{self.name}: observations have {len(leaves)} parts, expected {len(flags)} as {self._told_space()} has"
            )
        kept = [np.asarray(leaf) for leaf, filtered in zip(leaves, flags, strict=True) if filtered]
        if not kept:
            return observations
        rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in kept], axis=1, dtype=np.float64)
        self._check(rows)
        means, deviations = self._pushed(rows)
        if self.de_mean_to_zero:
            rows = rows - means
        if self.de_std_to_one:
            rows = rows / np.where(deviations > 0.0, np.maximum(deviations, _SMALLEST_DEVIATION), 1.0)
        if self.clip_by_value is not None:
            rows = np.clip(rows, -self.clip_by_value, self.clip_by_value)
        parts = _parts(rows.astype(np.float32), kept)
        return map_tree(lambda leaf, filtered: next(parts) if filtered else leaf, observations, self._filtered)

    def _check(self, rows: NDArray[np.float64]) -> None:
        if rows.shape[1] != self._size:
            raise ConnectorError(
                f"{self.name}: observations of {rows.shape[1]} numbers, expected {self._size}, as "
                f"{self._told_space()} has"
            )
        finite = np.isfinite(rows)
        if not finite.all():
            slot, place = np.argwhere(~finite)[0]
            raise ConnectorError(
                f"{self.name}: number {place} of the observation of slot {slot} is {rows[slot, place]}, expected a "
                "finite one: the mean over it and all others would be lost"
            )

    def _pushed(self, rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        if not self.update_stats:
            return self._total.mean, self._total.deviation
        if self._total is not self._own:
            self._own.push(rows)
        return self._total.push(rows)

    def _forget(self) -> None:
        self._id = uuid.uuid4().hex
        self._own = RunningStatistics(self._size)
        self._others = {}
        self._add_up()

    def _add_up(self) -> None:
        self._total = self._own
        if self._others:
            self._total = RunningStatistics.merged([self._own, *self._others.values()], self._size)

    def _sources_of(self, state: Mapping[str, Any]) -> dict[str, RunningStatistics]:
        if not {"space", "sources"} <= state.keys():
            raise ConnectorError(
                f"{self.name}: a state with {sorted(map(str, state))}, expected 'space' and 'sources': is it another "
                "piece's?"
            )
        if self.input_observation_space is None:
            raise ConnectorError(
                f"{self.name} is given a state, but has no input observation space yet to hold it against"
            )
        if state["space"] != self._told_space():
            raise ConnectorError(
                f"{self.name}: a state of a filter for observations in {state['space']}, expected {self._told_space()}"
            )
        try:
            return {source: RunningStatistics.from_state(each, self._size) for source, each in state["sources"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConnectorError(f"{self.name}: a state's 'sources' are no statistics of its: {error!r}") from None

    def _told_space(self) -> str:
        self._know_spaces()
        return str(self.input_observation_space)

    def _output_space(self, space: gym.Space[Any]) -> gym.Space[Any]:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: self._output_space(part) for key, part in space.items()})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([self._output_space(part) for part in space])
        if not isinstance(space, spaces.Box):
            return space
        bound = np.inf if self.clip_by_value is None else self.clip_by_value
        return spaces.Box(-bound, bound, space.shape, np.float32)


def _boxes(space: gym.Space[Any]) -> Tree:
    if isinstance(space, spaces.Dict):
        return {key: _boxes(part) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_boxes(part) for part in space)
    return isinstance(space, spaces.Box)


def _parts(rows: NDArray[Any], leaves: list[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """f32[N, D] cut into the shapes of the leaves that it was joined from."""
    begin = 0
    for leaf in leaves:
        size = leaf[0].size
        yield rows[:, begin : begin + size].reshape(leaf.shape)
        begin += size
