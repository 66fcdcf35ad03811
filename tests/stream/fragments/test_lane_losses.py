"""Lanes whose environments are lost again and again: what was made stands in the chunks, and nothing else does."""

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from hypothesis import given, strategies as st

from rollflow.stream.fragments.fragment import Fragment, FragmentLayout
from rollflow.stream.fragments.lane import Lane

SPACE = gym.spaces.Box(-1e9, 1e9, (3,), np.float64)


@dataclass
class Simulated:
    """Environments that count: an observation is (slot, episode, step). `made` are the transitions so far."""

    slots: int
    resets_next_step: bool
    made: list[tuple[int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.episode, self.step_number = np.zeros(self.slots, int), np.zeros(self.slots, int)
        self.is_over = np.zeros(self.slots, bool)

    def observations(self) -> Any:
        return np.stack([np.arange(self.slots), self.episode, self.step_number], 1).astype(float)

    def begin_anew(self, slots: Any) -> None:
        self.episode[slots] += 1
        self.step_number[slots] = 0
        self.is_over[slots] = False

    def step(self, ending: Any) -> tuple[Any, list[Any] | None]:
        """One vector step in which the slots in `ending` end, if they can: who ended, and last observations."""
        woken, ended = self.is_over.copy(), ending & ~self.is_over
        self.begin_anew(woken)
        for slot in np.flatnonzero(~woken).tolist():
            self.made.append((slot, int(self.episode[slot]), int(self.step_number[slot])))
        self.step_number[~woken] += 1
        if self.resets_next_step:
            self.is_over = ended
            return ended, None
        last = list(self.observations()[ended])
        self.begin_anew(ended)
        return ended, last


def step(lane: Lane, simulated: Simulated, ending: Any) -> None:
    lane.record_actions({"actions": np.zeros(simulated.slots, np.int64)})
    rewards = np.where(simulated.is_over, 0.0, 1.0)  # a mere reset has none
    ended, last = simulated.step(ending)
    none = np.zeros(simulated.slots, bool)
    final = (np.array(last), {}) if last else None
    lane.record_step(simulated.observations(), rewards, ended, none, {}, final)
    lane.commit_ended()
    lane.commit()


def check_chunks(fragments: list[Fragment], made: list[tuple[int, int, int]]) -> None:
    found, ids = [], {}
    for fragment in fragments:
        for chunk in fragment.episodes():
            observations = chunk.get_observations(slice(0, None)).astype(int)
            slot, episode, first = observations[0].tolist()
            np.testing.assert_array_equal(observations[:, 2], np.arange(first, first + len(chunk) + 1))
            assert (observations[:, :2] == [slot, episode]).all()
            assert chunk.t_started == first
            assert ids.setdefault(chunk.id_, (slot, episode)) == (slot, episode)
            found += [(slot, episode, first + t) for t in range(len(chunk))]
    assert sorted(found) == sorted(made)
    assert len(set(ids.values())) == len(ids)


EVENTS = st.lists(st.one_of(st.just("loss"), st.just("cut"), st.sets(st.integers(0, 2))), min_size=1, max_size=25)


@given(
    slots=st.integers(1, 3), rows=st.integers(1, 6), lookback=st.integers(0, 3), next_step=st.booleans(), events=EVENTS
)
def test_every_transition_stands_in_a_chunk_of_its_episode_whenever_environments_are_lost(
    slots: int, rows: int, lookback: int, next_step: bool, events: list[Any]
) -> None:
    layout = FragmentLayout(slots, rows, lookback, gym.spaces.Discrete(2), next_step, lambda slot, n: f"{slot}/{n}")
    lane, simulated, fragments = Lane(0, layout, SPACE), Simulated(slots, next_step), []
    lane.reset(simulated.observations(), {})
    lane.commit()
    for event in events:
        if event == "loss":
            lane.lose("gone")
            simulated.begin_anew(slice(None))
            lane.reset(simulated.observations(), {})
            lane.commit()
        elif isinstance(event, set):
            step(lane, simulated, np.isin(np.arange(slots), list(event)))
        if lane.is_full or (event == "cut" and not lane.at_start):
            fragments.append(lane.cut())
        assert lane.num_steps == len(simulated.made)
    check_chunks([*fragments, lane.cut()], simulated.made)


def test_an_episode_that_ended_just_before_a_loss_keeps_its_own_last_observation() -> None:
    layout = FragmentLayout(1, 8, 0, gym.spaces.Discrete(2), True, lambda slot, n: f"{slot}/{n}")
    lane, simulated = Lane(0, layout, SPACE), Simulated(1, True)
    lane.reset(simulated.observations(), {"step": np.array([0])})
    lane.commit()
    for ending in (False, True):
        step(lane, simulated, np.array([ending]))
    lane.lose("gone")
    lane.reset(np.full((1, 3), -1.0), {"step": np.array([9])})
    lane.commit()
    fragment = lane.cut()
    chunk = fragment.chunk(0)
    assert chunk.get_observations()[:, 2].tolist() == [0, 1, 2]
    assert chunk.is_terminated
    assert not chunk.is_truncated
    assert "lost" not in chunk.custom_data
    assert fragment.last_observations()[0].tolist() == [0, 0, 2]
