"""Laws of every MultiAgentEpisode, whoever acts when: held against plain lists, and against its own parts."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from drawn_turns import AGENTS, Told, plain, turns
from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow import MultiAgentEpisode
from rollflow.stream import EpisodeIndexError
from rollflow.stream.data.tree import map_tree

NAMES = ["observations", "infos", "actions", "rewards", "outputs"]
FORMS = st.booleans()


def state_of(episode: MultiAgentEpisode) -> Any:
    """All that it holds, but for times and spaces."""

    def timeless(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return plain(tree)
        return {key: timeless(part) for key, part in tree.items() if key not in ("duration_s", "space")}

    return timeless(episode.get_state())


def read(episode: MultiAgentEpisode, name: str, *args: Any, **asked: Any) -> Any:
    if name == "outputs":
        answer = episode.get_extra_model_outputs("minus", *args, **asked)
    else:
        answer = getattr(episode, f"get_{name}")(*args, **asked)
    return plain(answer)


def has_outputs(told: Told) -> bool:
    return any(agent.actions for agent in told.agents.values())


@given(told=turns(), data=st.data(), numpy=FORMS)
@settings(max_examples=examples(300))
def test_chunks_that_are_cut_anywhere_and_joined_are_the_episode(told: Told, data: st.DataObject, numpy: bool) -> None:
    chunk = told.episode(steps=0)
    chunks = [chunk]
    for step in told.steps[1:]:
        if data.draw(st.booleans()):
            if numpy:
                chunk.to_numpy()
            chunk = chunk.cut(data.draw(st.integers(0, 4)))
            chunks.append(chunk)
        chunk.add_env_step(**step)
    assert sum(each.get_return() for each in chunks) == pytest.approx(told.episode().get_return())
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole.concat_episode(chunk)
    assert state_of(whole.to_numpy() if numpy else whole) == state_of(told.episode(numpy=numpy))
    assert whole.is_numpy == numpy


@given(told=turns(may_idle=True), data=st.data(), numpy=FORMS)
@settings(max_examples=examples(300))
def test_slices_joined_again_are_the_episode(told: Told, data: st.DataObject, numpy: bool) -> None:
    episode = told.episode(numpy=numpy)
    before = state_of(episode)
    seams = sorted(data.draw(st.sets(st.integers(0, told.length - 1), max_size=3))) if told.length else []
    bounds = [0, *seams, told.length]
    lookback = data.draw(st.none() | st.integers(0, 3))
    slices = [episode.slice(slice(start, stop), len_lookback_buffer=lookback) for start, stop in pairwise(bounds)]
    whole = slices[0]
    for part in slices[1:]:
        whole.concat_episode(part)
    assert state_of(whole) == state_of(episode) == before


@given(told=turns(min_steps=3), data=st.data(), numpy=FORMS)
@settings(max_examples=examples(200))
def test_slices_of_a_chunk_joined_again_are_the_chunk(told: Told, data: st.DataObject, numpy: bool) -> None:
    cut_at = data.draw(st.integers(0, told.length - 1)) if told.length else 0
    chunk = told.episode(steps=cut_at).cut(data.draw(st.integers(0, 3)))
    for step in told.steps[1 + cut_at :]:
        chunk.add_env_step(**step)
    if numpy:
        chunk.to_numpy()
    at = data.draw(st.integers(0, max(0, len(chunk) - 1)))
    head, tail = chunk[:at], chunk[at:]
    assert (head.env_t_started, head.env_t, tail.env_t) == (cut_at, cut_at + at, told.length)
    if not head.is_done:
        head.concat_episode(tail)
    assert state_of(head) == state_of(chunk)


@given(told=turns(may_idle=True), numpy=FORMS, data=st.data())
def test_an_episode_comes_back_from_its_state_and_goes_on(told: Told, numpy: bool, data: st.DataObject) -> None:
    steps = data.draw(st.integers(0, told.length))
    episode = told.episode(steps=steps, numpy=numpy)
    state = episode.get_state()
    twin = MultiAgentEpisode.from_state(state)
    for step in told.steps[1 + steps :]:
        episode.add_env_step(**step)
        twin.add_env_step(**step)
    assert state_of(twin) == state_of(episode)
    again = MultiAgentEpisode.from_state(state)
    assert state_of(again) == state_of(told.episode(steps=steps, numpy=numpy))


@given(told=turns(), numpy=FORMS, data=st.data())
def test_the_constructor_makes_what_reset_and_steps_make(told: Told, numpy: bool, data: st.DataObject) -> None:
    names = ["observations", "infos", "actions", "rewards", "extra_model_outputs"]
    columns = {name: [step[name] for step in told.steps[name in names[2:] :]] for name in names}
    last = told.steps[-1]
    ended = {agent_id for step in told.steps[:-1] for key in ("terminateds", "truncateds") for agent_id in step[key]}
    stepped = told.episode()
    ends = {name: last[name] for name in ("terminateds", "truncateds")}
    ids = {agent_id: f"e-{agent_id}" for agent_id in AGENTS}
    built = MultiAgentEpisode("e", **columns, **ends, len_lookback_buffer=0, agent_episode_ids=ids)
    for agent_id in built.agent_ids - ended:
        for name in ("observations", "infos", "actions", "rewards"):
            assert read(built, name, None, agent_id) == read(stepped, name, None, agent_id)
        assert built.agent_episodes[agent_id].is_done == stepped.agent_episodes[agent_id].is_done
    assert (len(built), built.get_agents_that_stepped()) == (len(stepped), stepped.get_agents_that_stepped())


def item_at(told: Told, agent_id: str, name: str, env_step: int, fill: Any) -> list[Any]:
    items = told.agents[agent_id].items(name)
    return [items[env_step]] if env_step in items else [] if fill is None else [fill]


@given(
    told=turns(may_idle=True), numpy=FORMS, data=st.data(), name=st.sampled_from(NAMES), fill=st.sampled_from([None, 7])
)
@settings(max_examples=examples(600))
def test_getters_by_env_steps_agree_with_lists(
    told: Told, numpy: bool, data: st.DataObject, name: str, fill: int | None
) -> None:
    if name == "outputs" and not has_outputs(told):
        return
    episode = told.episode(numpy=numpy)
    last = told.length - (name not in ("observations", "infos"))
    bound = st.integers(-last - 3, last + 3)
    if data.draw(st.booleans()):
        asked: Any = data.draw(st.lists(bound, max_size=4))
        steps = [index if index >= 0 else last + 1 + index for index in asked]
        if fill is None and any(not 0 <= step <= last for step in steps):
            with pytest.raises(EpisodeIndexError, match="episode 'e': index"):
                read(episode, name, asked)
            return
    else:
        start, stop = sorted([data.draw(bound), data.draw(bound)], key=lambda b: b if b >= 0 else last + 1 + b)
        asked = slice(start, stop)
        steps = list(range(*[b if b >= 0 else last + 1 + b for b in (start, stop)]))
    told_of = {
        agent_id: [item for step in steps for item in item_at(told, agent_id, name, step, fill)]
        for agent_id in told.agents
    }
    expected = {agent_id: items for agent_id, items in told_of.items() if items or fill is not None}
    filled = (lambda answer: answer) if name != "rewards" else _as_float32
    assert filled(read(episode, name, asked, fill=fill)) == filled(expected)
    listed = [
        {agent_id: item for agent_id in told.agents for item in item_at(told, agent_id, name, step, fill)}
        for step in (steps if fill is not None else [step for step in steps if 0 <= step <= last])
    ]
    assert filled(read(episode, name, asked, fill=fill, return_list=True)) == filled(listed)


def _as_float32(tree: Any) -> Any:
    """Fillers of rewards are float32."""
    return map_tree(lambda leaf: float(np.float32(leaf)), tree)


@given(told=turns(may_idle=True), numpy=FORMS, name=st.sampled_from(NAMES), data=st.data())
@settings(max_examples=examples(300))
def test_getters_by_agent_steps_agree_with_lists(told: Told, numpy: bool, name: str, data: st.DataObject) -> None:
    if name == "outputs" and not has_outputs(told):
        return
    episode = told.episode(numpy=numpy)
    items = {agent_id: list(agent.items(name).values()) for agent_id, agent in told.agents.items()}
    hangs = name in ("actions", "rewards", "outputs")
    whole = {
        agent_id: each[:-1] if hangs and told.agents[agent_id].is_acting and not told.agents[agent_id].is_done else each
        for agent_id, each in items.items()
    }
    assert read(episode, name, env_steps=False) == {agent_id: each for agent_id, each in whole.items() if each}
    where = slice(data.draw(st.integers(-12, 12)), data.draw(st.none() | st.integers(-12, 12)))
    parts = {agent_id: each[where] for agent_id, each in items.items()}
    assert read(episode, name, where, env_steps=False) == {agent_id: part for agent_id, part in parts.items() if part}
    for agent_id, each in items.items():
        if each:
            assert read(episode, name, -1, agent_id, env_steps=False) == {agent_id: each[-1]}
        with pytest.raises(EpisodeIndexError, match=f"episode 'e': agent '{agent_id}': index {len(each)}"):
            read(episode, name, len(each), agent_id, env_steps=False)


@given(told=turns(), seams=st.sets(st.integers(0, 8)), numpy=FORMS)
def test_slices_share_out_all_that_the_environment_paid(told: Told, seams: set[int], numpy: bool) -> None:
    episode = told.episode(numpy=numpy)
    bounds = sorted({0, told.length, *(seam for seam in seams if seam < told.length)})
    shares = [episode[start:stop].get_return(include_hanging_rewards=True) for start, stop in pairwise(bounds)]
    paid = sum(reward for step in told.steps for reward in step["rewards"].values())
    assert sum(shares) == pytest.approx(paid)
    assert episode.get_return(include_hanging_rewards=True) == pytest.approx(paid)


@given(told=turns(may_idle=True), numpy=FORMS)
def test_an_agent_is_where_its_own_list_says(told: Told, numpy: bool) -> None:
    episode = told.episode(numpy=numpy)
    episode.validate()
    assert list(episode.agent_episodes) == list(told.agents)
    assert episode.agent_steps() == sum(len(agent.observations) - 1 for agent in told.agents.values())
    stepped = {agent_id for agent_id, agent in told.agents.items() if agent.observations[-1][0] == told.length}
    assert episode.get_agents_that_stepped() == stepped
    assert episode.get_agents_to_act() == {agent_id for agent_id in stepped if not told.agents[agent_id].is_done}
    flags = {agent_id: agent.is_terminated for agent_id, agent in told.agents.items()}
    assert episode.get_terminateds() == {**flags, "__all__": episode.is_terminated}
    assert episode.is_done == told.is_over
