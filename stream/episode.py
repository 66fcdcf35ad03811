"""One agent's episode, or a chunk of one: the interface of RLlib's `SingleAgentEpisode`."""

import builtins
import copy
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal, Self

import gymnasium as gym
import numpy as np

from rollflow.stream.buffer import Indices, LookbackBuffer
from rollflow.stream.columns import Columns
from rollflow.stream.episode_buffers import (
    as_buffer,
    buffer_from_state,
    joined,
    outputs_joined,
    part_of,
    state_of,
    total_of,
)
from rollflow.stream.episode_checks import check_joinable, checked_step
from rollflow.stream.errors import EpisodeError, RollflowError

REWARD_SPACE: gym.Space[Any] = gym.spaces.Box(-np.inf, np.inf, (), np.float32)


class SingleAgentEpisode:
    """A reset observation, then (observation, action, reward) step by step; n steps have n + 1 observations.

        id_                     a fresh unique hex string where absent
        observations, infos     lists of n + 1 items, trees of arrays, or ready buffers
        actions, rewards        lists of n items, trees of arrays, or ready buffers
        extra_model_outputs     key -> list of n items, tree of arrays, or ready buffer
        observation_space       of one observation; `fill` and `one_hot_discrete` go by it
        action_space            of one action; likewise
        terminated, truncated   whether and how the episode has ended; the data stay as they are
        t_started               step number at which this chunk begins, its lookback not counted; 0 where absent
        len_lookback_buffer     how many of the steps given are history, at most all; "auto": all of them; with a ready
                                buffer for `rewards`, that buffer's lookback
        agent_id, module_id, multi_agent_episode_id    set where the episode is one agent's part of a larger one

    Items may be anything; a list-form episode keeps them in lists and grows by `add_env_step`, `to_numpy()` turns
    the lists into trees of arrays with a leading time axis. In getters and setters -1 is the newest item, and
    negative indices run on into the lookback; see `LookbackBuffer.get`. Ready buffers and arrays are taken as they are,
    lists are copied.

    Raises EpisodeError where lengths do not fit together, and for a negative lookback.
    """

    _duration_s: float = 0.0
    _last_step_at: float | None = None  # on the clock of `time.perf_counter`; the reset counts as a step

    def __init__(
        self,
        id_: str | None = None,
        *,
        observations: Any = None,
        observation_space: gym.Space[Any] | None = None,
        infos: Any = None,
        actions: Any = None,
        action_space: gym.Space[Any] | None = None,
        rewards: Any = None,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
        t_started: int | None = None,
        len_lookback_buffer: int | Literal["auto"] = "auto",
        agent_id: Any = None,
        module_id: Any = None,
        multi_agent_episode_id: Any = None,
    ) -> None:
        self.id_ = uuid.uuid4().hex if id_ is None else id_
        self.agent_id = agent_id
        self.module_id = module_id
        self.multi_agent_episode_id = multi_agent_episode_id
        self.custom_data: dict[Any, Any] = {}
        self._is_terminated = terminated
        self._is_truncated = truncated
        lookback = self._lookback_of(rewards, len_lookback_buffer)
        if infos is None and observations is not None:
            infos = [{} for _ in range(total_of(observations, "observations"))]
        self.observations = as_buffer(observations, lookback, observation_space, "observations")
        self.infos = as_buffer(infos, lookback, None, "infos")
        self.actions = as_buffer(actions, lookback, action_space, "actions")
        self.rewards = as_buffer(rewards, lookback, REWARD_SPACE, "rewards")
        self.extra_model_outputs: dict[str, LookbackBuffer] = {
            key: as_buffer(items, lookback, None, key) for key, items in (extra_model_outputs or {}).items()
        }
        self._t_started = 0 if t_started is None else t_started
        self._t = self._t_started + len(self.rewards)
        self.validate()

    # Where it stands

    @property
    def t(self) -> int:
        """Steps since the episode's reset."""
        return self._t

    @t.setter
    def t(self, t: int) -> None:
        self._t = t

    @property
    def t_started(self) -> int:
        """Steps since the episode's reset when this chunk began."""
        return self._t_started

    @t_started.setter
    def t_started(self, t_started: int) -> None:
        self._t_started = t_started

    @property
    def is_terminated(self) -> bool:
        """Whether the task ended: nothing comes after the last observation."""
        return self._is_terminated

    @is_terminated.setter
    def is_terminated(self, is_terminated: bool) -> None:
        self._is_terminated = is_terminated

    @property
    def is_truncated(self) -> bool:
        """Whether only the watching ended: what would have come after may be estimated."""
        return self._is_truncated

    @is_truncated.setter
    def is_truncated(self, is_truncated: bool) -> None:
        self._is_truncated = is_truncated

    @property
    def is_done(self) -> bool:
        """Terminated or truncated."""
        return self.is_terminated or self.is_truncated

    @property
    def is_reset(self) -> bool:
        """Whether there is a first observation."""
        return self.observations.total() > 0

    @property
    def is_numpy(self) -> bool:
        """Whether the data are arrays. An episode of length 0 is not: it keeps its lists."""
        return self.observations.is_numpy and self.rewards.is_numpy

    @property
    def observation_space(self) -> gym.Space[Any] | None:
        """The space of one observation."""
        return self.observations.space

    @observation_space.setter
    def observation_space(self, space: gym.Space[Any] | None) -> None:
        self.observations.space = space

    @property
    def action_space(self) -> gym.Space[Any] | None:
        """The space of one action."""
        return self.actions.space

    @action_space.setter
    def action_space(self, space: gym.Space[Any] | None) -> None:
        self.actions.space = space

    def __len__(self) -> int:
        return self.t - self.t_started

    def env_steps(self) -> int:
        """Steps in this chunk, its lookback not counted."""
        return len(self)

    def agent_steps(self) -> int:
        """The same: there is one agent, and it acts in every step."""
        return len(self)

    def get_return(self) -> float:
        """The undiscounted sum of this chunk's rewards, its lookback not counted."""
        return float(np.sum(self.get_rewards()))

    def get_duration_s(self) -> float:
        """Seconds in which this chunk's steps were added, counted from the reset or from the step it was cut after.

        A slice has 0.0: when each step came is not kept.
        """
        return self._duration_s

    # Growing

    def add_env_reset(self, observation: Any, infos: Any = None) -> None:
        """Take the observation that `env.reset()` gave. Raises EpisodeError unless this is the first thing added."""
        if self.is_reset or self.is_done or self.t or self.t_started:
            raise EpisodeError(
                f"episode '{self.id_}': add_env_reset at step {self.t}, expected a new episode without observations"
            )
        self.observations.append(observation)
        self.infos.append({} if infos is None else infos)
        self._last_step_at = time.perf_counter()

    def add_env_step(
        self,
        observation: Any,
        action: Any,
        reward: Any,
        infos: Any = None,
        *,
        terminated: bool = False,
        truncated: bool = False,
        extra_model_outputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Take an action and what `env.step(action)` gave. The values are kept as they are, whatever they are.

        Raises EpisodeError before a reset, after the end, and when the keys of the extra outputs change; in numpy form,
        ColumnError for a value of another structure or shape than the arrays'. Then nothing is added.
        """
        outputs, values = checked_step(self, observation, action, reward, extra_model_outputs)
        for buffer, value in values:
            buffer.append(value)
        self.infos.append({} if infos is None else infos)
        self.extra_model_outputs = outputs
        self.is_terminated = terminated
        self.is_truncated = truncated
        self._t += 1
        now = time.perf_counter()
        self._duration_s += 0.0 if self._last_step_at is None else now - self._last_step_at
        self._last_step_at = now

    def check_env_step(
        self, observation: Any, action: Any, reward: Any, extra_model_outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Raise what `add_env_step` would raise for these values; nothing is added."""
        checked_step(self, observation, action, reward, extra_model_outputs)

    def validate(self) -> None:
        """Raise EpisodeError unless there is one observation and one info more than there are steps, or nothing."""
        observations, infos = self.observations.total(), self.infos.total()
        per_step = {"actions": self.actions, "rewards": self.rewards} | {
            f"extra_model_outputs['{key}']": buffer for key, buffer in self.extra_model_outputs.items()
        }
        counts = {name: buffer.total() for name, buffer in per_step.items()}
        if observations == 0 and infos == 0 and not any(counts.values()):
            return
        if infos != observations or any(count + 1 != observations for count in counts.values()):
            told = ", ".join(f"{count} {name}" for name, count in {"infos": infos, **counts}.items())
            raise EpisodeError(
                f"episode '{self.id_}': {observations} observations do not go with {told}; expected as many infos, "
                "and one less of everything else"
            )

    # Reading

    def get_observations(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """One observation, or several: see `LookbackBuffer.get`."""
        return self._read(self.observations, indices, neg_index_as_lookback, fill, one_hot_discrete)

    def get_infos(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """One info dict, or several."""
        return self._read(self.infos, indices, neg_index_as_lookback, fill)

    def get_actions(
        self,
        indices: Indices = None,
        *,
        neg_index_as_lookback: bool = False,
        fill: Any = None,
        one_hot_discrete: bool = False,
    ) -> Any:
        """One action, or several."""
        return self._read(self.actions, indices, neg_index_as_lookback, fill, one_hot_discrete)

    def get_rewards(self, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None) -> Any:
        """One reward, or several."""
        return self._read(self.rewards, indices, neg_index_as_lookback, fill)

    def get_extra_model_outputs(
        self, key: str, indices: Indices = None, *, neg_index_as_lookback: bool = False, fill: Any = None
    ) -> Any:
        """One of the module's other outputs, or several. Raises KeyError for an unknown key."""
        return self._read(self._extra(key), indices, neg_index_as_lookback, fill)

    # The names of an older page of RLlib's.
    get_observation = get_observations
    get_action = get_actions
    get_reward = get_rewards
    get_info = get_infos

    # Writing

    def set_observations(
        self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace observations: see `LookbackBuffer.set`."""
        self._write(self.observations, new_data, at_indices, neg_index_as_lookback)

    def set_actions(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Replace actions."""
        self._write(self.actions, new_data, at_indices, neg_index_as_lookback)

    def set_rewards(self, *, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False) -> None:
        """Replace rewards."""
        self._write(self.rewards, new_data, at_indices, neg_index_as_lookback)

    def set_extra_model_outputs(
        self, *, key: str, new_data: Any, at_indices: Indices = None, neg_index_as_lookback: bool = False
    ) -> None:
        """Replace one of the module's other outputs. Raises EpisodeError for an unknown key."""
        if key not in self.extra_model_outputs:
            raise EpisodeError(self._no_such_output(key))
        self._write(self.extra_model_outputs[key], new_data, at_indices, neg_index_as_lookback)

    def set_observation(self, *, new_value: Any, at_index: int) -> None:
        """Replace one observation; this and the next two are the names of an older page of RLlib's."""
        self.set_observations(new_data=new_value, at_indices=at_index)

    def set_action(self, *, new_value: Any, at_index: int) -> None:
        """Replace one action."""
        self.set_actions(new_data=new_value, at_indices=at_index)

    def set_reward(self, *, new_value: Any, at_index: int) -> None:
        """Replace one reward."""
        self.set_rewards(new_data=new_value, at_indices=at_index)

    # Other forms

    def to_numpy(self) -> Self:
        """Turn lists into trees of arrays with a leading time axis, lookback included; infos stay as they are.

        Actions, rewards and extra outputs stay lists while the length is 0. Returns this episode. Raises ColumnError
        for items that differ in structure or shape.
        """
        self.observations.to_numpy()
        if len(self):
            for buffer in (self.actions, self.rewards, *self.extra_model_outputs.values()):
                buffer.to_numpy()
        return self

    def cut(self, len_lookback_buffer: int = 0) -> "SingleAgentEpisode":
        """The next chunk, of length 0: it begins with the last observation, and what was before is its lookback.

        The lookback has `len_lookback_buffer` steps, or as many as there are. This episode stays as it is, and the
        two share no list. Raises EpisodeError on an episode that is done, and for a negative number.
        """
        if self.is_done:
            raise EpisodeError(f"episode '{self.id_}': cut after its end at step {self.t}")
        self._check_lookback(len_lookback_buffer)
        total = self.rewards.total()
        lookback = min(len_lookback_buffer, total)
        chunk = self.part(total - lookback, total, lookback, self.t, shares_arrays=False)
        chunk.custom_data = copy.deepcopy(self.custom_data)
        chunk._last_step_at = self._last_step_at
        return chunk

    def slice(self, slice_: builtins.slice, *, len_lookback_buffer: int | None = None) -> "SingleAgentEpisode":
        """A part by steps: `slice_` counts from the first current step, negative bounds from the end.

        m steps have m + 1 observations. Bounds outside are clipped. What lies before the part becomes its lookback,
        `len_lookback_buffer` steps of it, or as many as this episode has, or as there are. The part is done only
        where it reaches this episode's end. In numpy form, it shares this episode's arrays. Raises EpisodeError for a
        step other than 1, and for a negative lookback.
        """
        if slice_.step not in (None, 1):
            raise EpisodeError(f"episode '{self.id_}': slice step is {slice_.step}, expected 1")
        if len_lookback_buffer is not None:
            self._check_lookback(len_lookback_buffer)
        length, before = len(self), self.rewards.lookback
        start = self._step_bound(slice_.start, 0, length)
        stop = max(start, self._step_bound(slice_.stop, length, length))
        wanted = before if len_lookback_buffer is None else len_lookback_buffer
        lookback = min(wanted, before + start)
        part = self.part(before + start - lookback, before + stop, lookback, self.t_started + start)
        if stop == length:
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        part.custom_data = copy.deepcopy(self.custom_data)
        return part

    def part(
        self, start: int, stop: int, lookback: int, t_started: int, shares_arrays: bool = True
    ) -> "SingleAgentEpisode":
        """The steps at positions start … stop - 1, counted over all that is stored, the first `lookback` as history.

        It is ongoing, without custom data; in numpy form it shares this episode's arrays unless told otherwise.
        """

        def part(buffer: LookbackBuffer, more: int = 0) -> LookbackBuffer:
            return part_of(buffer, start, stop + more, lookback, shares_arrays=shares_arrays)

        return SingleAgentEpisode(
            self.id_,
            observations=part(self.observations, 1),
            infos=part(self.infos, 1),
            actions=part(self.actions),
            rewards=part(self.rewards),
            extra_model_outputs={key: part(buffer) for key, buffer in self.extra_model_outputs.items()},
            observation_space=self.observation_space,
            action_space=self.action_space,
            t_started=t_started,
            agent_id=self.agent_id,
            module_id=self.module_id,
            multi_agent_episode_id=self.multi_agent_episode_id,
        )

    def __getitem__(self, slice_: builtins.slice) -> "SingleAgentEpisode":
        if not isinstance(slice_, builtins.slice):
            raise NotImplementedError(
                f"episode '{self.id_}' takes slices such as [2:5], not {slice_!r}; for one item use get_observations "
                "and the other getters"
            )
        return self.slice(slice_)

    def concat_episode(self, other: "SingleAgentEpisode") -> None:
        """Add the current data of `other`, the chunk that follows this one, at the end of this one.

        This episode's lookback stays, the other's is ignored. Raises EpisodeError when the ids differ, this episode is
        done, `other` does not begin with the step and the observation that this one ends with, or their extra outputs
        differ; ColumnError when this one has arrays that the other's data do not fit. Then nothing is changed.
        """
        check_joinable(self, other)
        observations = joined(self.observations, other.observations, first=1)
        infos = joined(self.infos, other.infos, first=1)
        actions = joined(self.actions, other.actions)
        rewards = joined(self.rewards, other.rewards)
        extra = outputs_joined(self, other)
        self.observations, self.infos, self.actions, self.rewards = observations, infos, actions, rewards
        self.extra_model_outputs = extra
        self._t = other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)
        self._duration_s += other.get_duration_s()
        self._last_step_at = other._last_step_at

    def get_data_dict(self) -> dict[str, Any]:
        """This chunk as columns, one row per step: obs, infos, actions, rewards, flags, `t`, `eps_id`, extra outputs.

        `terminateds` and `truncateds` can be True in the last row only.
        """
        steps = len(self)
        last = np.arange(steps) == steps - 1
        return {
            Columns.OBS: self.get_observations(builtins.slice(0, steps)),
            Columns.INFOS: self.get_infos(builtins.slice(0, steps)),
            Columns.ACTIONS: self.get_actions(),
            Columns.REWARDS: self.get_rewards(),
            Columns.TERMINATEDS: last & self.is_terminated,
            Columns.TRUNCATEDS: last & self.is_truncated,
            Columns.T: np.arange(self.t_started, self.t),
            Columns.EPS_ID: np.full(steps, self.id_),
            **{key: self.get_extra_model_outputs(key) for key in self.extra_model_outputs},
        }

    def get_state(self) -> dict[str, Any]:
        """Everything, lookback and flags included; the data are copies."""
        return {
            "id_": self.id_,
            "agent_id": self.agent_id,
            "module_id": self.module_id,
            "multi_agent_episode_id": self.multi_agent_episode_id,
            "t": self.t,
            "t_started": self.t_started,
            "is_terminated": self.is_terminated,
            "is_truncated": self.is_truncated,
            "custom_data": copy.deepcopy(self.custom_data),
            "duration_s": self.get_duration_s(),
            "buffers": {name: state_of(buffer) for name, buffer in self._buffers().items()},
            "extra_model_outputs": {key: state_of(buffer) for key, buffer in self.extra_model_outputs.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "SingleAgentEpisode":
        """The episode that `get_state()` was asked of."""
        buffers: dict[str, Any] = {name: buffer_from_state(name, part) for name, part in state["buffers"].items()}
        episode = SingleAgentEpisode(
            state["id_"],
            **buffers,
            observation_space=buffers["observations"].space,
            action_space=buffers["actions"].space,
            extra_model_outputs={
                key: buffer_from_state(key, part) for key, part in state["extra_model_outputs"].items()
            },
            terminated=state["is_terminated"],
            truncated=state["is_truncated"],
            t_started=state["t_started"],
            agent_id=state["agent_id"],
            module_id=state["module_id"],
            multi_agent_episode_id=state["multi_agent_episode_id"],
        )
        episode._t = state["t"]
        episode.custom_data = copy.deepcopy(state["custom_data"])
        episode._duration_s = state["duration_s"]
        return episode

    def __repr__(self) -> str:
        ended = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "ongoing"
        return (
            f"<{type(self).__name__} '{self.id_}': steps {self.t_started} to {self.t}, {ended}, "
            f"lookback {self.rewards.lookback}>"
        )

    # Inside

    def _extra(self, key: str) -> LookbackBuffer:
        try:
            return self.extra_model_outputs[key]
        except KeyError:
            raise KeyError(self._no_such_output(key)) from None

    def _no_such_output(self, key: str) -> str:
        return f"episode '{self.id_}' has no extra output '{key}'; there are: {sorted(self.extra_model_outputs)}"

    def _buffers(self) -> dict[str, LookbackBuffer]:
        return {
            "observations": self.observations,
            "infos": self.infos,
            "actions": self.actions,
            "rewards": self.rewards,
        }

    def _read(
        self,
        buffer: LookbackBuffer,
        indices: Indices,
        neg_index_as_lookback: bool,
        fill: Any,
        one_hot_discrete: bool = False,
    ) -> Any:
        try:
            return buffer.get(
                indices, neg_index_as_lookback=neg_index_as_lookback, fill=fill, one_hot_discrete=one_hot_discrete
            )
        except RollflowError as error:
            raise self._located(error) from None

    def _write(self, buffer: LookbackBuffer, new_data: Any, at_indices: Indices, neg_index_as_lookback: bool) -> None:
        try:
            buffer.set(new_data, at_indices, neg_index_as_lookback=neg_index_as_lookback)
        except RollflowError as error:
            raise self._located(error) from None

    def _located(self, error: RollflowError) -> RollflowError:
        return type(error)(f"episode '{self.id_}': {error}")

    def _lookback_of(self, rewards: Any, wanted: int | str) -> int:
        """How many of the steps given are history."""
        if isinstance(rewards, LookbackBuffer):
            return rewards.lookback
        steps = 0 if rewards is None else total_of(rewards, "rewards")
        if wanted == "auto":
            return steps
        if isinstance(wanted, str):
            raise EpisodeError(f"episode '{self.id_}': len_lookback_buffer is '{wanted}', expected an int or 'auto'")
        self._check_lookback(wanted)
        return min(wanted, steps)

    def _check_lookback(self, wanted: int) -> None:
        if wanted < 0:
            raise EpisodeError(f"episode '{self.id_}': len_lookback_buffer is {wanted}, expected >= 0")

    @staticmethod
    def _step_bound(bound: int | None, default: int, length: int) -> int:
        if bound is None:
            return default
        return min(max(bound + length if bound < 0 else bound, 0), length)
