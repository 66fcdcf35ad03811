"""SingleAgentEpisode: one agent's episode, or a chunk of one, with the interface of RLlib's class."""

import builtins
import copy
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, Self

import gymnasium as gym
import numpy as np

from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import EpisodeError, RollflowError, located
from rollflow.stream.data.tree import concatenate_trees, equal_trees, map_tree
from rollflow.stream.episodes.buffer import Indices, LookbackBuffer, count_of
from rollflow.stream.observe.svg import array_table

REWARD_SPACE: gym.Space[Any] = gym.spaces.Box(-np.inf, np.inf, (), np.float32)
_PLAIN = (  # attributes that a state has as they are
    *("id_", "agent_id", "module_id", "multi_agent_episode_id"),
    *("t", "t_started", "is_terminated", "is_truncated"),
)


class BaseEpisode:
    """What episodes of one agent and of several have in common."""

    id_: str
    is_terminated: bool
    is_truncated: bool
    lane: int | None = None
    slot: int | None = None
    _indexed = "item"  # what an index stands for
    _duration_s: float = 0.0
    _last_step_at: float | None = None  # on the clock of `time.perf_counter`; the reset counts as a step

    @property
    def is_done(self) -> bool:
        """True if the episode is terminated or truncated: of several agents, for all of them."""
        return self.is_terminated or self.is_truncated

    def __len__(self) -> int:
        raise NotImplementedError

    def env_steps(self) -> int:
        """Number of env steps in this chunk, without its lookback."""
        return len(self)

    def get_duration_s(self) -> float:
        """Seconds from the reset, or the step at which this chunk was cut, to its last step; 0.0 for a slice."""
        return self._duration_s

    def __getitem__(self, slice_: builtins.slice) -> Self:
        if not isinstance(slice_, builtins.slice):
            raise NotImplementedError(
                f"episode '{self.id_}' takes slices such as [2:5], not {slice_!r}; for one {self._indexed} use "
                "get_observations and the other getters"
            )
        whole: Any = self
        part: Self = whole.slice(slice_)
        return part

    def _take_time(self) -> None:
        """Count the time since the last step."""
        now = time.perf_counter()
        self._duration_s += 0.0 if self._last_step_at is None else now - self._last_step_at
        self._last_step_at = now


class SingleAgentEpisode(BaseEpisode):
    """A reset observation, then (observation, action, reward) step by step; n steps have n + 1 observations.

        id_                     a new unique hex string if absent
        observations, infos     lists of n + 1 items, trees of arrays `any[n + 1, ...]`, or buffers
        actions, rewards        lists of n items, trees of arrays `any[n, ...]`, or buffers
        extra_model_outputs     key -> list of n items, tree of arrays `any[n, ...]`, or buffer
        observation_space       space of one observation, used by `fill` and `one_hot_discrete`
        action_space            space of one action, likewise
        terminated, truncated   whether and how the episode has ended; the data are not changed
        t_started               step number at which this chunk begins, without its lookback; 0 if absent
        len_lookback_buffer     how many of the given steps are history, at most all; "auto": all of them; if
                                `rewards` is a buffer, the lookback is that buffer's
        agent_id, module_id, multi_agent_episode_id    set if the episode is one agent's part of a larger one

        t                       steps since the episode's reset
        is_terminated           whether the task ended: nothing comes after the last observation
        is_truncated            whether only the recording ended: the rest may be estimated
        custom_data             dict for data that belong to the episode
        initial_state           state of a stateful module before the episode's first step, a tree of arrays `any[...]`;
                                None: not recorded, or this chunk begins later
        lane, slot              numbers of a rollout's lane, and of the environment in it, that the episode is from;
                                None for an episode built by hand, or from a state

    Items may be anything. An episode in list form grows by `add_env_step`; `to_numpy()` turns the lists into trees of
    arrays with a leading time axis. In getters and setters -1 is the newest item, and negative indices may reach into
    the lookback: see `LookbackBuffer.get`. Buffers and arrays are used without a copy, lists are copied.

    Raises EpisodeError if lengths do not fit together, and for a negative lookback.
    """

    initial_state: Any = None

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
        self.is_terminated = terminated
        self.is_truncated = truncated
        if isinstance(rewards, LookbackBuffer):
            lookback = rewards.lookback
        else:
            steps = 0 if rewards is None else total_of(rewards, "rewards")
            lookback = checked_lookback(self.id_, len_lookback_buffer, steps)
        if infos is None and observations is not None:
            infos = [{} for _ in range(total_of(observations, "observations"))]
        self.observations = as_buffer(observations, lookback, observation_space, "observations")
        self.infos = as_buffer(infos, lookback, None, "infos")
        self.actions = as_buffer(actions, lookback, action_space, "actions")
        self.rewards = as_buffer(rewards, lookback, REWARD_SPACE, "rewards")
        self.extra_model_outputs: dict[str, LookbackBuffer] = {
            key: as_buffer(items, lookback, None, key) for key, items in (extra_model_outputs or {}).items()
        }
        self.t_started = 0 if t_started is None else t_started
        self.t = self.t_started + len(self.rewards)
        self.validate()

    # State

    @property
    def is_reset(self) -> bool:
        """True if there is a first observation."""
        return self.observations.total() > 0

    @property
    def is_numpy(self) -> bool:
        """True if the data are arrays; an episode of length 0 keeps its lists."""
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

    def agent_steps(self) -> int:
        """Number of the agent's steps, which is that of env steps."""
        return len(self)

    def get_return(self) -> float:
        """The undiscounted sum of this chunk's rewards, without its lookback."""
        return float(np.sum(self.get_rewards()))

    # Growing

    def add_env_reset(self, observation: Any, infos: Any = None) -> None:
        """Add the observation of `env.reset()`. Raises EpisodeError unless the episode is new and empty."""
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
        """Add an action and the results of `env.step(action)`. In list form, values are kept as they are.

        Raises EpisodeError before a reset, after the end, and if the keys of the extra outputs change. In numpy form,
        raises ColumnError for a value of another structure or shape than the arrays'. Then nothing is added.
        """
        outputs, values = self.check_env_step(observation, action, reward, extra_model_outputs)
        for buffer, value in values:
            buffer.append(value)
        self.infos.append({} if infos is None else infos)
        self.extra_model_outputs = outputs
        self.is_terminated = terminated
        self.is_truncated = truncated
        self.t += 1
        self._take_time()

    def check_env_step(
        self, observation: Any, action: Any, reward: Any, extra_model_outputs: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, LookbackBuffer], list[tuple[LookbackBuffer, Any]]]:
        """Raise the error that `add_env_step` would raise for these values; nothing is added.

        Returns the buffers of the extra outputs, and pairs (buffer, value to append).
        """
        if self.is_done:
            raise EpisodeError(f"episode '{self.id_}': add_env_step after its end at step {self.t}")
        if not self.is_reset:
            raise EpisodeError(f"episode '{self.id_}': add_env_step before add_env_reset")
        extra, buffers = extra_model_outputs or {}, self.extra_model_outputs
        if (buffers or self.rewards.total()) and extra.keys() != buffers.keys():
            raise EpisodeError(
                f"episode '{self.id_}': extra_model_outputs {sorted(extra)} at step {self.t}, expected those of the "
                f"steps before, {sorted(buffers)}"
            )
        outputs = buffers or {key: LookbackBuffer([], name=key) for key in extra}
        values = [
            (self.observations, observation),
            (self.actions, action),
            (self.rewards, reward),
            *((outputs[key], value) for key, value in extra.items()),
        ]
        if self.observations.is_numpy:
            with located(f"episode '{self.id_}'"):
                for buffer, value in values:
                    buffer.in_form([value])
        return outputs, values

    def validate(self) -> None:
        """Raise EpisodeError unless observations and infos are one more than steps, or all are empty."""
        observations, infos = self.observations.total(), self.infos.total()
        per_step = {"actions": self.actions, "rewards": self.rewards} | {
            f"extra_model_outputs['{key}']": buffer for key, buffer in self.extra_model_outputs.items()
        }
        counts = {name: buffer.total() for name, buffer in per_step.items()}
        if observations == 0 and infos == 0 and not any(counts.values()):
            return
        if infos != observations or any(count + 1 != observations for count in counts.values()):
            others = ", ".join(f"{count} {name}" for name, count in {"infos": infos, **counts}.items())
            raise EpisodeError(
                f"episode '{self.id_}': {observations} observations do not go with {others}; expected as many infos, "
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
        """One item of an extra model output, or several. Raises KeyError for an unknown key."""
        return self._read(self._extra(key), indices, neg_index_as_lookback, fill)

    # Names of an older version of RLlib
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
        """Replace items of an extra model output. Raises EpisodeError for an unknown key."""
        if key not in self.extra_model_outputs:
            raise EpisodeError(self._no_such_output(key))
        self._write(self.extra_model_outputs[key], new_data, at_indices, neg_index_as_lookback)

    def set_observation(self, *, new_value: Any, at_index: int) -> None:
        """Replace one observation; this and the next two are names of an older version of RLlib."""
        self.set_observations(new_data=new_value, at_indices=at_index)

    def set_action(self, *, new_value: Any, at_index: int) -> None:
        """Replace one action."""
        self.set_actions(new_data=new_value, at_indices=at_index)

    def set_reward(self, *, new_value: Any, at_index: int) -> None:
        """Replace one reward."""
        self.set_rewards(new_data=new_value, at_indices=at_index)

    # Other forms

    def to_numpy(self) -> Self:
        """Turn lists, with the lookback, into trees of arrays `any[L + n, ...]`; infos stay lists.

        Actions, rewards and extra outputs stay lists while the length is 0. Returns this episode. Raises ColumnError
        for items that differ in structure or shape.
        """
        self.observations.to_numpy()
        if len(self):
            for buffer in (self.actions, self.rewards, *self.extra_model_outputs.values()):
                buffer.to_numpy()
        return self

    def cut(self, len_lookback_buffer: int = 0) -> "SingleAgentEpisode":
        """The next chunk, of length 0: it begins with the last observation, after up to `len_lookback_buffer` steps.

        This episode is unchanged, and the two share no list. Raises EpisodeError on an episode that is done, and for a
        negative number.
        """
        if self.is_done:
            raise EpisodeError(f"episode '{self.id_}': cut after its end at step {self.t}")
        total = self.rewards.total()
        lookback = checked_lookback(self.id_, len_lookback_buffer, total)
        chunk = self.part(total - lookback, total, lookback, self.t, shares_arrays=False)
        chunk.custom_data = copy.deepcopy(self.custom_data)
        chunk._last_step_at = self._last_step_at
        return chunk

    def slice(self, slice_: builtins.slice, *, len_lookback_buffer: int | None = None) -> "SingleAgentEpisode":
        """A part by steps: `slice_` counts from the first current step, negative bounds from the end.

        m steps have m + 1 observations. Bounds outside are clipped. The steps before the part become its lookback, at
        most `len_lookback_buffer` (None: this episode's lookback) of them. The part is done only if it reaches this
        episode's end. In numpy form, it shares this episode's arrays. Raises EpisodeError for a step other than 1, and
        for a negative lookback.
        """
        if slice_.step not in (None, 1):
            raise EpisodeError(f"episode '{self.id_}': slice step is {slice_.step}, expected 1")
        length, before = len(self), self.rewards.lookback
        start, last, _ = slice_.indices(length)
        stop = max(start, last)
        wanted = before if len_lookback_buffer is None else len_lookback_buffer
        lookback = checked_lookback(self.id_, wanted, before + start)
        part = self.part(before + start - lookback, before + stop, lookback, self.t_started + start)
        if stop == length:
            part.is_terminated, part.is_truncated = self.is_terminated, self.is_truncated
        part.custom_data = copy.deepcopy(self.custom_data)
        return part

    def part(
        self, start: int, stop: int, lookback: int, t_started: int, shares_arrays: bool = True
    ) -> "SingleAgentEpisode":
        """The steps at positions start … stop - 1 of all stored steps, the first `lookback` of them as history.

        The part is ongoing, without custom data. In numpy form it shares this episode's arrays if `shares_arrays`.
        """

        def part(buffer: LookbackBuffer, more: int = 0) -> LookbackBuffer:
            return part_of(buffer, start, stop + more, lookback, shares_arrays=shares_arrays)

        made = SingleAgentEpisode(
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
        made.initial_state = self.initial_state
        return made

    def concat_episode(self, other: "SingleAgentEpisode") -> None:
        """Add the current data of `other`, the chunk that follows this one, at the end of this one.

        This episode's lookback stays, the other's is ignored. Raises EpisodeError if the ids or extra outputs differ,
        or this episode is done. The same holds if `other` does not begin with this one's last step and observation.
        Raises ColumnError if the other's data do not fit this one's arrays. Then nothing is changed.
        """
        check_joinable(self, other)
        observations = joined(self.observations, other.observations, first=1)
        infos = joined(self.infos, other.infos, first=1)
        actions = joined(self.actions, other.actions)
        rewards = joined(self.rewards, other.rewards)
        extra = outputs_joined(self, other)
        self.observations, self.infos, self.actions, self.rewards = observations, infos, actions, rewards
        self.extra_model_outputs = extra
        self.t = other.t
        self.is_terminated, self.is_truncated = other.is_terminated, other.is_truncated
        self.custom_data.update(other.custom_data)
        self._duration_s += other.get_duration_s()
        self._last_step_at = other._last_step_at

    def get_data_dict(self) -> dict[str, Any]:
        """This chunk as columns `any[n, ...]`: obs, infos, actions, rewards, flags, `t`, `eps_id`, extra outputs.

        `terminateds` and `truncateds`, bool[n], can be True in the last row only.
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
        """The state as a dict, with lookback and flags; the data are copies."""
        initial = {} if self.initial_state is None else {"initial_state": map_tree(np.array, self.initial_state)}
        return initial | {
            **{name: getattr(self, name) for name in _PLAIN},
            "custom_data": copy.deepcopy(self.custom_data),
            "duration_s": self.get_duration_s(),
            "buffers": {
                name: state_of(getattr(self, name)) for name in ("observations", "infos", "actions", "rewards")
            },
            "extra_model_outputs": {key: state_of(buffer) for key, buffer in self.extra_model_outputs.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "SingleAgentEpisode":
        """The episode of a state that `get_state()` returned."""
        buffers: dict[str, Any] = {name: buffer_from_state(name, part) for name, part in state["buffers"].items()}
        episode = SingleAgentEpisode(
            state["id_"],
            **buffers,
            observation_space=buffers["observations"].space,
            action_space=buffers["actions"].space,
            extra_model_outputs={
                key: buffer_from_state(key, part) for key, part in state["extra_model_outputs"].items()
            },
        )
        for name in _PLAIN:
            setattr(episode, name, state[name])
        episode.custom_data = copy.deepcopy(state["custom_data"])
        episode._duration_s = state["duration_s"]
        episode.initial_state = state.get("initial_state")
        return episode

    def __repr__(self) -> str:
        ended = "terminated" if self.is_terminated else "truncated" if self.is_truncated else "ongoing"
        return (
            f"<{type(self).__name__} '{self.id_}': steps {self.t_started} to {self.t}, {ended}, "
            f"lookback {self.rewards.lookback}>"
        )

    def _repr_html_(self) -> str:
        columns = {
            Columns.OBS: self.get_observations(),
            Columns.ACTIONS: self.get_actions(),
            Columns.REWARDS: self.get_rewards(),
            **{key: self.get_extra_model_outputs(key) for key in self.extra_model_outputs},
        }
        return array_table(repr(self), columns, self.get_rewards())

    # Inside

    def _extra(self, key: str) -> LookbackBuffer:
        try:
            return self.extra_model_outputs[key]
        except KeyError:
            raise KeyError(self._no_such_output(key)) from None

    def _no_such_output(self, key: str) -> str:
        return f"episode '{self.id_}' has no extra output '{key}'; there are: {sorted(self.extra_model_outputs)}"

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


def refusal(text: str) -> Any:
    """A method of an episode to which only its rollout adds: it raises EpisodeError with a text."""

    def refuse(episode: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise EpisodeError(f"episode '{episode.id_}': {text}")

    return refuse


class SealedEpisode(SingleAgentEpisode):
    """A chunk of a fragment, read-only, since the fragment's columns are shared.

    To change or continue it, copy it: `SingleAgentEpisode.from_state(chunk.get_state())`.
    """

    add_env_step = concat_episode = refusal(
        "a fragment's chunk is read-only; write to a copy: SingleAgentEpisode.from_state(episode.get_state())"
    )


def checked_lookback(id_: str, wanted: int | str, most: int) -> int:
    """Number of steps that are history: those wanted, of `most`; "auto": all. Raises EpisodeError for what is none."""
    if wanted == "auto":
        return most
    if isinstance(wanted, str):
        raise EpisodeError(f"episode '{id_}': len_lookback_buffer is '{wanted}', expected an int or 'auto'")
    if wanted < 0:
        raise EpisodeError(f"episode '{id_}': len_lookback_buffer is {wanted}, expected >= 0")
    return min(wanted, most)


def total_of(items: Any, name: str) -> int:
    """Number of items in a list, a buffer (with its lookback), or a tree of arrays `any[n, ...]`."""
    if isinstance(items, LookbackBuffer):
        return items.total()
    return len(items) if isinstance(items, list) else count_of(items, name)


def as_buffer(items: Any, lookback: int, space: gym.Space[Any] | None, name: str) -> LookbackBuffer:
    """A buffer of a copied list, or of a tree of arrays `any[n, ...]`; a buffer is returned itself, with a space."""
    if isinstance(items, LookbackBuffer):
        if items.space is None:
            items.space = space
        return items
    data = [] if items is None else list(items) if isinstance(items, list) else items
    return LookbackBuffer(data, lookback, space, name=name)


def part_of(buffer: LookbackBuffer, start: int, stop: int, lookback: int, *, shares_arrays: bool) -> LookbackBuffer:
    """A new buffer of the items at positions start … stop - 1, with the first `lookback` of them as history."""
    data = buffer.items(slice(start, stop))
    if buffer.is_numpy and not shares_arrays:
        data = map_tree(np.copy, data)
    return LookbackBuffer(data, lookback, buffer.space, name=buffer.name)


def joined(head: LookbackBuffer, tail: LookbackBuffer, first: int = 0) -> LookbackBuffer:
    """A new buffer: all of `head`, and the current items of `tail` from number `first` on."""
    before = head.items(slice(0, head.total()))
    after = head.in_form(tail.items(slice(tail.lookback + first, tail.total())))
    data = concatenate_trees([before, after]) if head.is_numpy else before + after
    return LookbackBuffer(data, head.lookback, head.space, name=head.name)


def outputs_joined(head: "SingleAgentEpisode", tail: "SingleAgentEpisode") -> dict[str, LookbackBuffer]:
    """The extra outputs of both episodes, joined; if one has no step, the keys are the other's.

    Raises EpisodeError if the keys differ, ColumnError if `head` has arrays that the data of `tail` do not fit.
    """
    mine, theirs = head.extra_model_outputs, tail.extra_model_outputs
    if not tail.rewards.total():
        return mine
    if not head.rewards.total():
        mine = {key: LookbackBuffer([], name=key) for key in theirs}
    if theirs.keys() != mine.keys():
        raise EpisodeError(
            f"episode '{head.id_}': the chunk to join has extra outputs {sorted(theirs)}, expected {sorted(mine)}"
        )
    outputs = {key: joined(buffer, theirs[key]) for key, buffer in mine.items()}
    for buffer in outputs.values() if head.rewards.is_numpy else ():
        buffer.to_numpy()  # which the first items of an output are not yet
    return outputs


def state_of(buffer: LookbackBuffer) -> dict[str, Any]:
    """State of a buffer: copies of its items, lookback and space."""
    data = buffer.items(slice(0, buffer.total()))
    copied = map_tree(np.copy, data) if buffer.is_numpy else copy.deepcopy(data)
    return {"data": copied, "lookback": buffer.lookback, "space": buffer.space}


def buffer_from_state(name: str, state: Mapping[str, Any]) -> LookbackBuffer:
    """The buffer of a state that `state_of` returned."""
    return LookbackBuffer(copy.deepcopy(state["data"]), state["lookback"], state["space"], name=name)


def check_joinable(head: "SingleAgentEpisode", tail: "SingleAgentEpisode") -> None:
    """Raise EpisodeError unless `tail` is the chunk of the same episode that begins where `head` ends."""
    if tail.id_ != head.id_:
        raise EpisodeError(f"episode '{head.id_}' can't be joined by a chunk of another, '{tail.id_}'")
    if head.is_done:
        raise EpisodeError(f"episode '{head.id_}': concat_episode after its end at step {head.t}")
    if tail.t_started != head.t:
        raise EpisodeError(
            f"episode '{head.id_}' ends at step {head.t}, but the chunk to join begins at step {tail.t_started}"
        )
    if not head.is_reset or not tail.is_reset:
        raise EpisodeError(f"episode '{head.id_}': concat_episode before add_env_reset, on one side or both")
    if not equal_trees(head.get_observations(-1), tail.get_observations(0)):
        raise EpisodeError(
            f"episode '{head.id_}': its last observation at step {head.t} is not the first of the chunk to join"
        )
    head.validate()
    tail.validate()
