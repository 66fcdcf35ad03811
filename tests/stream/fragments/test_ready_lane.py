"""Lanes whose slots are answered for in any order, against a log of what each environment did."""

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings, strategies as st
from numbered_env import NUM_ACTIONS, NumberedEnv
from property_examples import examples, strategies

from rollflow.stream.data.infos import SlotInfos
from rollflow.stream.fragments.fragment import EpisodeIds, Fragment, FragmentLayout
from rollflow.stream.fragments.ready_lane import ReadyLane, SlotAnswers


class Setting(NamedTuple):
    slots: int
    fragment_length: int
    lookback: int
    longest: int
    fragments: int
    is_joined: bool  # the answer to an end has the next episode's first observation as well
    runs_ahead: bool
    loses: bool


ranges: Any = {"slots": (1, 5), "fragment_length": (1, 6), "lookback": (0, 4), "longest": (1, 8), "fragments": (1, 4)}
drawn_settings = st.builds(Setting, **strategies(**ranges, is_joined=bool, runs_ahead=bool, loses=bool))


class Answer(NamedTuple):
    """An environment's answer; `step` is what it has done, None for a mere reset."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Any = None
    step: Any = None
    final: Any = None


class Slots:
    """Steps the environments of a lane: `log` has each one's transitions, `lost` the episodes that it lost."""

    def __init__(self, drawn: Setting, data: st.DataObject) -> None:
        self.envs = [NumberedEnv(slot, lengths=(1, drawn.longest)) for slot in range(drawn.slots)]
        space, actions = self.envs[0].observation_space, self.envs[0].action_space
        shape = drawn.slots, drawn.fragment_length, drawn.lookback, actions
        layout = FragmentLayout(*shape, resets_next_step=not drawn.is_joined, episode_id=EpisodeIds("lane"))
        self.lane = ReadyLane(0, layout, space, self.receive)
        if drawn.runs_ahead:
            self.lane.run_ahead(None)
        self.pending: dict[int, Answer] = {}
        self.log: dict[int, list[Any]] = defaultdict(list)
        self.lost: set[tuple[int, int]] = set()
        self._drawn, self._data, self._ended = drawn, data, set[int]()
        first = [self._reset(slot, seed=slot) for slot in range(drawn.slots)]
        self.lane.reset(np.stack([each.observation for each in first]), SlotInfos([each.info for each in first]))

    def _reset(self, slot: int, **seed: Any) -> Answer:
        observation, info = self.envs[slot].reset(**seed)
        return Answer(observation, info=info)

    def act(self, version: int) -> None:
        """Record actions for the turn's slots, and step their environments."""
        lane, env = self.lane, self.envs
        seen, slots = lane.episodes.observations(), lane.episodes.slots.tolist()
        assert (lane.episodes.just_begun() == (seen[:, 2] == 0)).all()
        lane.policy_version, actions = version, (seen.sum(1) + version) % NUM_ACTIONS
        lane.record_actions({"actions": actions, "seen": seen.copy()})
        for slot, action, saw in zip(slots, actions.tolist(), seen.tolist(), strict=True):
            if slot in self._ended:
                self._ended.remove(slot)
                self.pending[slot] = self._reset(slot)
                continue
            answer = Answer(*env[slot].step(action), step=(saw, action, version, *env[slot].log[-1][3:]))
            if answer.terminated or answer.truncated:
                if self._drawn.is_joined:
                    next_one, last = self._reset(slot), (answer.observation, answer.info)
                    answer = answer._replace(observation=next_one.observation, info=next_one.info, final=last)
                else:
                    self._ended.add(slot)
            self.pending[slot] = answer

    def lose(self) -> None:
        """Lose some of the environments that are at a step: each is begun anew."""
        slots = [slot for slot in self._some(0) if self.pending[slot].step is not None]
        for slot in slots:
            self.lost.add((slot, self.pending[slot].step[0][1]))
            self._ended.discard(slot)
            self.envs[slot].episode -= self.pending[slot].final is not None  # of the reset that nobody sees
            self.pending[slot] = self._reset(slot)
        assert self.lane.lose("gone", np.array(slots, np.int64)) == len(slots)

    def receive(self) -> SlotAnswers:
        """The answers for some slots, as the lane takes them."""
        slots = self._some(1)
        answers = [self.pending.pop(slot) for slot in slots]
        for slot, answer in zip(slots, answers, strict=True):
            self.log[slot] += [] if answer.step is None else [answer.step]
        observations, rewards, terminateds, truncateds, infos, _, finals = zip(*answers, strict=True)
        last = [each or (None, {}) for each in finals]
        joined = np.array([each[0] for each in finals if each]), SlotInfos([each[1] for each in last])
        final = joined if self._drawn.is_joined else None
        flags = np.array(terminateds), np.array(truncateds)
        answered = np.stack(observations), np.array(rewards), *flags, SlotInfos(infos), np.array(slots)
        return SlotAnswers(*answered, final)

    def _some(self, least: int) -> list[int]:
        slots = self._data.draw(st.permutations(sorted(self.pending)))
        return slots[: self._data.draw(st.integers(least, len(slots)))]

    def fragments(self) -> list[Fragment]:
        """The lane's fragments, the last one of what was under way at the end."""
        lane, made, version = self.lane, list[Fragment](), 0
        while len(made) < self._drawn.fragments:
            version += self._data.draw(st.integers(0, 1))
            self.act(version)
            if self._drawn.loses:
                self.lose()
            lane.record_step(*self.receive())
            lane.commit_ended()
            if lane.is_full:
                made.append(lane.cut())
        if lane.take_rest():
            lane.commit_ended()
            made.append(lane.cut())
        assert not self.pending
        return made


@settings(max_examples=examples(100))
@given(drawn_settings, st.data())
def test_every_step_stands_in_one_chunk_with_what_was_before_it(drawn: Setting, data: st.DataObject) -> None:
    slots = Slots(drawn, data)
    found: dict[int, list[Any]] = {slot: [] for slot in range(drawn.slots)}
    for fragment in slots.fragments():
        for chunk in fragment.episodes():
            steps, length = found[chunk.slot], len(chunk)
            before = min(drawn.lookback, chunk.t_started)
            assert chunk.observations.lookback == before
            where = chunk.get_observations(slice(-before, length + 1), neg_index_as_lookback=True).tolist()
            begin = [chunk.slot, where[0][1], chunk.t_started - before]
            assert where == [[*begin[:2], begin[2] + step] for step in range(before + length + 1)]
            assert chunk.id_ == EpisodeIds("lane")(chunk.slot, where[0][1])
            infos = chunk.get_infos(slice(-before, length + 1), neg_index_as_lookback=True)
            assert [info["number"] for info in infos] == [10_000 * episode + step for _, episode, step in where]
            outputs = [chunk.get_extra_model_outputs(name).tolist() for name in ("seen", "policy_version")]
            ends = np.zeros((2, length), np.bool_)
            ends[:, -1] = chunk.is_terminated, chunk.is_truncated and "lost" not in chunk.custom_data
            assert ("lost" in chunk.custom_data) <= (chunk.is_truncated and (chunk.slot, begin[1]) in slots.lost)
            seen, versions = outputs
            steps += zip(seen, chunk.get_actions().tolist(), versions, chunk.get_rewards().tolist(), *ends, strict=True)
            actions = chunk.get_actions(slice(-before, length), neg_index_as_lookback=True).tolist()
            assert actions == [action for _, action, *_ in steps[-before - length :]]
            assert seen == where[before:-1]
    assert found == {slot: slots.log[slot] for slot in range(drawn.slots)}
    assert slots.lane.num_steps == sum(map(len, slots.log.values()))


def test_losses_are_in_a_fragment_with_steps() -> None:
    layout = FragmentLayout(2, 1, 1, NumberedEnv(0).action_space, resets_next_step=False, episode_id=EpisodeIds("lane"))
    lane = ReadyLane(0, layout, NumberedEnv(0).observation_space, lambda: None)
    seen, both, no = np.zeros((2, 3), np.int64), np.arange(2), np.zeros(2, np.bool_)
    lane.reset(seen, {})
    for _ in range(2):
        lane.record_actions({"actions": both})
        lane.lose("gone", both)
        lane.record_step(*SlotAnswers(seen, np.zeros(2), no, no, {}, both))
        assert not lane.is_full
    lane.record_actions({"actions": both})
    lane.record_step(*SlotAnswers(seen, np.ones(2), no, no, {}, both))
    assert lane.is_full
    fragment = lane.cut()
    assert (fragment.num_steps, [each.reason for each in fragment.losses]) == (2, ["gone", "gone"])
