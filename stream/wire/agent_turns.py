"""AgentTurns: the agents in a lane's episodes, by the host's answers so far, which check its next answer."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import WireError
from rollflow.stream.wire.codec.agent_rows import AgentRows, AgentSlots
from rollflow.stream.wire.codec.handshake import Hello

Mask = NDArray[np.bool_]


class AgentTurns:
    """State of all agent slots of a lane of N environments, part after part.

    An agent acts on its newest observation, until it is terminated or truncated. An episode goes on as long as one of
    its agents is left. In every step of an episode an agent must be able to act.
    """

    def __init__(self, hello: Hello, num_envs: int) -> None:
        assert hello.agents is not None
        by_part = [[hello.agents[number] for number in numbers] for numbers in hello.agents_by_part]
        self._by_part, self._num_envs = by_part, num_envs
        self._sizes = [num_envs * len(agents) for agents in by_part]
        self._envs = np.concatenate([np.repeat(np.arange(num_envs), len(agents)) for agents in by_part])
        nobody = np.zeros(len(self._envs), np.bool_)
        # Agents that had an observation in the episode, have ended, wait for an observation, and act next.
        self._has_come, self._has_ended, self._waits, self._acts = (nobody.copy() for _ in range(4))

    @property
    def acting(self) -> tuple[NDArray[np.int64], ...]:
        """The agent slots of every part that act next: i64[K] each, ascending."""
        return tuple(map(np.flatnonzero, np.split(self._acts, np.cumsum(self._sizes)[:-1])))

    def take(self, rows: AgentRows) -> None:
        """Take an answer whose form is right. Raises WireError, with the state unchanged, if it can't come next."""
        where = f"{'reset' if rows.rewards is None else 'step'} {rows.number} of lane {rows.lane}"
        seen = self._mask(rows.agent_slots)
        if rows.rewards is None:
            self._check_goes_on(seen, where)
            self._begin(np.ones_like(seen), seen)
            return
        assert rows.terminateds is not None
        assert rows.truncateds is not None
        rewarded = np.concatenate(rows.rewards) != 0
        terminated, truncated = np.concatenate(rows.terminateds), np.concatenate(rows.truncateds)
        self._refuse(seen & self._has_ended, where, "has an observation, but has ended before")
        self._refuse(rewarded & self._has_ended, where, "has a reward, but has ended before")
        come, waits = self._has_come | seen, (self._waits | self._acts) & ~seen
        self._refuse((terminated | truncated) & ~(come & ~self._has_ended), where, "ends, but is not there")
        self._refuse(truncated & waits, where, "is truncated after its action, but has no last observation")
        over = self._has_ended | terminated | truncated
        is_over = self._check_ended(rows, come & ~over, terminated, truncated, where)
        first = self._mask(rows.first_agent_slots or tuple(np.zeros(0, np.int64) for _ in self._sizes))
        self._refuse(first & ~is_over, where, "has a first observation, but no episode has begun")
        acts = (seen & ~over) | first
        self._check_goes_on(acts, where)
        self._has_come, self._has_ended, self._waits, self._acts = come, over, waits, acts
        self._begin(is_over, first)

    # Inside

    def _begin(self, anew: Mask, first: Mask) -> None:
        """Begin episodes: `anew` masks agents of reset environments, `first` those of them with an observation."""
        self._has_come[anew], self._has_ended[anew], self._waits[anew] = first[anew], False, False
        self._acts[anew] = first[anew]

    def _check_ended(
        self, rows: AgentRows, stays: Mask, terminated: Mask, truncated: Mask, where: str
    ) -> NDArray[np.bool_]:
        """Mask of agents whose episodes have ended. Raises WireError if the answer names other episodes."""
        assert rows.ended is not None
        assert rows.ended_truncated is not None
        expected = np.flatnonzero(self._counts(stays) == 0)
        if not np.array_equal(rows.ended, expected):
            raise WireError(
                f"{where}: ended is {rows.ended.tolist()}, expected {expected.tolist()}, in which no agent is left",
                "rows",
            )
        for name, by, those in (
            ("truncated", truncated, rows.ended[rows.ended_truncated]),
            ("terminated", terminated, rows.ended[~rows.ended_truncated]),
        ):
            without = those[self._counts(by)[those] == 0]
            if len(without):
                raise WireError(
                    f"{where}: the episode of slot {without[0]} is said to be {name}, but none of its agents is", "rows"
                )
        return np.isin(self._envs, expected)

    def _check_goes_on(self, acts: Mask, where: str) -> None:
        counts = self._counts(acts)
        if not counts.all():
            raise WireError(
                f"{where}: the episode of slot {np.argmin(counts)} goes on, but no agent has an observation to act on",
                "rows",
            )

    def _refuse(self, wrong: Mask, where: str, what: str) -> None:
        if wrong.any():
            number = int(np.argmax(wrong))
            part = int(np.searchsorted(np.cumsum(self._sizes), number, side="right"))
            agents = self._by_part[part]
            env, place = divmod(number - sum(self._sizes[:part]), len(agents))
            raise WireError(f"{where}: slot {env}, agent {agents[place]!r}: it {what}", "rows")

    def _counts(self, mask: Mask) -> NDArray[np.int64]:
        """i64[N]: number of each environment's agents in the mask."""
        return np.bincount(self._envs[mask], minlength=self._num_envs)

    def _mask(self, agent_slots: AgentSlots | Sequence[NDArray[np.int64]]) -> Mask:
        masks = []
        for slots, size in zip(agent_slots, self._sizes, strict=True):
            mask = np.full(size, slots is None)
            if slots is not None:
                mask[slots] = True
            masks.append(mask)
        return np.concatenate(masks)
