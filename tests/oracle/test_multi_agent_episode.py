"""Our MultiAgentEpisode beside Ray's: the same operations must give the same data, or be refused by both."""

import copy
from typing import Any

import pytest
from both import ask
from drawn_turns import AGENTS, Told, plain, turns
from episodes import Pair
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from plays import has_heir, has_repeat, observed_plays, plays
from property_examples import examples
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode as RayEpisode

from rollflow import MultiAgentEpisode

FILTERED = [HealthCheck.filter_too_much]
IDS = {agent_id: f"e-{agent_id}" for agent_id in AGENTS}


class Plays(Pair):
    """A play in both implementations."""

    types = (MultiAgentEpisode, RayEpisode)
    alike = {"dtypes": False, "rtol": 1e-6}  # noqa: RUF012

    @classmethod
    def played(cls, told: Told, numpy: bool = False) -> "Plays":
        """Reset and steps, one by one."""
        pair = cls.of({"agent_episode_ids": IDS})
        for episode in (pair.ours, pair.theirs):
            episode.add_env_reset(observations=told.steps[0]["observations"], infos=told.steps[0]["infos"])
        pair.go_on(told, 1)
        return pair.map(lambda episode: episode.to_numpy()) if numpy else pair

    def go_on(self, told: Told, start: int) -> None:
        for step in told.steps[start:]:
            for episode in (self.ours, self.theirs):
                episode.add_env_step(**copy.deepcopy(step))


def picture(episode: Any) -> dict[str, Any]:
    """Return what an episode's getters give, and those of each of its agents, their lookback included."""
    stepped = {
        "stepped": dict.fromkeys(sorted(episode.get_agents_that_stepped())),
        "to act": dict.fromkeys(sorted(episode.get_agents_to_act())),
    }
    return {**stepped, **data_picture(episode)}


def data_picture(episode: Any, infos: bool = True) -> dict[str, Any]:
    """Return the picture without the parts that depend on who has an observation at the end."""
    return {
        "t": (episode.env_t_started, episode.env_t, len(episode), episode.env_steps(), episode.agent_steps()),
        "flags": (episode.id_, episode.is_done),
        "return": episode.get_return(),
        "agents": {
            agent_id: agent_picture(each, infos)
            for agent_id, each in episode.agent_episodes.items()
            if len(each) or not each.is_done  # whose end alone lies in a slice Ray leaves out
        },
    }


def agent_picture(episode: Any, infos: bool) -> dict[str, Any]:
    whole = {"indices": slice(-99, None), "neg_index_as_lookback": True}
    return {
        "id": (episode.agent_id, episode.module_id, episode.multi_agent_episode_id),
        "t": (episode.t_started, episode.t),
        "done": episode.is_done,
        "observations": plain(episode.get_observations(**whole)),
        "infos": episode.get_infos(**whole) if infos else None,
        "actions": plain(episode.get_actions(**whole)),
        "rewards": plain(episode.get_rewards(**whole)),
        "outputs": {
            key: plain(episode.get_extra_model_outputs(key, **whole)) if len(buffer) else []
            for key, buffer in episode.extra_model_outputs.items()
            if len(buffer)
        },
    }


long_plays = turns(min_steps=2).filter(lambda told: told.length > 1 and not has_heir(told) and not has_repeat(told))


def without_empty(answer: Any) -> Any:
    """Agents with an empty list count as absent."""
    if not isinstance(answer, dict):
        return answer
    return {agent_id: items for agent_id, items in answer.items() if not (isinstance(items, list) and not items)}


def may_be_arrays(told: Told) -> bool:
    """Return True if every agent has a step: without one, Ray has lists beside arrays, and refuses some calls."""
    return all(len(agent.observations) > 1 for agent in told.agents.values())


def hangs(told: Told) -> bool:
    """Return True if an agent's action waits at the end of these steps."""
    waiting: set[str] = set()
    for step in told.steps:
        waiting |= step["actions"].keys()
        waiting -= {*step["observations"], *step["terminateds"]}
    return bool(waiting)


def pays_early(told: Told) -> bool:
    """Return True if an agent gets a reward before its first observation, or with it."""
    seen: set[str] = set()
    for step in told.steps:
        if step["rewards"].keys() - seen:
            return True
        seen |= step["observations"].keys()
    return False


def ongoing(told: Told) -> Told:
    """The steps before the last agent's end: what an end is, is told below."""
    return Told(told.steps[:-1] if told.is_over else told.steps, told.agents)


@given(told=plays, numpy=st.booleans())
@settings(max_examples=examples(300), suppress_health_check=FILTERED)
def test_the_same_env_steps_leave_the_same_episode(told: Told, numpy: bool) -> None:
    Plays.played(told, numpy).check(picture, told)


@given(told=plays)
@settings(max_examples=examples(200), suppress_health_check=FILTERED)
def test_an_ongoing_episode_has_the_same_flags_and_hanging_rewards(told: Told) -> None:
    assume(not pays_early(told))
    pair = Plays.played(ongoing(told))
    pair.check(lambda episode: (episode.get_terminateds(), episode.get_truncateds()), told)
    pair.check(lambda episode: episode.get_return(include_hanging_rewards=True), told)


def indices_of(data: st.DataObject, total: int) -> Any:
    """None, or indices of `total` items, none of them outside: what lies there, Ray tells in ways of its own."""
    one = st.integers(-total, total - 1)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    bounds = data.draw(st.sampled_from([slice(start, stop), slice(start, None)]))
    if 0 < start < stop < total and data.draw(st.booleans()):
        bounds = slice(start - total, stop - total)
    return data.draw(st.sampled_from([None, bounds]) | one | st.lists(one, min_size=1, max_size=3)) if total else None


GETTERS = ["get_observations", "get_infos", "get_actions", "get_rewards"]


def asked_by_env_steps(data: st.DataObject, told: Told, total: int) -> dict[str, Any]:
    where = indices_of(data, total)
    asked: dict[str, Any] = {"return_list": not isinstance(where, int) and data.draw(st.booleans())}
    if data.draw(st.booleans()):
        known = data.draw(st.lists(st.sampled_from(sorted(told.agents)), min_size=1, unique=True))
        asked["agent_ids"] = data.draw(st.sampled_from([known[0], known, tuple(known), set(known)]))
    return {"indices": where, **asked}


def asked_by_agent_steps(data: st.DataObject, told: Told, total: int) -> dict[str, Any]:
    where = data.draw(st.sampled_from([None, -1, 0, 1, [0, 1], [-1, 0], slice(0, 2), slice(1, None), slice(1, 9)]))
    return {"indices": where, "env_steps": False}


def asked_with_fill(data: st.DataObject, told: Told, total: int) -> dict[str, Any]:
    where = data.draw(st.sampled_from([total, -total - 1, slice(0, total + 2), slice(-total - 2, None)]))
    where = data.draw(st.sampled_from([where, indices_of(data, total)])) if total else where
    return {"indices": where, "fill": 7, "return_list": not isinstance(where, int) and data.draw(st.booleans())}


@pytest.mark.parametrize("draw", [asked_by_env_steps, asked_by_agent_steps, asked_with_fill])
@given(told=observed_plays, numpy=st.booleans(), data=st.data(), name=st.sampled_from(GETTERS))
@settings(max_examples=examples(500), suppress_health_check=FILTERED)
def test_every_getter_gives_the_same(draw: Any, told: Told, numpy: bool, data: st.DataObject, name: str) -> None:
    pair = Plays.played(told, numpy and may_be_arrays(told) and draw is not asked_with_fill)
    asked = draw(data, told, told.length + (name in ("get_observations", "get_infos")))
    read = lambda episode: without_empty(plain(getattr(episode, name)(**asked)))  # noqa: E731
    pair.check(read, (name, asked, told))


@given(told=observed_plays, data=st.data())
@settings(max_examples=examples(200), suppress_health_check=FILTERED)
def test_extra_outputs_of_whole_steps_are_the_same(told: Told, data: st.DataObject) -> None:
    """Ray has no key for an agent without a whole step."""
    assume(may_be_arrays(told))
    pair, total = Plays.played(told), told.length
    where = indices_of(data, total)
    asked: dict[str, Any] = {"return_list": not isinstance(where, int) and data.draw(st.booleans())}
    pair.check(lambda episode: without_empty(episode.get_extra_model_outputs("minus", where, **asked)), (where, told))


@given(told=plays, data=st.data())
@settings(max_examples=examples(300), suppress_health_check=FILTERED)
def test_every_setter_does_the_same(told: Told, data: st.DataObject) -> None:
    pair = Plays.played(told)
    name = data.draw(st.sampled_from(["observations", "actions", "rewards"]))
    agent_id = data.draw(st.sampled_from([*sorted(told.agents), "nobody"]))
    count = len(told.agents[agent_id].observations) - (name != "observations") if agent_id in told.agents else 1
    assume(count)
    where = data.draw(st.sampled_from([None, 0, -1, slice(0, count), [0, -1]]))
    new: Any = {None: [7] * count, 0: 7, -1: 8}[where] if not isinstance(where, slice | list) else [5] * count
    new = [4, 4] if isinstance(where, list) else new

    def written(episode: Any) -> Any:
        getattr(episode, f"set_{name}")(new_data={agent_id: copy.copy(new)}, at_indices=where)
        return picture(episode)

    pair.check(written, (name, agent_id, where, told))


@given(told=long_plays, data=st.data(), numpy=st.booleans())
@settings(max_examples=examples(300), suppress_health_check=FILTERED)
def test_cut_chunks_are_the_same_and_go_on_the_same(told: Told, data: st.DataObject, numpy: bool) -> None:
    at = data.draw(st.integers(1, told.length - 1))
    head = Told(told.steps[: at + 1], told.agents)
    pair = Plays.played(head, numpy and may_be_arrays(told))
    lookback = data.draw(st.integers(0, 4))
    # Without a lookback, Ray loses the actions that hang; with one, it takes agents along that have ended.
    assume(lookback or not hangs(head))
    assume(not any(step["terminateds"] or step["truncateds"] for step in head.steps))
    chunk = pair.map(lambda episode: episode.cut(lookback))
    chunk.check(picture, (told, at, lookback))
    chunk.go_on(told, at + 1)
    chunk.check(picture, (told, at, lookback, "later"))
    pair.check(picture, "the episode that it came from")


@given(told=long_plays, data=st.data(), numpy=st.booleans())
@settings(max_examples=examples(300), suppress_health_check=FILTERED)
def test_slices_are_the_same(told: Told, data: st.DataObject, numpy: bool) -> None:
    assume(not told.is_over)
    pair = Plays.played(told, numpy and may_be_arrays(told))
    start = data.draw(st.integers(0, told.length))
    stop = data.draw(st.integers(start, told.length))
    pair.check(lambda episode: data_picture(episode[start:stop], infos=False), (told, start, stop))


@given(told=long_plays)
def test_a_state_gives_the_same_episode(told: Told) -> None:
    Plays.played(told).map(lambda episode: type(episode).from_state(episode.get_state())).check(picture)


@given(told=observed_plays.filter(lambda told: not pays_early(told)), data=st.data())
@settings(max_examples=examples(300), suppress_health_check=FILTERED)
def test_a_constructed_episode_is_the_same(told: Told, data: st.DataObject) -> None:
    assume(not told.is_over)
    lookback = data.draw(st.sampled_from(["auto", 0, 1, 2, 3]))
    lookback = lookback if lookback == "auto" else min(lookback, told.length)
    names = ["observations", "infos", "actions", "rewards", "extra_model_outputs"]
    columns = {name: [step[name] for step in told.steps[name in names[2:] :]] for name in names}
    ends = {name: told.steps[-1][name] for name in ("terminateds", "truncateds")}
    pair = Plays.of({**columns, **ends, "len_lookback_buffer": lookback, "agent_episode_ids": IDS})
    pair.check(data_picture, (told, lookback))


def joins_at(told: Told, at: int) -> bool:
    """Return True if Ray joins slices that meet there: all agents have come and none has ended or waits."""
    ended = any(step["terminateds"] or step["truncateds"] for step in told.steps[: at + 1])
    have_come = all(agent.observations[0][0] < at for agent in told.agents.values())
    return have_come and not ended and not hangs(Told(told.steps[: at + 1], told.agents))


@given(told=long_plays, data=st.data())
@settings(max_examples=examples(100), suppress_health_check=FILTERED)
def test_slices_joined_again_are_the_same(told: Told, data: st.DataObject) -> None:
    places = [at for at in range(1, told.length) if joins_at(told, at)]
    assume(places and not told.is_over)
    at = data.draw(st.sampled_from(places))

    def joined(episode: Any) -> Any:
        head = episode[:at]
        head.concat_episode(episode[at:])
        return data_picture(head, infos=False)

    Plays.played(told).check(joined, (at, told))


BOTH = {"observations": {"a": 1, "b": 1}, "actions": {"a": 0, "b": 0}, "rewards": {"a": 1.0, "b": 2.0}}


def two_agents() -> Plays:
    """Agents "a" and "b" with one step each."""
    pair = Plays.of({"agent_episode_ids": IDS})
    for episode in (pair.ours, pair.theirs):
        episode.add_env_reset(observations={"a": 0, "b": 0})
        episode.add_env_step(**copy.deepcopy(BOTH))
    return pair


REFUSED: dict[str, list[dict[str, Any]]] = {
    "a second action": [{"actions": {"b": 1}}, {"actions": {"b": 2}}],
    "an observation without an action": [{"observations": {"b": 2}}],
    "no reward for a step": [{"observations": {"b": 2}, "actions": {"b": 2}}],
    "a truncation without observation": [{"actions": {"b": 1}, "truncateds": {"b": True}}],
    "a later truncation without observation": [{"actions": {"b": 1}}, {"truncateds": {"b": True}}],
    "an observation after the end": [{**BOTH, "terminateds": {"b": True}}, {"observations": {"b": 3}}],
    "an action after the end": [{**BOTH, "terminateds": {"b": True}}, {"actions": {"b": 3}}],
    "a reward after the end": [{**BOTH, "terminateds": {"b": True}}, {"rewards": {"b": 3.0}}],
    "a step after everybody's end": [{**BOTH, "terminateds": {"__all__": True}}, {}],
    "a step after all agents' end": [{**BOTH, "terminateds": {"a": True, "b": True}}, {}],
}


@pytest.mark.parametrize("steps", list(REFUSED.values()), ids=list(REFUSED))
def test_both_refuse(steps: list[dict[str, Any]]) -> None:
    whole = [{"observations": {}, "actions": {}, "rewards": {}, **step} for step in steps]
    for episode in (two := two_agents()).ours, two.theirs:
        for step in whole[:-1]:
            episode.add_env_step(**copy.deepcopy(step))
        assert ask(lambda episode=episode: episode.add_env_step(**whole[-1])).error is not None
