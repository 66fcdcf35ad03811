"""MultiAgentEpisode: an episode of several agents, or a chunk of one, with the interface of RLlib's class."""

import builtins
import copy
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Self

import gymnasium as gym
import numpy as np

from rollflow.stream.data.errors import EpisodeError, located
from rollflow.stream.episodes.agent_timeline import (
    ALL_AGENTS,
    NOTHING,
    AgentShare,
    AgentTimeline,
    AgentValues,
    AwaitedAgent,
    ColumnName,
    EnvStep,
    Received,
    begun_by,
    continued,
    end_flags,
    env_steps_of,
    join_timelines,
    sum_of,
)
from rollflow.stream.episodes.buffer import Indices, LookbackBuffer, count_of
from rollflow.stream.episodes.single_agent import BaseEpisode, SingleAgentEpisode, checked_lookback

OUTSIDE = -(2**62)
"""Number that stands for an env step outside the chunk; no agent has an observation there."""
DEFAULT_MODULE_ID = "default_policy"


AgentColumns = Sequence[tuple[Any, AgentTimeline, LookbackBuffer]]
"""For each agent: its id, its timeline, and one quantity over its steps."""


@dataclass(frozen=True, slots=True)
class GetterQuery:
    """Arguments of a getter: see `LookbackBuffer.get` for the index rules.

    by_env_steps     whether the indices are env steps, rather than each agent's own steps
    as_list          whether the answer is a list of one dict per env step
    """

    indices: Indices
    neg_index_as_lookback: bool
    fill: Any
    one_hot_discrete: bool
    by_env_steps: bool
    as_list: bool

    @property
    def with_pending(self) -> bool:
        """True if hanging actions count: they don't for an agent's own steps without indices."""
        return self.by_env_steps or self.indices is not None

    def read(
        self,
        episode: "MultiAgentEpisode",
        name: str,
        agent_ids: Any,
        column_of: Callable[[AgentTimeline], LookbackBuffer],
    ) -> Any:
        """One quantity of agents: agent id -> items, or a list of such dicts by env step.

        agent_ids    one id, or a list, tuple or set of ids; None: all agents

        Raises EpisodeIndexError for an int or list index outside. Raises ValueError for `as_list` without
        `by_env_steps`, and for one-hot vectors without a space.
        """
        chosen = agent_ids if isinstance(agent_ids, list | tuple | set | frozenset) else [agent_ids]
        columns = [
            (agent_id, timeline, column_of(timeline))
            for agent_id, timeline in episode._timelines.items()
            if agent_ids is None or agent_id in chosen
        ]
        if self.by_env_steps:
            lookback = episode._lookback
            env_steps = range(episode.env_t_started - lookback, episode.env_t + (name in ("observations", "infos")))
            return self._at_env_steps(columns, LookbackBuffer(env_steps, lookback, name=name))
        if self.as_list:
            raise ValueError(f"return_list on '{name}' lists env steps, expected env_steps=True")
        return self._at_agent_steps(columns)

    def read_outputs(self, episode: "MultiAgentEpisode", keys: Sequence[str], agent_ids: Any) -> Any:
        """Several extra model outputs: agent id -> key -> items, or a list of such dicts by env step."""
        if not keys and self.as_list:
            return [{} for _ in self.read_output(episode, "", agent_ids)]
        return _by_agents({key: self.read_output(episode, key, agent_ids) for key in keys})

    def read_output(self, episode: "MultiAgentEpisode", key: str, agent_ids: Any) -> Any:
        """One extra model output of agents: see `read`."""
        with_pending = self.with_pending
        return self.read(episode, key, agent_ids, lambda timeline: timeline.output(key, with_pending=with_pending))

    def _at_env_steps(self, columns: AgentColumns, clock: LookbackBuffer) -> Any:
        """Agent id -> its items at the env steps of the query, without its gaps; or a list of such dicts.

        With a fill value every agent has an item for every env step. Raises EpisodeIndexError for an int or list index
        outside.
        """
        outside = None if self.fill is None else OUTSIDE
        steps = clock.get(self.indices, neg_index_as_lookback=self.neg_index_as_lookback, fill=outside)
        if self.as_list:
            return [self._at_env_step(columns, step) for step in ([steps] if isinstance(steps, int) else steps)]
        if isinstance(steps, int):
            return self._at_env_step(columns, steps)
        answer = {}
        for agent_id, timeline, buffer in columns:
            positions = timeline.positions(steps, with_gaps=self.fill is not None)
            if self.fill is not None or any(0 <= position < buffer.total() for position in positions):
                with located(f"agent '{agent_id}'"):
                    answer[agent_id] = self._at(buffer, positions)
        return answer

    def _at_env_step(self, columns: AgentColumns, step: int) -> dict[Any, Any]:
        answer = {}
        for agent_id, timeline, buffer in columns:
            position = timeline.position(step)
            if not 0 <= position < buffer.total():
                position = -1
            if position >= 0 or self.fill is not None:
                answer[agent_id] = self._of(buffer, position - buffer.lookback, True)
        return answer

    def _at_agent_steps(self, columns: AgentColumns) -> dict[Any, Any]:
        """Agent id -> its items at the query's indices, which are its own steps; agents without items are absent.

        Raises EpisodeIndexError for an int or list index that any of the agents does not have.
        """
        answer = {}
        for agent_id, _, buffer in columns:
            with located(f"agent '{agent_id}'"):
                items = self._of(buffer, self.indices, self.neg_index_as_lookback)
            is_one = isinstance(self.indices, int | np.integer)
            if is_one or (len(items) if isinstance(items, list) else count_of(items, buffer.name)):
                answer[agent_id] = items
        return answer

    def _of(self, buffer: LookbackBuffer, indices: Indices, neg_index_as_lookback: bool) -> Any:
        """The items of one agent's buffer at these indices."""
        options: Any = {"fill": self.fill, "one_hot_discrete": self.one_hot_discrete}
        return buffer.get(indices, neg_index_as_lookback=neg_index_as_lookback, **options)

    def _at(self, buffer: LookbackBuffer, positions: Sequence[int]) -> Any:
        """The items at these positions; a position of -1 or behind the end gives a filler, or nothing."""
        total, lookback = buffer.total(), buffer.lookback
        if isinstance(positions, range) and self.fill is None:
            return self._of(buffer, slice(positions.start - lookback, positions.stop - lookback), True)
        indices = [position - lookback if position < total else -1 - lookback for position in positions]
        if self.fill is None:
            indices = [index for index in indices if index >= -lookback]
        return self._of(buffer, indices, True)


def _by_agents(by_key: Mapping[str, Any]) -> Any:
    """Turn key -> agent id -> items, or lists of such dicts by env step, into agent id -> key -> items."""
    lists = [answer for answer in by_key.values() if isinstance(answer, list)]
    if lists:
        return [_by_agents(dict(zip(by_key, at_step, strict=True))) for at_step in zip(*lists, strict=True)]
    answer: dict[Any, dict[str, Any]] = {}
    for key, of_agents in by_key.items():
        for agent_id, items in of_agents.items():
            answer.setdefault(agent_id, {})[key] = items
    return answer


AgentIds = Any
"""One agent's id, or a list, tuple or set of ids; None: all agents."""

AgentToModule = Callable[[Any, Any], Any]
"""Agent id and episode -> module id."""


class MultiAgentEpisode(BaseEpisode):
    """A reset, then env step by env step, each with data of some of the agents.

        id_                            a new unique hex string if absent
        observations, infos            one dict per env step, n + 1 of them: agent id -> value
        actions, rewards               one dict per env step, n of them
        extra_model_outputs            one dict per env step, n of them: agent id -> key -> value
        observation_space,             spaces of one observation and one action by agent ids: a Dict space, or a dict
        action_space                   of spaces; used by `fill` and `one_hot_discrete`
        terminateds, truncateds        agent id -> whether it ends at the last env step, "__all__" being all agents; or
                                       a bool for all agents
        env_t_started                  env step at which this chunk begins, without its lookback; 0 if absent
        agent_t_started                agent id -> number of its first step in this chunk
        len_lookback_buffer            how many of the given env steps are history, at most all; "auto": all of them
        agent_episode_ids              agent id -> id of its episode; new ones if absent
        agent_module_ids               agent id -> module id, of agents whose module is fixed
        agent_to_module_mapping_fn     (agent id, episode) -> module id, called once for each agent; without one, every
                                       agent has the module "default_policy"

        env_t_started, env_t           env steps since the episode's reset: at the beginning of this chunk, and now
        is_terminated, is_truncated    whether and how the episode has ended for all agents
        custom_data                    dict for data that belong to the episode
        lane, slot                     numbers of a rollout's lane, and of the environment in it, that the episode is
                                       from; None for an episode built by hand, or from a state

    There are two clocks: env steps, which all agents share, and each agent's own steps. An agent's step begins with an
    observation and an action, and ends with its next observation, maybe several env steps later. Until then its action
    *hangs*, and its rewards are summed. `agent_episodes` has the `SingleAgentEpisode` of every agent with an
    observation. In `observations`, an agent that does not act on an observation before the last one ends with it.

    Raises EpisodeError if lengths do not fit together, for data that `add_env_step` refuses, and for a negative
    lookback.
    """

    _indexed = "env step"

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Sequence[AgentValues] | None = None,
        observation_space: Mapping[Any, gym.Space[Any]] | gym.Space[Any] | None = None,
        infos: Sequence[AgentValues] | None = None,
        actions: Sequence[AgentValues] | None = None,
        action_space: Mapping[Any, gym.Space[Any]] | gym.Space[Any] | None = None,
        rewards: Sequence[AgentValues] | None = None,
        terminateds: AgentValues | bool | None = None,
        truncateds: AgentValues | bool | None = None,
        extra_model_outputs: Sequence[AgentValues] | None = None,
        env_t_started: int | None = None,
        agent_t_started: Mapping[Any, int] | None = None,
        len_lookback_buffer: int | Literal["auto"] = "auto",
        agent_episode_ids: Mapping[Any, str] | None = None,
        agent_module_ids: Mapping[Any, Any] | None = None,
        agent_to_module_mapping_fn: AgentToModule | None = None,
    ) -> None:
        self.id_ = uuid.uuid4().hex if id_ is None else id_
        self.observation_space = {} if observation_space is None else observation_space
        self.action_space = {} if action_space is None else action_space
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self.agent_episode_ids: dict[Any, str] = dict(agent_episode_ids or {})
        self.custom_data: dict[Any, Any] = {}
        self.is_terminated = False
        self.is_truncated = False
        self._module_ids: dict[Any, Any] = dict(agent_module_ids or {})
        self.env_t_started = self.env_t = env_t_started or 0
        self._lookback = 0  # env steps
        self._timelines: dict[Any, AgentTimeline] = {}  # agents with an observation, in the order of their first
        # Agents without one that have received rewards, or have the number of their next step.
        self._awaited: dict[Any, AwaitedAgent] = {}
        self._is_reset = False
        if observations:
            with located(f"episode '{self.id_}'"):
                flags = end_flags(terminateds), end_flags(truncateds)
                steps = env_steps_of(observations, infos, actions, rewards, extra_model_outputs, *flags)
            self._fill(steps, len_lookback_buffer, agent_t_started or {})
        elif actions or rewards or infos or extra_model_outputs:
            raise self._error("data without observations, expected one dict of observations more than of actions")

    # State

    @property
    def agent_ids(self) -> set[Any]:
        """The agents that have an episode of their own."""
        return set(self._timelines)

    @property
    def agent_episodes(self) -> dict[Any, SingleAgentEpisode]:
        """Agent id -> its own episode, in the order of their first observations."""
        return {agent_id: timeline.episode for agent_id, timeline in self._timelines.items()}

    @property
    def is_reset(self) -> bool:
        """True if the reset's observations were added, even an empty dict."""
        return self._is_reset

    @property
    def is_numpy(self) -> bool:
        """True if the agents' data are arrays."""
        return any(timeline.episode.observations.is_numpy for timeline in self._timelines.values())

    def __len__(self) -> int:
        return self.env_t - self.env_t_started

    def agent_steps(self) -> int:
        """The sum of the agents' own steps, without lookback and hanging actions."""
        return sum(len(timeline.episode) for timeline in self._timelines.values())

    def module_for(self, agent_id: Any) -> Any:
        """The id of the agent's module, which is fixed by the first call."""
        if agent_id not in self._module_ids:
            choose = self.agent_to_module_mapping_fn
            self._module_ids[agent_id] = DEFAULT_MODULE_ID if choose is None else choose(agent_id, self)
        return self._module_ids[agent_id]

    def get_agents_that_stepped(self) -> set[Any]:
        """The agents that have an observation at the last env step, done or not."""
        return {agent_id for agent_id, timeline in self._timelines.items() if timeline.last_seen == self.env_t}

    def get_agents_to_act(self) -> set[Any]:
        """The agents that have an observation at the last env step and are not done."""
        stepped = self.get_agents_that_stepped()
        return {agent_id for agent_id in stepped if not self._timelines[agent_id].episode.is_done}

    def get_terminateds(self) -> dict[Any, bool]:
        """Agent id -> whether it is terminated, and "__all__" -> whether the whole episode is."""
        return self._flags("is_terminated")

    def get_truncateds(self) -> dict[Any, bool]:
        """Agent id -> whether it is truncated, and "__all__" -> whether the whole episode is."""
        return self._flags("is_truncated")

    def get_return(self, include_hanging_rewards: bool = False) -> float:
        """The undiscounted sum of all agents' rewards in this chunk, without its lookback.

        `include_hanging_rewards` adds rewards that belong to no whole step: those since an agent's last observation,
        and before its first.
        """
        returns = float(sum(episode.get_return() for episode in self.agent_episodes.values()))
        if not include_hanging_rewards:
            return returns
        unsettled = [timeline.early_reward() + timeline.hung_reward() for timeline in self._timelines.values()]
        return returns + float(
            sum_of([*unsettled, *(sum_of(each.received.values()) for each in self._awaited.values())])
        )

    # Growing

    def add_env_reset(self, *, observations: AgentValues, infos: AgentValues | None = None) -> None:
        """Add the observations of `env.reset()`; agents without one begin with their first.

        Raises EpisodeError unless the episode is new and empty.
        """
        if self.is_reset or self.is_done or self.env_t or self.env_t_started:
            raise self._error(f"add_env_reset at env step {self.env_t}, expected a new episode without observations")
        self._reset(EnvStep(observations, {}, {}, infos or {}))
        self._last_step_at = time.perf_counter()

    def add_env_step(
        self,
        observations: AgentValues,
        actions: AgentValues,
        rewards: AgentValues,
        infos: AgentValues | None = None,
        *,
        terminateds: AgentValues | bool | None = None,
        truncateds: AgentValues | bool | None = None,
        extra_model_outputs: AgentValues | None = None,
    ) -> None:
        """Add the agents' actions and the results of `env.step(actions)`, by agent ids. For an agent,

            an observation and an action    are a whole step, which needs a reward
            an observation alone            ends the step that began with a hanging action, or is the agent's first
            an action alone                 hangs until the agent's next observation, with reward and extra outputs
            neither                         adds the reward, if any, to those since the last observation

        Infos without an observation are dropped. An agent that terminates with a hanging action and without an
        observation has its last one repeated. "__all__" in the end flags stands for every agent and the episode. The
        episode also ends with its last agents: as truncated if all of them are truncated only, else as terminated. An
        agent that ends with its first observation is left out.

        Raises EpisodeError before a reset, after the end, and for data that an agent can't have:

            any data after its end
            an action before its first observation, or while another one hangs
            an observation without an action since the one before
            a whole step without a reward
            a truncation after an action without an observation
            other extra outputs than before

        In numpy form, raises ColumnError for a value that does not fit the arrays. Then nothing is added.
        """
        if self.is_done:
            raise self._error(f"add_env_step after its end at env step {self.env_t}")
        if not self.is_reset:
            raise self._error("add_env_step before add_env_reset")
        flags = end_flags(terminateds), end_flags(truncateds)
        step = EnvStep(observations, actions, rewards, infos or {}, *flags, extra_model_outputs or {})
        with located(f"episode '{self.id_}'"):
            self._grow(step)
        self._take_time()

    def validate(self) -> None:
        """Raise EpisodeError unless each agent's data fit together, with an env step for each observation."""
        for agent_id, timeline in self._timelines.items():
            with located(f"episode '{self.id_}': agent '{agent_id}'"):
                timeline.validate()

    # Reading

    def get_observations(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """Agent id -> one observation, or several: see `LookbackBuffer.get` for the indices.

        With `env_steps`, indices are env steps. An agent then has items for the env steps at which it has one, or, with
        `fill`, for all. Without `env_steps`, indices are each agent's own steps. Agents without items are absent.
        `return_list` gives a list of one dict per env step instead.

        Raises EpisodeIndexError for an int or list index outside. Raises ValueError for `return_list` without
        `env_steps`, and for `one_hot_discrete` without a space.
        """
        query = GetterQuery(indices, neg_index_as_lookback, fill, one_hot_discrete, env_steps, return_list)
        return self._read("observations", agent_ids, query)

    def get_infos(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """The info dicts that came with observations: see `get_observations`."""
        return self._read(
            "infos", agent_ids, GetterQuery(indices, neg_index_as_lookback, fill, False, env_steps, return_list)
        )

    def get_actions(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
        return_list: bool = False,
    ) -> Any:
        """The actions, each at the env step of the observation that it answers: see `get_observations`.

        A hanging action is the agent's last one, but is left out of the agent's own steps without indices.
        """
        query = GetterQuery(indices, neg_index_as_lookback, fill, one_hot_discrete, env_steps, return_list)
        return self._read("actions", agent_ids, query)

    def get_rewards(
        self,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """The rewards, each at its action's env step, with that of a hanging action so far: see `get_actions`."""
        return self._read(
            "rewards", agent_ids, GetterQuery(indices, neg_index_as_lookback, fill, False, env_steps, return_list)
        )

    def get_extra_model_outputs(
        self,
        key: str | None = None,
        indices: Indices = None,
        agent_ids: AgentIds = None,
        *,
        env_steps: bool = True,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        return_list: bool = False,
    ) -> Any:
        """One extra model output, or without a key all, as agent id -> key -> items: see `get_actions`.

        Raises KeyError for a key that no agent has.
        """
        keys = list(dict.fromkeys(key for timeline in self._timelines.values() for key in timeline.output_keys()))
        if key is not None and key not in keys:
            raise KeyError(f"episode '{self.id_}' has no extra output '{key}'; there are: {sorted(keys)}")
        query = GetterQuery(indices, neg_index_as_lookback, fill, False, env_steps, return_list)
        with located(f"episode '{self.id_}'"):
            if key is None:
                return query.read_outputs(self, keys, agent_ids)
            return query.read_output(self, key, agent_ids)

    # Writing

    def set_observations(
        self, *, new_data: AgentValues, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace observations, agent id -> new ones, at each agent's own steps: see `LookbackBuffer.set`.

        Raises KeyError for an agent without an episode of its own; then nothing is replaced.
        """
        self._set("set_observations", new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_actions(
        self, *, new_data: AgentValues, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace actions; a hanging one can't be replaced."""
        self._set("set_actions", new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_rewards(
        self, *, new_data: AgentValues, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace the rewards of whole steps."""
        self._set("set_rewards", new_data, at_indices=at_indices, neg_index_as_lookback=neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: AgentValues, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace an extra model output. Raises EpisodeError for a key that the agent does not have."""
        where: Any = {"at_indices": at_indices, "neg_index_as_lookback": neg_index_as_lookback}
        self._set("set_extra_model_outputs", new_data, key=key, **where)

    # Other forms

    def to_numpy(self) -> Self:
        """Turn every agent's lists into trees of arrays: see `SingleAgentEpisode.to_numpy`. Returns this episode."""
        for timeline in self._timelines.values():
            timeline.episode.to_numpy()
        return self

    def cut(self, len_lookback_buffer: int = 0) -> "MultiAgentEpisode":
        """The next chunk, of length 0: it begins at the last env step, after up to `len_lookback_buffer` env steps.

        The lookback is longer if needed for the last observation of an agent with a hanging action. Agents that are
        done are left out. Agents in a gap that have not acted begin anew with their next observation, and keep their
        rewards in the gap. This episode is unchanged, and the two share no list. Raises EpisodeError on an episode that
        is done, and for a negative number.
        """
        if self.is_done:
            raise self._error(f"cut after its end at env step {self.env_t}")
        wanted = checked_lookback(self.id_, len_lookback_buffer, len_lookback_buffer)
        live = {agent_id: each for agent_id, each in self._timelines.items() if not each.episode.is_done}
        needed = [self.env_t - each.last_seen for each in live.values() if each.pending is not None]
        lookback = max(min(wanted, self._lookback + len(self)), *needed, 0)
        chunk = self._chunk(self.env_t, self.env_t, lookback)
        chunk._awaited = copy.deepcopy(self._awaited)
        for agent_id, timeline in live.items():
            if timeline.pending is not None or timeline.last_seen == self.env_t:
                chunk._timelines[agent_id] = timeline.cut(self.env_t - lookback)
            else:
                chunk._awaited[agent_id] = AwaitedAgent(timeline.received_between(timeline.last_seen, self.env_t))
        chunk._last_step_at = self._last_step_at
        return chunk

    def slice(self, slice_: builtins.slice, *, len_lookback_buffer: int | None = None) -> "MultiAgentEpisode":
        """A part by env steps: `slice_` counts from the first current one, negative bounds from the end.

        Bounds outside are clipped. The env steps before the part become its lookback, at most `len_lookback_buffer`
        (None: this episode's lookback) of them. An agent in a gap at the part's end has a hanging action there, with
        its rewards until then. An agent that has ended by the part's start is left out. An agent's own steps begin with
        its first observation inside. Slices joined again give the episode. In numpy form, a slice shares this
        episode's arrays. Raises NotImplementedError for a step other than 1, EpisodeError for a negative lookback.
        """
        if slice_.step not in (None, 1):
            raise NotImplementedError(f"episode '{self.id_}': slice step is {slice_.step}, expected 1")
        first, last, _ = slice_.indices(len(self))
        start, stop = self.env_t_started + first, self.env_t_started + max(first, last)
        wanted = self._lookback if len_lookback_buffer is None else len_lookback_buffer
        lookback = checked_lookback(self.id_, wanted, self._lookback + first)
        part, from_start = self._chunk(start, stop, lookback), not first
        for agent_id, timeline in self._timelines.items():
            piece = timeline.part(start, stop, start - lookback, from_start=from_start)
            if piece is not None:
                part._timelines[agent_id] = piece
            elif not (timeline.episode.is_done and timeline.last_seen <= start):
                since = min([start, *timeline.received]) if from_start else start
                part._await(agent_id, timeline.received_between(since, stop), timeline.step_after(stop))
        for agent_id, awaited in self._awaited.items():
            since = min([start, *awaited.received]) if from_start else start
            received = {env_step: reward for env_step, reward in awaited.received.items() if since <= env_step < stop}
            part._await(agent_id, received, awaited.t_started)
        if stop == self.env_t:
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        return part

    def concat_episode(self, other: "MultiAgentEpisode") -> None:
        """Add the current data of `other`, the chunk that follows this one, at the end of this one.

        The other's observations answer actions that hang at this episode's end, with the rewards of both sides. This
        episode's lookback stays, the other's is ignored. The agents' episodes are new objects. Raises EpisodeError if
        the ids differ, this episode is done, or `other` does not begin at this one's last env step. The same holds if
        an agent's two parts do not meet. Raises ColumnError if the other's data do not fit this one's arrays. Then
        nothing is changed.
        """
        if other.id_ != self.id_:
            raise self._error(f"can't be joined by a chunk of another, '{other.id_}'")
        if self.is_done:
            raise self._error(f"concat_episode after its end at env step {self.env_t}")
        if other.env_t_started != self.env_t:
            raise self._error(f"it ends at env step {self.env_t}, the chunk to join begins at {other.env_t_started}")
        if not self.is_reset or not other.is_reset:
            raise self._error("concat_episode before add_env_reset, on one side or both")
        timelines = dict(self._timelines)
        for agent_id, tail in other._timelines.items():
            with located(f"episode '{self.id_}': agent '{agent_id}'"):
                if agent_id in timelines:
                    timelines[agent_id] = join_timelines(timelines[agent_id], tail)
                else:
                    before = self._awaited[agent_id].received if agent_id in self._awaited else {}
                    received = continued(before, tail.received, other.env_t_started)
                    timelines[agent_id] = begun_by(tail, received, as_arrays=self.is_numpy)
        awaited = {agent_id: each for agent_id, each in self._awaited.items() if agent_id not in timelines}
        for agent_id, more in copy.deepcopy(other._awaited).items():
            if agent_id in timelines:
                timelines[agent_id] = timelines[agent_id].with_received(more.received)
            else:
                before = awaited[agent_id].received if agent_id in awaited else {}
                awaited[agent_id] = AwaitedAgent(continued(before, more.received, other.env_t_started), more.t_started)
        self._timelines, self._awaited, self.env_t = timelines, awaited, other.env_t
        self.agent_episode_ids = {**other.agent_episode_ids, **self.agent_episode_ids}
        self._module_ids = {**other._module_ids, **self._module_ids}
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)
        self._duration_s += other._duration_s
        self._last_step_at = other._last_step_at

    def get_state(self) -> dict[str, Any]:
        """The state as a dict, with copies of the data; without the mapping function, but with the modules it chose."""
        return {
            "id_": self.id_,
            "is_reset": self._is_reset,
            "is_terminated": self.is_terminated,
            "is_truncated": self.is_truncated,
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "agent_episode_ids": dict(self.agent_episode_ids),
            "module_ids": dict(self._module_ids),
            "custom_data": copy.deepcopy(self.custom_data),
            "duration_s": self._duration_s,
            "roster": {
                "env_t_started": self.env_t_started,
                "env_t": self.env_t,
                "lookback": self._lookback,
                "agents": {agent_id: timeline.get_state() for agent_id, timeline in self._timelines.items()},
                "awaited": {agent_id: asdict(awaited) for agent_id, awaited in self._awaited.items()},
            },
        }

    @staticmethod
    def from_state(
        state: Mapping[str, Any], *, agent_to_module_mapping_fn: AgentToModule | None = None
    ) -> "MultiAgentEpisode":
        """The episode of a state that `get_state()` returned; new agents get their modules by the mapping function."""
        episode = MultiAgentEpisode(
            state["id_"],
            observation_space=state["observation_space"],
            action_space=state["action_space"],
            agent_episode_ids=state["agent_episode_ids"],
            agent_module_ids=state["module_ids"],
            agent_to_module_mapping_fn=agent_to_module_mapping_fn,
        )
        roster = state["roster"]
        episode.env_t_started, episode.env_t = roster["env_t_started"], roster["env_t"]
        episode._lookback = roster["lookback"]
        episode._timelines = {agent_id: AgentTimeline.from_state(each) for agent_id, each in roster["agents"].items()}
        episode._awaited = {
            agent_id: AwaitedAgent(**copy.deepcopy(each)) for agent_id, each in roster["awaited"].items()
        }
        episode._is_reset = state["is_reset"]
        episode.is_terminated, episode.is_truncated = state["is_terminated"], state["is_truncated"]
        episode.custom_data = copy.deepcopy(state["custom_data"])
        episode._duration_s = state["duration_s"]
        return episode

    def __repr__(self) -> str:
        ended = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "ongoing"
        return (
            f"<{type(self).__name__} '{self.id_}': env steps {self.env_t_started} to {self.env_t}, {ended}, "
            f"lookback {self._lookback}, agents {list(self._timelines)}>"
        )

    # Inside

    def _fill(
        self, steps: Sequence[EnvStep], len_lookback_buffer: int | str, agent_t_started: Mapping[Any, int]
    ) -> None:
        """Add a reset and the env steps after it, with the first of them as history."""
        self._lookback = checked_lookback(self.id_, len_lookback_buffer, len(steps) - 1)
        self.env_t -= self._lookback
        with located(f"episode '{self.id_}'"):
            self._reset(steps[0])
            for step in steps[1:]:
                self._end_idle_agents(step)
                self._grow(step)
        for agent_id, timeline in self._timelines.items():
            timeline.settle(self.env_t_started, agent_t_started.get(agent_id, 0))

    def _reset(self, step: EnvStep) -> None:
        """Take the reset's observations."""
        self._is_reset = True
        for agent_id in step.observations:
            self._begin(agent_id, step.share_of(agent_id))
        self._end_with(step, ())

    def _grow(self, step: EnvStep) -> None:
        """Take an env step. Raises EpisodeError or ColumnError for data that an agent can't take: nothing is taken."""
        all_agents = self._timelines if step.all_terminated or step.all_truncated else ()
        shares = {agent_id: step.share_of(agent_id) for agent_id in dict.fromkeys([*step.agents(), *all_agents])}
        for agent_id, share in shares.items():
            with located(f"agent '{agent_id}' at env step {self.env_t}"):
                if agent_id in self._timelines:
                    self._timelines[agent_id].check(share, self.env_t)
                elif share.acted:
                    raise EpisodeError("it acts before its first observation")
        live = [each.episode for each in self._timelines.values() if not each.episode.is_done]
        self.env_t += 1
        for agent_id, share in shares.items():
            if agent_id in self._timelines:
                self._timelines[agent_id].take(share, self.env_t - 1)
            elif share.observed:
                self._begin(agent_id, share)
            elif share.reward is not NOTHING:
                self._awaited.setdefault(agent_id, AwaitedAgent()).received[self.env_t - 1] = share.reward
        self._end_with(step, [episode for episode in live if episode.is_done])

    def _end_idle_agents(self, step: EnvStep) -> None:
        """End agents that have an observation where `step` begins, and do not act on it."""
        for agent_id, timeline in list(self._timelines.items()):
            if timeline.last_seen != self.env_t or agent_id in step.actions or timeline.episode.is_done:
                continue
            if timeline.episode.rewards.total():
                timeline.end(terminated=True, truncated=False)
            else:
                del self._timelines[agent_id]

    def _begin(self, agent_id: Any, share: AgentShare) -> None:
        """Take an agent's first observation; if it is also the last one, the agent is left out but for its rewards."""
        awaited = self._awaited.get(agent_id, AwaitedAgent())
        if share.reward is not NOTHING:
            awaited.received[self.env_t - 1] = share.reward
        if share.ended:
            self._await(agent_id, awaited.received, awaited.t_started)
            return
        self._awaited.pop(agent_id, None)
        episode = SingleAgentEpisode(
            self.agent_episode_ids.setdefault(agent_id, uuid.uuid4().hex),
            observations=[share.observation],
            infos=[{} if share.infos is None else share.infos],
            observation_space=_space_of(self.observation_space, agent_id),
            action_space=_space_of(self.action_space, agent_id),
            t_started=awaited.t_started,
            agent_id=agent_id,
            module_id=self.module_for(agent_id),
            multi_agent_episode_id=self.id_,
        )
        if self.is_numpy:
            episode.to_numpy()
        self._timelines[agent_id] = AgentTimeline(episode, [self.env_t], received=awaited.received)

    def _await(self, agent_id: Any, received: Received, t_started: int) -> None:
        if received or t_started:
            self._awaited[agent_id] = AwaitedAgent(received, t_started)

    def _end_with(self, step: EnvStep, ended: Sequence[SingleAgentEpisode]) -> None:
        """Set the episode's end flags after an env step that has `ended` agents, which may be the last ones."""
        self.is_terminated, self.is_truncated = step.all_terminated, step.all_truncated
        timelines = self._timelines.values()
        if timelines and not self.is_done and all(timeline.episode.is_done for timeline in timelines):
            self.is_truncated = bool(ended) and not any(episode.is_terminated for episode in ended)
            self.is_terminated = not self.is_truncated

    def _chunk(self, env_t_started: int, env_t: int, lookback: int) -> "MultiAgentEpisode":
        """An ongoing chunk of this episode between two env steps, without agents."""
        chunk = MultiAgentEpisode(
            self.id_,
            observation_space=self.observation_space,
            action_space=self.action_space,
            env_t_started=env_t_started,
            agent_episode_ids=self.agent_episode_ids,
            agent_module_ids=self._module_ids,
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
        )
        chunk.env_t, chunk._lookback, chunk._is_reset = env_t, lookback, self._is_reset
        chunk.custom_data = copy.deepcopy(self.custom_data)
        return chunk

    def _read(self, name: ColumnName, agent_ids: AgentIds, query: GetterQuery) -> Any:
        with located(f"episode '{self.id_}'"):
            column_of = partial(AgentTimeline.column, name=name, with_pending=query.with_pending)
            return query.read(self, name, agent_ids, column_of)

    def _flags(self, name: str) -> dict[Any, bool]:
        flags = {agent_id: getattr(episode, name) for agent_id, episode in self.agent_episodes.items()}
        return {**flags, ALL_AGENTS: getattr(self, name)}

    def _set(self, setter: str, new_data: AgentValues, **where: Any) -> None:
        """Call a setter of agents' own episodes with what is new of each."""
        episodes = self.agent_episodes
        for agent_id in new_data:
            if agent_id not in episodes:
                raise KeyError(f"episode '{self.id_}' has no agent '{agent_id}'; there are: {list(episodes)}")
        for agent_id, items in new_data.items():
            getattr(episodes[agent_id], setter)(new_data=items, **where)

    def _error(self, text: str) -> EpisodeError:
        return EpisodeError(f"episode '{self.id_}': {text}")


def _space_of(spaces: Any, agent_id: Any) -> gym.Space[Any] | None:
    space: gym.Space[Any] | None = spaces.get(agent_id)
    return space
