"""AgentTimeline: one agent's part of a multi-agent episode, its own episode on the clock of env steps.

The agent's step p begins with its observation p, at env step `observed_at[p]`, and ends with its observation p + 1.
If that is more than one env step later, the agent has a *gap*. In a gap its action is *pending*, and its rewards add up
to the one reward of step p. Each part of such a reward is kept with its env step. So an episode can be sliced inside a
gap and joined again, with the same sums.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, Final, Literal

import numpy as np

from rollflow.stream.data.errors import EpisodeError
from rollflow.stream.data.tree import equal_trees
from rollflow.stream.episodes.buffer import BufferAndOne, LookbackBuffer
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

NOTHING: Final[Any] = object()
"""Placeholder for a missing observation, action or reward of an agent, for which None is a valid value."""

ALL_AGENTS = "__all__"
"""The key of a dict of end flags that stands for all agents."""

AgentValues = Mapping[Any, Any]
"""Agent id -> value; an agent without a value is absent."""


@dataclass(frozen=True, slots=True)
class PendingAction:
    """An agent's action and extra outputs, while no observation has answered it."""

    action: Any
    extra_model_outputs: AgentValues


@dataclass(frozen=True, slots=True)
class AgentShare:
    """One agent's part of an env step: observation, action and reward (or NOTHING), and its end flags."""

    observation: Any
    action: Any
    reward: Any
    infos: Any
    extra_model_outputs: Mapping[str, Any]
    terminated: bool
    truncated: bool

    @property
    def observed(self) -> bool:
        """True if there is an observation."""
        return self.observation is not NOTHING

    @property
    def acted(self) -> bool:
        """True if there is an action."""
        return self.action is not NOTHING

    @property
    def ended(self) -> bool:
        """True if this is the agent's last env step."""
        return self.terminated or self.truncated

    @property
    def has_data(self) -> bool:
        """True if there is more than an end flag."""
        return self.observed or self.acted or self.reward is not NOTHING or self.infos is not None

    def pending(self) -> PendingAction:
        """The action with its extra outputs."""
        return PendingAction(self.action, self.extra_model_outputs)


@dataclass(frozen=True, slots=True)
class EnvStep:
    """Data of one env step by agent ids; end flags may have the key "__all__"."""

    observations: AgentValues
    actions: AgentValues
    rewards: AgentValues
    infos: AgentValues = field(default_factory=dict)
    terminateds: AgentValues = field(default_factory=dict)
    truncateds: AgentValues = field(default_factory=dict)
    extra_model_outputs: AgentValues = field(default_factory=dict)

    @property
    def all_terminated(self) -> bool:
        """True if the task ended for all agents."""
        return bool(self.terminateds.get(ALL_AGENTS, False))

    @property
    def all_truncated(self) -> bool:
        """True if only the recording ended, for all agents."""
        return bool(self.truncateds.get(ALL_AGENTS, False))

    def agents(self) -> list[Any]:
        """The ids of all agents in the data, each once."""
        parts = (self.observations, self.actions, self.rewards, self.infos, self.terminateds, self.truncateds)
        return [agent_id for agent_id in dict.fromkeys(key for part in parts for key in part) if agent_id != ALL_AGENTS]

    def share_of(self, agent_id: Any) -> AgentShare:
        """One agent's part of the env step."""
        return AgentShare(
            observation=self.observations.get(agent_id, NOTHING),
            action=self.actions.get(agent_id, NOTHING),
            reward=self.rewards.get(agent_id, NOTHING),
            infos=self.infos.get(agent_id),
            extra_model_outputs=self.extra_model_outputs.get(agent_id) or {},
            terminated=self.all_terminated or bool(self.terminateds.get(agent_id, False)),
            truncated=self.all_truncated or bool(self.truncateds.get(agent_id, False)),
        )


def end_flags(flags: AgentValues | bool | None) -> AgentValues:
    """End flags by agent ids; a bool is for all agents."""
    if flags is None:
        return {}
    return {ALL_AGENTS: flags} if isinstance(flags, bool) else flags


def env_steps_of(
    observations: Sequence[AgentValues],
    infos: Sequence[AgentValues] | None,
    actions: Sequence[AgentValues] | None,
    rewards: Sequence[AgentValues] | None,
    extra_model_outputs: Sequence[AgentValues] | None,
    terminateds: AgentValues,
    truncateds: AgentValues,
) -> list[EnvStep]:
    """The reset, and then each env step; the end flags belong to the last one.

    Raises EpisodeError unless observations, and infos if any, are one more than everything else.
    """
    steps = len(observations) - 1
    counts = {"actions": len(actions or ()), "rewards": len(rewards or ())}
    if extra_model_outputs is not None:
        counts["extra_model_outputs"] = len(extra_model_outputs)
    if any(count != steps for count in counts.values()) or (infos is not None and len(infos) != steps + 1):
        others = ", ".join(f"{count} {name}" for name, count in counts.items())
        others += "" if infos is None else f", {len(infos)} infos"
        raise EpisodeError(
            f"{steps + 1} observations do not go with {others}; expected as many infos, and one less of everything else"
        )
    nothing: list[AgentValues] = [{}] * steps
    acts, gets, extra = ([{}, *(given or nothing)] for given in (actions, rewards, extra_model_outputs))
    ends = ([*nothing, flags] for flags in (terminateds, truncateds))
    return list(map(EnvStep, observations, acts, gets, infos or [*nothing, {}], *ends, extra))


Received = dict[int, Any]
"""Env step -> the reward that an agent got there, ascending."""

ColumnName = Literal["observations", "infos", "actions", "rewards"]


def sum_of(rewards: Iterable[Any]) -> Any:
    """The sum of the rewards, in their order; 0.0 if there are none."""
    return reduce(add, rewards, 0.0)


def merged(first: Received, second: Received) -> Received:
    """The rewards of both; if both have an env step, the second's counts."""
    return dict(sorted({**first, **second}.items()))


@dataclass(slots=True)
class AgentTimeline:
    """One agent of a multi-agent episode, which has at least one observation.

    episode        the agent's own episode, L steps of lookback and n current ones
    observed_at    env steps of its L + n + 1 observations, ascending
    pending        action since the last observation; None: it has not acted, or is done
    received       rewards that are only a part of a step's reward, or came before the first observation
    """

    episode: SingleAgentEpisode
    observed_at: list[int]
    pending: PendingAction | None = None
    received: Received = field(default_factory=dict)

    @property
    def last_seen(self) -> int:
        """The env step of the last observation."""
        return self.observed_at[-1]

    @property
    def lookback(self) -> int:
        """Number of the agent's steps that are history."""
        return self.episode.observations.lookback

    def hung_reward(self) -> Any:
        """Sum of the agent's rewards since its last observation."""
        recent = []
        for env_step in reversed(self.received):
            if env_step < self.last_seen:
                break
            recent.append(self.received[env_step])
        return sum_of(reversed(recent))

    def early_reward(self) -> Any:
        """Sum of the agent's rewards before its first observation."""
        return sum_of(reward for env_step, reward in self.received.items() if env_step < self.observed_at[0])

    def validate(self) -> None:
        """Raise EpisodeError unless the episode's data fit together, with one env step for each observation."""
        self.episode.validate()
        if len(self.observed_at) != self.episode.observations.total():
            raise EpisodeError(
                f"its own episode has {self.episode.observations.total()} observations, expected those of the "
                f"{len(self.observed_at)} env steps at which they came"
            )

    # Growing

    def check(self, share: AgentShare, env_step: int) -> None:
        """Raise EpisodeError or ColumnError unless the agent can take `share`, of the env step numbered `env_step`."""
        observed, acted, answered = share.observed, share.acted, self.pending is not None
        if self.episode.is_done and share.has_data:
            raise EpisodeError(f"it ended at env step {self.last_seen}, expected no more data for it")
        if acted and answered:
            raise EpisodeError(f"it acts, but its action at env step {self.last_seen} still waits for an observation")
        if acted and observed and share.reward is NOTHING:
            raise EpisodeError("it acted and has an observation, but no reward")
        if observed and not acted and not answered:
            raise EpisodeError(f"it has an observation, but has not acted since the one at env step {self.last_seen}")
        if share.truncated and not observed and (acted or answered):
            raise EpisodeError("it is truncated after an action, expected its last observation")
        taken = share.pending() if acted else self.pending
        if taken is not None and (acted or (observed and self.episode.observations.is_numpy)):
            observation = share.observation if observed else self.episode.get_observations(-1)
            self.episode.check_env_step(observation, taken.action, self._like_reward(share), taken.extra_model_outputs)

    def take(self, share: AgentShare, env_step: int) -> None:
        """Take the agent's share of the env step numbered `env_step`, after `check`."""
        if self.episode.is_done:
            return
        whole = share.acted and share.observed and self.last_seen == env_step
        if share.reward is not NOTHING and not whole:
            self.received[env_step] = share.reward
        if share.acted:
            self.pending = share.pending()
        if self.pending is not None and (share.observed or share.ended):
            observation = share.observation if share.observed else copy.deepcopy(self.episode.get_observations(-1))
            self._close(observation, share.reward if whole else self.hung_reward(), share, env_step + 1)
        elif share.ended:
            self.end(terminated=share.terminated, truncated=share.truncated)

    def with_received(self, more: Received) -> "AgentTimeline":
        """A copy with more rewards after the last observation."""
        return AgentTimeline(self.episode, self.observed_at, self.pending, merged(self.received, more))

    def end(self, *, terminated: bool, truncated: bool) -> None:
        """End the agent with its last observation; later rewards are dropped."""
        self.episode.is_terminated, self.episode.is_truncated = terminated, truncated
        self.pending = None
        self.received = {step: reward for step, reward in self.received.items() if step < self.last_seen}

    def _like_reward(self, share: AgentShare) -> Any:
        """A reward with the shape of the step's future reward."""
        if share.reward is not NOTHING:
            return share.reward
        return self.episode.get_rewards(-1) if self.episode.rewards.total() else 0.0

    def _close(self, observation: Any, reward: Any, share: AgentShare, env_step: int) -> None:
        assert self.pending is not None
        self.episode.add_env_step(
            observation,
            self.pending.action,
            reward,
            share.infos,
            terminated=share.terminated,
            truncated=share.truncated,
            extra_model_outputs=self.pending.extra_model_outputs,
        )
        self.observed_at.append(env_step)
        self.pending = None
        if self.episode.observations.is_numpy:
            self.episode.to_numpy()  # the first action and reward, which are still in lists

    def settle(self, env_step: int, t_started: int) -> None:
        """Set the chunk's beginning to an env step: agent steps that begin earlier become its lookback."""
        episode, steps = self.episode, self.episode.rewards.total()
        history = min(bisect_left(self.observed_at, env_step), steps)
        self.episode = episode.part(0, steps, history, t_started)
        self.episode.is_terminated, self.episode.is_truncated = episode.is_terminated, episode.is_truncated

    # Reading

    def column(self, name: ColumnName, *, with_pending: bool = True) -> LookbackBuffer:
        """One quantity over the agent's steps; the last item may be a pending action, or its reward so far."""
        buffer: LookbackBuffer = getattr(self.episode, name)
        if not with_pending or self.pending is None or name in ("observations", "infos"):
            return buffer
        return self._extended(buffer, self.pending.action if name == "actions" else self.hung_reward())

    def output(self, key: str, *, with_pending: bool = True) -> LookbackBuffer:
        """An extra model output over the agent's steps, as `column`; empty if the agent has no such output."""
        buffer = self.episode.extra_model_outputs.get(key, LookbackBuffer([], name=key))
        pending = self.pending.extra_model_outputs if with_pending and self.pending is not None else {}
        return self._extended(buffer, pending.get(key, NOTHING))

    def output_keys(self) -> list[str]:
        """The keys of the agent's extra model outputs, with those of a pending action."""
        pending = {} if self.pending is None else self.pending.extra_model_outputs
        return list(dict.fromkeys([*self.episode.extra_model_outputs, *pending]))

    def _extended(self, buffer: LookbackBuffer, last: Any) -> LookbackBuffer:
        if last is NOTHING:
            return buffer
        if not self.episode.observations.is_numpy or buffer.is_numpy:
            return BufferAndOne(buffer, last)
        arrays = LookbackBuffer([*buffer.data, last], buffer.lookback, buffer.space, name=buffer.name)
        arrays.to_numpy()
        return arrays

    def positions(self, env_steps: Sequence[int], *, with_gaps: bool) -> Sequence[int]:
        """The position of the observation at each env step: -1 in a gap, or left out unless `with_gaps`."""
        seen = self.observed_at
        if not with_gaps and isinstance(env_steps, range) and env_steps.step == 1:
            return range(bisect_left(seen, env_steps.start), bisect_left(seen, env_steps.stop))
        return [self.position(env_step) for env_step in env_steps]

    def position(self, env_step: int) -> int:
        """The position of the observation at an env step; -1 in a gap."""
        found = bisect_left(self.observed_at, env_step)
        return found if found < len(self.observed_at) and self.observed_at[found] == env_step else -1

    # Parts

    def step_after(self, env_step: int) -> int:
        """The number of the agent's step that begins with its first observation after an env step.

        It is 0 if the agent has not acted on the observation before, since it then begins anew.
        """
        position = bisect_right(self.observed_at, env_step)
        if position and self._pending_at(position - 1) is None:
            return 0
        return self.episode.t_started - self.lookback + position

    def part(self, start: int, stop: int, history: int, *, from_start: bool) -> "AgentTimeline | None":
        """The timeline between two env steps, with the observations at both; None: the agent is not in that part.

            start, stop    env steps
            history        env step at which the lookback begins, at most `start`
            from_start     whether the part begins where the chunk does: the agent's part then does so too

        The agent is not in it if it has ended by `start`. The same holds if it is in a gap throughout, without an
        action since `history` that waits for its next observation.
        """
        seen = self.observed_at
        first, end = bisect_left(seen, history), bisect_right(seen, stop)
        if first == end or (self.episode.is_done and self.last_seen <= start and not from_start):
            return None
        begin = bisect_left(seen, start, first, end)
        if from_start:
            begin = min(begin, max(first, self.lookback))
        if begin == end:
            if self._pending_at(end - 1) is None:
                return None
            begin = end - 1
        episode = self.episode.part(first, end - 1, begin - first, self.episode.t_started - self.lookback + begin)
        episode.custom_data = copy.deepcopy(self.episode.custom_data)
        if end == len(seen):
            episode.is_terminated, episode.is_truncated = self.episode.is_terminated, self.episode.is_truncated
        pending = self._pending_at(end - 1) if seen[end - 1] < stop else None
        since = min([seen[first], start, *(self.received if from_start else ())])
        return AgentTimeline(episode, seen[first:end], pending, self.received_between(since, stop, start))

    def cut(self, history: int) -> "AgentTimeline":
        """The next chunk, with the agent's steps since env step `history` as its lookback."""
        lookback = max(0, len(self.observed_at) - 1 - bisect_left(self.observed_at, history))
        episode, observed_at = self.episode.cut(lookback), self.observed_at[-lookback - 1 :]
        received = {step: reward for step, reward in self.received.items() if step >= observed_at[0]}
        return AgentTimeline(episode, observed_at, self.pending, received)

    def received_between(self, start: int, stop: int, *seams: int) -> Received:
        """The parts of rewards that came in env steps start … stop - 1.

        If a step's reward was replaced by a setter, its parts are void. If such a step lies across `start`, `stop` or
        one of the `seams`, its whole reward counts where the step began.
        """
        received = self.received
        for step in {bisect_left(self.observed_at, seam) - 1 for seam in (start, stop, *seams)}:
            if 0 <= step < self.episode.rewards.total():
                received = self._without_void_parts(received, step)
        return {env_step: reward for env_step, reward in received.items() if start <= env_step < stop}

    def _without_void_parts(self, received: Received, step: int) -> Received:
        """`received`, with the parts of a step's reward replaced by the reward if their sum differs from it."""
        begin, end = self.observed_at[step : step + 2]
        parts = {env_step: part for env_step, part in received.items() if begin <= env_step < end}
        reward = self.episode.rewards.item(step)
        if not parts or equal_trees(np.asarray(sum_of(parts.values())).astype(np.asarray(reward).dtype), reward):
            return received
        others = {env_step: part for env_step, part in received.items() if env_step not in parts}
        return merged(others, {begin: reward})

    def _pending_at(self, position: int) -> PendingAction | None:
        """The agent's action after the observation at a position; None: there is none."""
        if position == self.episode.rewards.total():
            return self.pending
        extra = {key: buffer.item(position) for key, buffer in self.episode.extra_model_outputs.items()}
        return PendingAction(self.episode.actions.item(position), extra)

    # State

    def get_state(self) -> dict[str, Any]:
        """The state as a dict; the data are copies."""
        pending = self.pending
        return {
            "episode": self.episode.get_state(),
            "observed_at": list(self.observed_at),
            "pending": None
            if pending is None
            else {"action": copy.deepcopy(pending.action), "extra": copy.deepcopy(dict(pending.extra_model_outputs))},
            "received": copy.deepcopy(self.received),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> "AgentTimeline":
        """The timeline of a state that `get_state()` returned."""
        pending = copy.deepcopy(state["pending"])
        return AgentTimeline(
            SingleAgentEpisode.from_state(state["episode"]),
            list(state["observed_at"]),
            None if pending is None else PendingAction(pending["action"], pending["extra"]),
            copy.deepcopy(dict(state["received"])),
        )


@dataclass(slots=True)
class AwaitedAgent:
    """An agent without an observation in a chunk: its rewards so far, and the number of its first step."""

    received: Received = field(default_factory=dict)
    t_started: int = 0


def continued(before: Received, after: Received, seam: int) -> Received:
    """The rewards of an awaited agent in two chunks; those of before the seam may be in the second as well, summed."""
    return dict(after) if any(env_step < seam for env_step in after) else merged(before, after)


def join_timelines(head: AgentTimeline, tail: AgentTimeline) -> AgentTimeline:
    """Both timelines together, with the lookback of `head`. The first observation of `tail` answers a pending action.

    `head` is unchanged. Raises EpisodeError if the two do not meet, ColumnError if the data of `tail` do not fit the
    arrays of `head`.
    """
    begin = tail.lookback
    first_seen = tail.observed_at[begin]
    if head.episode.is_done and tail.episode.is_done and tail.last_seen == head.last_seen:
        return head  # the chunks meet at the agent's end, which both have
    if head.episode.is_done:
        raise EpisodeError(f"it ended at env step {head.last_seen}, but it is in the chunk to join")
    if first_seen < head.last_seen:
        raise EpisodeError(f"its observation at env step {first_seen} is in both chunks")
    received = merged(head.received, tail.received)
    episode = copy.copy(head.episode)  # with the same buffers, which joining replaces
    episode.custom_data = dict(episode.custom_data)
    observed_at = head.observed_at
    if first_seen > head.last_seen:
        episode.concat_episode(_between(head, tail, received))
        observed_at = [*observed_at, first_seen]
    episode.concat_episode(tail.episode)
    if episode.observations.is_numpy:
        episode.to_numpy()  # actions and rewards too, if there were none before
    return AgentTimeline(episode, observed_at + tail.observed_at[begin + 1 :], tail.pending, received)


def begun_by(tail: AgentTimeline, received: Received, *, as_arrays: bool) -> AgentTimeline:
    """A new timeline with the current data of `tail`, and the rewards that the agent `received`."""
    begin, theirs = tail.lookback, tail.episode
    episode = SingleAgentEpisode(
        theirs.id_,
        observations=[theirs.get_observations(0)],
        infos=[theirs.get_infos(0)],
        observation_space=theirs.observation_space,
        action_space=theirs.action_space,
        t_started=theirs.t_started,
        agent_id=theirs.agent_id,
        module_id=theirs.module_id,
        multi_agent_episode_id=theirs.multi_agent_episode_id,
    )
    episode.concat_episode(theirs)
    if as_arrays:
        episode.to_numpy()
    return AgentTimeline(episode, tail.observed_at[begin:], tail.pending, received)


def _between(head: AgentTimeline, tail: AgentTimeline, received: Received) -> SingleAgentEpisode:
    """The step from the last observation of `head` to the first of `tail`, answering the pending action."""
    first_seen, t = tail.observed_at[tail.lookback], head.episode.t
    if head.pending is None:
        raise EpisodeError(
            f"the chunk to join has an observation at env step {first_seen}, but the agent has not acted since its "
            f"observation at env step {head.last_seen}; expected chunks that follow each other"
        )
    if tail.episode.t_started != t + 1:
        raise EpisodeError(
            f"the agent's last action is at its step {t}, but the chunk to join begins at its step "
            f"{tail.episode.t_started}; expected step {t + 1}"
        )
    parts = [reward for env_step, reward in received.items() if head.last_seen <= env_step < first_seen]
    total = head.episode.rewards.total()
    step = head.episode.part(total, total, 0, t)
    results = tail.episode.get_observations(0), head.pending.action, sum_of(parts), tail.episode.get_infos(0)
    step.add_env_step(*results, extra_model_outputs=head.pending.extra_model_outputs)
    return step
