"""A MultiAgentEpisode, rule by rule: two clocks, hanging actions, getters, cuts, slices and joins."""

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete

from rollflow import MultiAgentEpisode
from rollflow.stream import ColumnError, EpisodeError, EpisodeIndexError


@pytest.fixture
def episode() -> MultiAgentEpisode:
    return pair()


@pytest.fixture
def whole() -> MultiAgentEpisode:
    return gapped()


def step(episode: MultiAgentEpisode, **given: Any) -> None:
    """An env step of which only what is interesting is told."""
    episode.add_env_step(**{"observations": {}, "actions": {}, "rewards": {}, **given})


def gapped(**given: Any) -> MultiAgentEpisode:
    """Three env steps. Agent "a" has an observation at each; "b" at 0 and 2, and acts at 0 and 2; "c" enters at 3.

    env step       0      1      2      3
    a observes     0      1      2      3      acts 10, 11, 12; is paid 1.0 each time
    b observes     100           102           acts 110, and 112, which hangs; is paid 0.5 each time
    c observes                          203    is paid 4.0 at env step 2, before its first observation
    """
    told = columns()
    told["infos"] = [{"b": {"at": 0}}, {}, {"b": {"at": 2}}, {}]
    told["extra_model_outputs"] = [{"a": {"v": -1}, "b": {"v": -2}}, {"a": {"v": -3}}, {"a": {"v": -4}, "b": {"v": -5}}]
    episode = MultiAgentEpisode("e", **given)
    episode.add_env_reset(observations=told["observations"].pop(0), infos=told["infos"].pop(0))
    for items in zip(*told.values(), strict=True):
        episode.add_env_step(**dict(zip(told, items, strict=True)))
    return episode


def columns() -> dict[str, Any]:
    """Return the env steps of `gapped` as columns, as the constructor takes them."""
    return {
        "observations": [{"a": 0, "b": 100}, {"a": 1}, {"a": 2, "b": 102}, {"a": 3, "c": 203}],
        "actions": [{"a": 10, "b": 110}, {"a": 11}, {"a": 12, "b": 112}],
        "rewards": [{"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5, "c": 4.0}],
    }


# The model


def test_agents_know_whose_they_are() -> None:
    modules = {"a": "m0", "b": "m1"}
    asked = []

    def module_of(agent_id: str, episode: MultiAgentEpisode) -> str:
        asked.append((agent_id, episode.id_))
        return modules.get(agent_id, "other")

    episode = gapped(agent_to_module_mapping_fn=module_of, agent_episode_ids={"a": "mine"})
    a = episode.agent_episodes["a"]
    assert (a.id_, a.agent_id, a.module_id, a.multi_agent_episode_id) == ("mine", "a", "m0", "e")
    assert episode.agent_episode_ids == {key: each.id_ for key, each in episode.agent_episodes.items()}
    assert [episode.module_for(agent_id) for agent_id in "abcb"] == ["m0", "m1", "other", "m1"]
    assert sorted(asked) == [("a", "e"), ("b", "e"), ("c", "e")]
    assert MultiAgentEpisode().module_for("a") == "default_policy"
    assert MultiAgentEpisode(agent_module_ids={"a": "m"}).module_for("a") == "m"


def test_an_episode_starts_empty_and_is_reset_once() -> None:
    episode = MultiAgentEpisode()
    assert (len(episode), episode.is_reset, episode.is_done, episode.is_numpy) == (0, False, False, False)
    assert (episode.agent_ids, episode.get_observations()) == (set(), {})
    int(episode.id_, 16)
    with pytest.raises(EpisodeError, match="add_env_step before add_env_reset"):
        step(episode)
    episode.add_env_reset(observations={"a": 0})
    assert (episode.is_reset, episode.agent_ids) == (True, {"a"})
    with pytest.raises(EpisodeError, match="add_env_reset at env step 0, expected a new episode"):
        episode.add_env_reset(observations={"a": 0})


def test_an_agent_that_only_receives_has_no_episode() -> None:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset(observations={"a": 0})
    step(episode, actions={"a": 1}, rewards={"c": 2.0})
    assert episode.agent_ids == {"a"}
    assert (episode.get_return(), episode.get_return(include_hanging_rewards=True)) == (0.0, 2.0)


# The constructor


@pytest.mark.parametrize(
    ("lookback", "length", "observations", "b"),
    [
        ("auto", 0, {"a": [3], "c": [203]}, (0, 1)),
        (0, 3, {"a": [0, 1, 2, 3], "b": [100, 102], "c": [203]}, (1, 0)),
        (1, 2, {"a": [1, 2, 3], "b": [102], "c": [203]}, (0, 1)),
        (9, 0, {"a": [3], "c": [203]}, (0, 1)),
    ],
)
def test_env_steps_given_are_history_as_far_as_said(
    lookback: Any, length: int, observations: dict[str, Any], b: tuple[int, int]
) -> None:
    episode = MultiAgentEpisode(**columns(), len_lookback_buffer=lookback)
    assert len(episode) == length
    assert episode.get_observations() == observations
    agent = episode.agent_episodes["b"]
    assert (len(agent), agent.rewards.lookback) == b
    assert episode.get_actions(slice(-9, None)) == {"a": [10, 11, 12], "b": [110, 112]}


def test_both_clocks_start_where_told() -> None:
    episode = MultiAgentEpisode(**columns(), len_lookback_buffer=1, env_t_started=10, agent_t_started={"a": 7})
    assert (episode.env_t_started, episode.env_t) == (10, 12)
    assert [(each.t_started, each.t) for each in episode.agent_episodes.values()] == [(7, 9), (0, 0), (0, 0)]


def test_an_agent_that_does_not_act_on_an_observation_has_ended_with_it() -> None:
    episode = MultiAgentEpisode(
        observations=[{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1}, {"a": 2}],
        actions=[{"a": 0, "b": 0}, {"a": 0}],
        rewards=[{"a": 1.0, "b": 2.0}, {"a": 1.0}],
        len_lookback_buffer=0,
    )
    b = episode.agent_episodes["b"]
    assert (b.is_terminated, b.get_observations(), b.get_rewards()) == (True, [0, 1], [2.0])
    assert episode.agent_ids == {"a", "b"}  # one observation, and no more: no trace
    assert not episode.is_done


@pytest.mark.parametrize("flags", [{"a": True, "b": True, "__all__": True}, {"__all__": True}, True])
@pytest.mark.parametrize("name", ["terminateds", "truncateds"])
def test_end_flags_given_are_those_of_the_last_env_step(flags: Any, name: str) -> None:
    data: dict[str, Any] = {
        "observations": [{"a": 0, "b": 0}, {"a": 1, "b": 1}],
        "actions": [{"a": 0, "b": 0}],
        "rewards": [{"a": 1.0, "b": 1.0}],
    }
    episode = MultiAgentEpisode(**data, **{name: flags})
    assert getattr(episode, f"get_{name}")() == {"a": True, "b": True, "__all__": True}
    other = "truncateds" if name == "terminateds" else "terminateds"
    assert getattr(episode, f"get_{other}")() == {"a": False, "b": False, "__all__": False}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"observations": [{"a": 0}, {"a": 1}]}, "2 observations do not go with 0 actions, 0 rewards"),
        ({"observations": [{"a": 0}], "infos": []}, "1 observations do not go with 0 actions, 0 rewards, 0 infos"),
        ({"observations": [{"a": 0}], "extra_model_outputs": [{}]}, "0 rewards, 1 extra_model_outputs"),
        ({"actions": [{"a": 0}]}, "data without observations"),
        ({"observations": [{"a": 0}], "len_lookback_buffer": -1}, "len_lookback_buffer is -1, expected >= 0"),
        ({"observations": [{"a": 0}], "len_lookback_buffer": "all"}, "len_lookback_buffer is 'all'"),
    ],
)
def test_what_does_not_fit_together_is_refused(data: dict[str, Any], told: str) -> None:
    with pytest.raises(EpisodeError, match=f"episode 'e': .*{told}"):
        MultiAgentEpisode("e", **data)


def test_observations_alone_may_be_given() -> None:
    episode = MultiAgentEpisode(observations=[{"a": 0, "b": 1}], infos=[{"b": {"n": 1}}])
    assert (episode.get_observations(-1), episode.get_infos(0)) == ({"a": 0, "b": 1}, {"a": {}, "b": {"n": 1}})


# An env step


def pair() -> MultiAgentEpisode:
    episode = MultiAgentEpisode("e")
    episode.add_env_reset(observations={"a": 0, "b": 0})
    return episode


def test_an_observation_and_an_action_are_a_whole_step(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"a": 1, "b": 1}, actions={"a": 5, "b": 6}, rewards={"a": 1.0, "b": 2.0})
    assert (episode.get_actions(), episode.get_rewards()) == ({"a": [5], "b": [6]}, {"a": [1.0], "b": [2.0]})
    with pytest.raises(EpisodeError, match="agent 'b' at env step 1: it acted and has an observation, but no reward"):
        step(episode, observations={"b": 2}, actions={"b": 2})
    assert (len(episode), episode.get_observations(-1)) == (1, {"a": 1, "b": 1})


def test_an_action_without_observation_hangs_with_all_that_belongs_to_it(episode: MultiAgentEpisode) -> None:
    step(episode, actions={"b": 6}, rewards={"b": 1.0}, extra_model_outputs={"b": {"v": 3}})
    assert (len(episode.agent_episodes["b"]), episode.get_actions(-1)) == (0, {"b": 6})
    assert episode.get_extra_model_outputs("v", -1) == {"b": 3}
    step(episode, rewards={"b": 2.0})
    step(episode, observations={"b": 1}, rewards={"b": 4.0}, extra_model_outputs={"a": {"v": 9}})
    b = episode.agent_episodes["b"]
    assert (b.get_actions(), b.get_rewards(), b.get_extra_model_outputs("v")) == ([6], [7.0], [3])
    with pytest.raises(EpisodeError, match="agent 'b' at env step 3: it has an observation, but has not acted since"):
        step(episode, observations={"b": 2}, rewards={"b": 4.0})


ACTED: dict[str, Any] = {"actions": {"b": 6}}
ENDED: dict[str, Any] = {**ACTED, "terminateds": {"b": True}}
MORE: list[dict[str, Any]] = [{name: {"b": 1.0}} for name in ("observations", "actions", "rewards")]


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([ACTED, {"actions": {"b": 7}}], "'b' at env step 1: it acts, but its action at env step 0 still waits"),
        ([{"actions": {"c": 7}}], "'c' at env step 0: it acts before its first observation"),
        ([{**ACTED, "truncateds": {"b": True}}], "it is truncated after an action, expected its last observation"),
        ([ACTED, {"truncateds": {"__all__": True}}], "it is truncated after an action, expected its last observation"),
        *(
            ([ENDED, more], "'b' at env step 1: it ended at env step 1, expected no more data")
            for more in (*MORE, {"infos": {"b": {}}})
        ),
    ],
)
def test_an_agent_that_can_not_take_an_env_step_refuses_it(
    episode: MultiAgentEpisode, steps: list[dict[str, Any]], told: str
) -> None:
    for each in steps[:-1]:
        step(episode, **each)
    with pytest.raises(EpisodeError, match=f"episode 'e': agent .*{told}"):
        step(episode, **steps[-1])
    assert len(episode) == len(steps) - 1


def test_an_agent_in_a_gap_without_an_action_ends_with_what_it_has(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"a": 1}, actions={"a": 1}, rewards={"a": 1.0, "b": 5.0})
    step(episode, observations={"a": 2}, actions={"a": 1}, rewards={"a": 1.0}, terminateds={"b": True})
    b = episode.agent_episodes["b"]
    assert (b.get_observations(), len(b), b.is_terminated) == ([0], 0, True)
    assert episode.get_return(include_hanging_rewards=True) == 2.0


def test_an_end_may_be_told_again_and_with_the_first_observation_leaves_no_trace(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"c": 1}, terminateds={"c": True})
    assert episode.agent_ids == {"a", "b"}
    step(episode, **ENDED)
    step(episode, terminateds={"b": True})
    assert len(episode) == 3


def test_all_ends_every_agent(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"a": 1}, actions={"a": 1, "b": 2}, rewards={"a": 1.0}, terminateds={"__all__": True})
    assert episode.get_terminateds() == {"a": True, "b": True, "__all__": True}
    assert episode.get_truncateds() == {"a": False, "b": False, "__all__": False}
    with pytest.raises(EpisodeError, match="add_env_step after its end at env step 1"):
        step(episode)


@pytest.mark.parametrize("first", ["terminateds", "truncateds"])
@pytest.mark.parametrize("second", ["terminateds", "truncateds"])
def test_an_episode_ends_with_and_as_its_last_agent_does(episode: MultiAgentEpisode, first: str, second: str) -> None:
    both = {"a": 1, "b": 1}
    step(episode, observations=both, actions=both, rewards=both, **{first: {"a": True}})
    assert not episode.is_done
    step(episode, observations={"b": 1}, actions={"b": 1}, rewards={"b": 1}, **{second: {"b": True}})
    assert (episode.is_terminated, episode.is_truncated) == (second == "terminateds", second == "truncateds")


def test_a_step_that_is_refused_adds_nothing() -> None:
    episode = gapped().to_numpy()
    before = repr(episode.get_state())
    fine = {"observations": {"a": 4}, "actions": {"a": 13}, "rewards": {"a": 1.0, "b": 1.0}}
    with pytest.raises(EpisodeError, match=r"agent 'a' at env step 3: .*extra_model_outputs \[\] at step 3, expected"):
        step(episode, **fine)
    fine["extra_model_outputs"] = {"a": {"v": 1}}
    with pytest.raises(ColumnError, match="agent 'a' at env step 3"):
        step(episode, **{**fine, "observations": {"a": [1, 2]}})
    with pytest.raises(EpisodeError, match="agent 'c'"):
        step(episode, **{**fine, "observations": {"a": 4, "c": 5}})
    assert repr(episode.get_state()) == before


def test_extra_outputs_that_change_are_refused_when_the_agent_acts(whole: MultiAgentEpisode) -> None:
    step(whole, observations={"b": 103})
    with pytest.raises(EpisodeError, match=r"agent 'b' at env step 4: .*extra_model_outputs \['w'\] at step 2"):
        step(whole, actions={"b": 113}, extra_model_outputs={"b": {"w": 1}})


# Getters


BY_AGENT = {"env_steps": False}


@pytest.mark.parametrize(
    ("name", "args", "options", "expected"),
    [
        ("observations", (1,), {}, {"a": 1}),
        ("observations", (-1,), BY_AGENT, {"a": 3, "b": 102, "c": 203}),
        *(("observations", (slice(0, 3), b), {}, {"b": [100, 102]}) for b in ("b", ["b"], ("b", "x"), {"b"})),
        ("infos", (2,), {}, {"a": {}, "b": {"at": 2}}),
        ("actions", (-1,), {}, {"a": 12, "b": 112}),  # an action that hangs is at the env step of its observation
        ("actions", (7,), {"fill": -1}, {"a": -1, "b": -1, "c": -1}),
        ("actions", (-1, ["a", "b"]), BY_AGENT, {"a": 12, "b": 112}),
        ("actions", ([0, 5], ["b"]), {"fill": 0, **BY_AGENT}, {"b": [110, 0]}),
        ("extra_model_outputs", ("v", slice(1, None)), {}, {"a": [-3, -4], "b": [-5]}),
        ("extra_model_outputs", ("v", [1]), {"fill": 0}, {"a": [-3], "b": [0], "c": [0]}),
    ],
)
def test_getters_go_by_env_steps_or_by_agents_own_steps(name: str, args: Any, options: Any, expected: Any) -> None:
    assert getattr(gapped(), f"get_{name}")(*args, **options) == expected


def test_an_index_outside_is_refused() -> None:
    for where in (4, -5, [0, 4]):
        with pytest.raises(EpisodeIndexError, match=r"episode 'e': index -?[45] of 'observations' is outside -4 … 3"):
            gapped().get_observations(where)
    with pytest.raises(EpisodeIndexError, match="episode 'e': agent 'c': index -1 of 'actions' is outside"):
        gapped().get_actions(-1, env_steps=False)


def test_return_list_gives_a_dict_for_each_env_step(whole: MultiAgentEpisode) -> None:
    assert whole.get_observations(return_list=True)[:3] == [{"a": 0, "b": 100}, {"a": 1}, {"a": 2, "b": 102}]
    assert whole.get_observations(1, return_list=True) == [{"a": 1}]
    with pytest.raises(ValueError, match="return_list on 'observations' lists env steps"):
        whole.get_observations(return_list=True, env_steps=False)


def test_without_a_key_all_extra_outputs_come(whole: MultiAgentEpisode) -> None:
    assert whole.get_extra_model_outputs() == {"a": {"v": [-1, -3, -4]}, "b": {"v": [-2, -5]}}
    assert whole.get_extra_model_outputs(indices=1) == {"a": {"v": -3}}
    assert whole.get_extra_model_outputs(return_list=True)[1:] == [{"a": {"v": -3}}, {"a": {"v": -4}, "b": {"v": -5}}]
    assert whole.get_extra_model_outputs(env_steps=False) == {"a": {"v": [-1, -3, -4]}, "b": {"v": [-2]}}
    with pytest.raises(KeyError, match=r"episode 'e' has no extra output 'w'; there are: \['v'\]"):
        whole.get_extra_model_outputs("w")
    assert (pair().get_extra_model_outputs(), pair().get_extra_model_outputs(return_list=True)) == ({}, [])


def test_negative_indices_run_into_the_lookback_or_count_from_it() -> None:
    episode = MultiAgentEpisode(**columns(), len_lookback_buffer=2)
    assert episode.get_observations(0) == {"a": 2, "b": 102}
    assert episode.get_observations(-4) == {"a": 0, "b": 100}
    assert episode.get_observations(-1, neg_index_as_lookback=True) == {"a": 1}
    assert episode.get_actions(slice(-2, 0), neg_index_as_lookback=True) == {"a": [10, 11], "b": [110]}
    with pytest.raises(EpisodeIndexError):
        episode.get_observations(-3, neg_index_as_lookback=True)


def test_one_hot_and_fill_go_by_the_agent_s_space() -> None:
    spaces = {"a": Discrete(3), "b": Discrete(2)}
    episode = MultiAgentEpisode(observation_space=Dict(spaces), action_space=spaces)
    episode.add_env_reset(observations={"a": 2, "b": 1})
    step(episode, observations={"a": 0}, actions={"a": 1, "b": 0}, rewards={"a": 1.0})
    assert episode.agent_episodes["b"].observation_space == Discrete(2)
    answer = episode.get_observations(slice(0, 2), one_hot_discrete=True, fill=0)
    assert [vector.tolist() for vector in answer["a"]] == [[0, 0, 1], [1, 0, 0]]
    assert [vector.tolist() for vector in answer["b"]] == [[0, 1], [0, 0]]
    assert episode.get_actions(-1, "b", one_hot_discrete=True)["b"].tolist() == [1, 0]
    with pytest.raises(ValueError, match="one_hot_discrete on 'observations' needs a space"):
        gapped().get_observations(one_hot_discrete=True)


def test_an_episode_of_arrays_goes_on_as_arrays() -> None:
    episode = pair().to_numpy()
    step(episode, actions={"b": 5}, rewards={"b": 1.0})
    assert isinstance(episode.get_actions()["b"], np.ndarray)
    step(episode, observations={"b": 1, "c": 7})
    assert episode.agent_episodes["b"].is_numpy
    assert isinstance(episode.get_observations()["c"], np.ndarray)
    assert gapped().to_numpy()[1:3].is_numpy


def test_rewards_may_be_vectors(episode: MultiAgentEpisode) -> None:
    one = np.ones(2)
    step(episode, observations={"a": 1, "b": 1}, actions={"a": 5, "b": 6}, rewards={"a": one, "b": one})
    episode.to_numpy()
    step(episode, observations={"a": 2}, actions={"a": 5, "b": 6}, rewards={"a": one, "b": one})
    step(episode, observations={"b": 2}, rewards={"b": one})
    assert episode.agent_episodes["b"].get_rewards().tolist() == [[1, 1], [2, 2]]


# Setters


def test_setters_replace_at_agents_own_steps(whole: MultiAgentEpisode) -> None:
    whole.set_observations(new_data={"a": 7, "b": 8}, at_indices=-1)
    whole.set_actions(new_data={"b": [1]})
    whole.set_rewards(new_data={"a": [5.0, 6.0]}, at_indices=slice(0, 2))
    whole.set_extra_model_outputs(key="v", new_data={"b": 9}, at_indices=0)
    assert whole.get_observations(env_steps=False) == {"a": [0, 1, 2, 7], "b": [100, 8], "c": [203]}
    assert whole.get_actions(0) == {"a": 10, "b": 1}
    assert whole.get_rewards(slice(0, 2)) == {"a": [5.0, 6.0], "b": [1.0]}
    assert whole.get_extra_model_outputs("v", 0) == {"a": -1, "b": 9}
    with pytest.raises(KeyError, match=r"episode 'e' has no agent 'x'; there are: \['a', 'b', 'c'\]"):
        whole.set_rewards(new_data={"a": [0.0, 0.0, 0.0], "x": 1.0})
    assert whole.get_rewards(0)["a"] == 5.0


def test_a_reward_that_was_set_anew_stays_whole_when_its_step_is_sliced(whole: MultiAgentEpisode) -> None:
    whole.set_rewards(new_data={"b": 8.0}, at_indices=0)
    head, tail = whole[:1], whole[1:]
    assert head.get_rewards(-1) == {"a": 1.0, "b": 8.0}
    assert tail.get_return(include_hanging_rewards=True) == 2.0 + 0.5 + 4.0
    head.concat_episode(tail)
    assert head.agent_episodes["b"].get_rewards() == [8.0]


# Chunks


def test_a_cut_chunk_begins_with_the_last_env_step(whole: MultiAgentEpisode) -> None:
    chunk = whole.cut()
    assert (len(chunk), chunk.id_, chunk.env_t_started, chunk.env_t) == (0, "e", 3, 3)
    assert chunk.get_observations() == {"a": [3], "c": [203]}
    assert (chunk.agent_episodes["a"].t_started, chunk.agent_episodes["c"].t_started) == (3, 0)
    assert chunk.agent_episode_ids == whole.agent_episode_ids
    step(chunk, observations={"a": 4}, actions={"a": 13}, rewards={"a": 1.0}, extra_model_outputs={"a": {"v": 0}})
    assert (len(whole), whole.get_observations(-1)) == (3, {"a": 3, "c": 203})


def test_the_lookback_grows_for_an_action_that_hangs() -> None:
    chunk = gapped().cut()
    assert chunk.get_observations(-2) == {"a": 2, "b": 102}  # one env step, where none was asked for
    assert chunk.get_actions(-1) == {"a": 12, "b": 112}
    step(chunk, observations={"b": 104}, rewards={"b": 0.25})
    b = chunk.agent_episodes["b"]
    assert (b.t_started, b.t, b.get_observations()) == (1, 2, [102, 104])
    assert (b.get_actions(), b.get_rewards()) == ([112], [0.75])
    assert gapped().cut(9).get_observations(-4) == {"a": 0, "b": 100}


def test_an_agent_in_a_gap_that_has_not_acted_begins_anew_after_a_cut(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"a": 1}, actions={"a": 1}, rewards={"a": 1.0, "b": 2.0})
    chunk = episode.cut(5)
    assert (chunk.agent_ids, chunk.agent_episode_ids["b"]) == ({"a"}, episode.agent_episode_ids["b"])
    step(chunk, rewards={"b": 4.0})
    step(chunk, observations={"b": 7}, rewards={"b": 8.0})
    b = chunk.agent_episodes["b"]
    assert (b.t_started, b.t, b.get_observations(), b.id_) == (0, 0, [7], episode.agent_episode_ids["b"])
    assert (chunk.get_return(), chunk.get_return(include_hanging_rewards=True)) == (0.0, 14.0)


def test_agents_that_are_done_do_not_come_along(episode: MultiAgentEpisode) -> None:
    step(episode, actions={"b": 6}, terminateds={"b": True})
    assert episode.cut(3).agent_ids == set()  # "a" is in a gap
    step(episode, terminateds={"__all__": True})
    with pytest.raises(EpisodeError, match="episode 'e': cut after its end at env step 2"):
        episode.cut()
    with pytest.raises(EpisodeError, match="len_lookback_buffer is -1"):
        gapped().cut(-1)


def test_custom_data_is_copied_along(whole: MultiAgentEpisode) -> None:
    whole.custom_data["k"] = [1]
    chunk, part = whole.cut(), whole[1:2]
    whole.custom_data["k"].append(2)
    assert (chunk.custom_data, part.custom_data) == ({"k": [1]}, {"k": [1]})


def test_a_slice_ends_in_a_gap_with_what_has_come_until_then() -> None:
    part = gapped()[0:1]
    assert (len(part), part.get_observations()) == (1, {"a": [0, 1], "b": [100]})
    assert part.get_actions() == {"a": [10], "b": [110]}
    assert part.get_rewards() == {"a": [1.0], "b": [0.5]}
    assert part.get_infos() == {"a": [{}, {}], "b": [{"at": 0}]}


def test_a_slice_starts_an_agent_with_its_first_observation_inside() -> None:
    part = gapped()[1:]
    assert (part.env_t_started, part.env_t) == (1, 3)
    clocks = {key: (each.t_started, each.t) for key, each in part.agent_episodes.items()}
    assert clocks == {"a": (1, 3), "b": (1, 1), "c": (0, 0)}
    assert part.get_observations() == {"a": [1, 2, 3], "b": [102], "c": [203]}


def test_bounds_of_a_slice_are_clipped(whole: MultiAgentEpisode) -> None:
    assert (len(whole[100:100]), whole[100:100].get_observations()) == (0, {"a": [3], "c": [203]})
    assert (len(whole[-2:]), len(whole[:-9]), len(whole[2:1])) == (2, 0, 0)
    with pytest.raises(NotImplementedError, match="slice step is 2, expected 1"):
        whole[::2]
    with pytest.raises(NotImplementedError, match=r"episode 'e' takes slices such as \[2:5\], not 1"):
        whole[1]  # type: ignore[index]


def test_a_slice_has_lookback_as_its_parent_or_as_asked_for() -> None:
    part = gapped().slice(slice(2, 3), len_lookback_buffer=1)
    assert (len(part), part.get_observations(-3)) == (1, {"a": 1})
    assert (part.agent_episodes["a"].t_started, part.agent_episodes["a"].rewards.lookback) == (2, 1)
    parent = MultiAgentEpisode(**columns(), len_lookback_buffer=1)
    assert parent[1:].get_observations(-3) == {"a": 1}
    assert parent.slice(slice(0, 1), len_lookback_buffer=9).get_observations(-3) == {"a": 0, "b": 100}
    with pytest.raises(EpisodeError, match="len_lookback_buffer is -2"):
        parent.slice(slice(0, 1), len_lookback_buffer=-2)


def test_an_agent_that_ended_is_in_the_slice_in_which_it_ended(episode: MultiAgentEpisode) -> None:
    both = {"a": 1, "b": 1}
    step(episode, observations=both, actions=both, rewards=both, terminateds={"b": True})
    step(episode, observations={"a": 2}, actions={"a": 2}, rewards={"a": 2}, terminateds={"a": True})
    assert episode[:1].get_terminateds() == {"a": False, "b": True, "__all__": False}
    assert episode[1:].get_terminateds() == {"a": True, "__all__": True}


def test_only_the_next_chunk_of_the_same_episode_joins(whole: MultiAgentEpisode) -> None:
    with pytest.raises(EpisodeError, match="episode 'e': can't be joined by a chunk of another, 'other'"):
        whole.concat_episode(MultiAgentEpisode("other"))
    with pytest.raises(EpisodeError, match="it ends at env step 3, the chunk to join begins at 1"):
        whole.concat_episode(whole[1:])
    with pytest.raises(EpisodeError, match="before add_env_reset"):
        MultiAgentEpisode("e").concat_episode(MultiAgentEpisode("e"))
    chunk = whole.cut()
    step(whole, terminateds={"__all__": True})
    with pytest.raises(EpisodeError, match="concat_episode after its end at env step 4"):
        whole.concat_episode(chunk)


def test_agents_whose_parts_do_not_meet_leave_everything_as_it_was(episode: MultiAgentEpisode) -> None:
    step(episode, observations={"a": 1}, actions={"a": 1}, rewards={"a": 1.0})
    chunk = episode.cut()
    step(chunk, observations={"a": 2, "b": 5}, actions={"a": 1}, rewards={"a": 1.0})
    told = r"episode 'e': agent 'b': the chunk to join .* has not acted since its observation at env step 0"
    with pytest.raises(EpisodeError, match=told):
        episode.concat_episode(chunk)
    assert (len(episode), len(episode.agent_episodes["a"])) == (1, 1)


def test_a_chunk_joins_with_its_flags_and_its_custom_data(whole: MultiAgentEpisode) -> None:
    chunk = whole.cut()
    chunk.custom_data["k"] = 1
    step(chunk, observations={"a": 4, "b": 104, "c": 204}, actions={"a": 1, "c": 1}, rewards={"a": 1.0, "c": 1.0},
         extra_model_outputs={"a": {"v": 0}}, truncateds={"__all__": True})  # fmt: skip
    whole.concat_episode(chunk)
    assert (whole.is_truncated, whole.is_terminated, whole.custom_data) == (True, False, {"k": 1})
    assert whole.get_truncateds() == {"a": True, "b": True, "c": True, "__all__": True}
    assert whole.agent_episodes["b"].get_rewards() == [1.0, 0.5]


# State


def test_a_state_has_everything_but_the_mapping_function() -> None:
    spaces = {"a": Discrete(20)}
    episode = gapped(agent_module_ids={"a": "m"}, observation_space=spaces)
    episode.custom_data["k"] = 1
    twin = MultiAgentEpisode.from_state(episode.get_state(), agent_to_module_mapping_fn=lambda *_: "new")
    assert (twin.id_, twin.module_for("a"), twin.module_for("z")) == ("e", "m", "new")
    assert (twin.observation_space, twin.custom_data) == (spaces, {"k": 1})
    assert twin.get_duration_s() == episode.get_duration_s() > 0
    step(twin, observations={"b": 104}, rewards={"b": 1.0})
    assert twin.agent_episodes["b"].get_rewards() == [1.0, 1.5]
    assert len(episode.agent_episodes["b"]) == 1


def test_data_added_past_the_episode_are_found_by_validate(whole: MultiAgentEpisode) -> None:
    whole.validate()
    whole.agent_episodes["c"].add_env_step(1, 1, 1.0)
    told = "episode 'e': agent 'c': its own episode has 2 observations, expected those of"
    with pytest.raises(EpisodeError, match=told):
        whole.validate()


def test_an_episode_tells_what_it_is() -> None:
    assert repr(gapped()) == "<MultiAgentEpisode 'e': env steps 0 to 3, ongoing, lookback 0, agents ['a', 'b', 'c']>"
