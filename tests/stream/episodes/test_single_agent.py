"""SingleAgentEpisode: the statements of RLlib's episode page, and what that page leaves open."""

from types import SimpleNamespace
from typing import Any, Self, get_type_hints

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollflow import MultiAgentEpisode, SingleAgentEpisode
from rollflow.stream import ColumnError, EpisodeError, EpisodeIndexError
from rollflow.stream.episodes.buffer import LookbackBuffer


def filled(steps: int = 5, id_: str = "e", **last: bool) -> SingleAgentEpisode:
    """Observations 0, 1, 2, …; actions 100, 101, …; rewards 0.5, 1.5, …; one extra output, 0, -1, -2, …"""
    episode = SingleAgentEpisode(id_)
    episode.add_env_reset(0, {"at": 0})
    for t in range(steps):
        flags = last if t == steps - 1 else {}
        episode.add_env_step(t + 1, 100 + t, t + 0.5, {"at": t + 1}, extra_model_outputs={"logp": -t}, **flags)
    return episode


def history_of(lookback: Any) -> SingleAgentEpisode:
    return SingleAgentEpisode("e", observations=[0, 1], actions=[0], rewards=[0.0], len_lookback_buffer=lookback)


def everything(episode: SingleAgentEpisode) -> dict[str, Any]:
    """All that an episode shows, as plain lists, its lookback left out."""
    return {
        "observations": np.asarray(episode.get_observations()).tolist(),
        "infos": list(episode.get_infos()),
        "actions": np.asarray(episode.get_actions()).tolist(),
        "rewards": np.asarray(episode.get_rewards()).tolist(),
        "logp": np.asarray(episode.get_extra_model_outputs("logp")).tolist(),
        "ends": (episode.is_terminated, episode.is_truncated),
        "t": (episode.t_started, episode.t),
        "id": episode.id_,
    }


def test_an_episode_starts_empty_and_grows_step_by_step() -> None:
    episode = SingleAgentEpisode()
    assert (len(episode), episode.is_reset, episode.is_done, episode.is_numpy) == (0, False, False, False)
    assert int(episode.id_, 16) != int(SingleAgentEpisode().id_, 16)
    episode.add_env_reset("obs_0", {"a": 1})
    assert (len(episode), episode.is_reset) == (0, True)
    episode.add_env_step("obs_1", "action", "reward", {"a": 2}, terminated=True)
    assert (len(episode), episode.t, episode.t_started, episode.env_steps(), episode.agent_steps()) == (1, 1, 0, 1, 1)
    assert (episode.is_terminated, episode.is_truncated, episode.is_done) == (True, False, True)
    assert episode.get_observations() == ["obs_0", "obs_1"]
    assert (episode.get_actions(-1), episode.get_rewards(-1), episode.get_infos(0)) == ("action", "reward", {"a": 1})


def test_given_steps_are_history_unless_said_otherwise() -> None:
    data: dict[str, Any] = {"observations": [0, 1, 2, 3], "actions": [1, 2, 3], "rewards": [1.0, 2.0, 3.0]}
    history = SingleAgentEpisode(**data)
    assert (len(history), history.t, history.get_observations()) == (0, 0, [3])
    assert history.get_actions([-1, -3]) == [3, 1]
    some = SingleAgentEpisode(**data, len_lookback_buffer=1, t_started=10)
    assert (len(some), some.t_started, some.t, some.get_actions()) == (2, 10, 12, [2, 3])
    assert SingleAgentEpisode(**data, len_lookback_buffer=99).rewards.lookback == 3
    none = SingleAgentEpisode(**data, len_lookback_buffer=0)
    assert (len(none), none.get_infos()) == (3, [{}, {}, {}, {}])


@pytest.mark.parametrize(
    "data",
    [
        {"observations": [0, 1], "actions": [], "rewards": []},
        {"observations": [0, 1], "actions": [1, 2], "rewards": [1.0]},
        {"observations": [0, 1], "actions": [1], "rewards": [1.0], "infos": [{}]},
        {"observations": [0, 1], "actions": [1], "rewards": [1.0], "extra_model_outputs": {"logp": [1, 2]}},
        {"actions": [1], "rewards": [1.0]},
    ],
)
def test_lengths_that_do_not_fit_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(EpisodeError, match="observations do not go with"):
        SingleAgentEpisode("e", **data)


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda: filled(2).add_env_reset(0), EpisodeError, "add_env_reset at step 2, expected a new episode"),
        (lambda: SingleAgentEpisode("e").add_env_step(1, 0, 0.0), EpisodeError, "add_env_step before add_env_reset"),
        (
            lambda: filled(2, truncated=True).add_env_step(3, 0, 0.0),
            EpisodeError,
            "add_env_step after its end at step 2",
        ),
        (lambda: filled(1).get_extra_model_outputs("x"), KeyError, r"has no extra output 'x'; there are: \['logp'\]"),
        (lambda: filled(1).set_extra_model_outputs(key="x", new_data=[1]), EpisodeError, "has no extra output 'x'"),
        (lambda: history_of(-1), EpisodeError, "len_lookback_buffer is -1, expected >= 0"),
        (lambda: history_of("all"), EpisodeError, "len_lookback_buffer is 'all', expected an int or 'auto'"),
        (lambda: filled(2, terminated=True).cut(), EpisodeError, "cut after its end at step 2"),
        (lambda: filled(2).cut(-1), EpisodeError, "len_lookback_buffer is -1, expected >= 0"),
        (lambda: filled(5)[3], NotImplementedError, r"takes slices such as \[2:5\], not 3"),  # type: ignore[index]
        (lambda: filled(5)[::2], EpisodeError, "slice step is 2, expected 1"),
        (
            lambda: filled(5).slice(slice(2), len_lookback_buffer=-1),
            EpisodeError,
            "len_lookback_buffer is -1, expected",
        ),
    ],
)
def test_what_an_episode_can_not_do_is_refused(call: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"episode 'e'.*{told}"):
        call()


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_extra_output_comes_with_every_step_or_with_none(is_cut: bool) -> None:
    episode = filled(2).cut() if is_cut else filled(2)
    steps = len(episode)
    with pytest.raises(EpisodeError, match=r"extra_model_outputs \[\] at step 2, expected .*\['logp'\]"):
        episode.add_env_step(3, 0, 0.0)
    assert len(episode) == steps
    episode.add_env_step(3, 0, 0.0, extra_model_outputs={"logp": 1})
    episode.validate()


def test_getters_of_all_quantities_follow_one_set_of_rules() -> None:
    episode = filled(5)
    assert episode.get_observations([0, -1]) == [0, 5]
    assert episode.get_infos(slice(-2, None)) == [{"at": 4}, {"at": 5}]
    assert episode.get_actions(slice(1, 3)) == [101, 102]
    assert episode.get_rewards(-1) == 4.5
    assert episode.get_extra_model_outputs("logp", [0, 2]) == [0, -2]
    assert episode.get_rewards(slice(-7, None), fill=0.0) == [0.0, 0.0, 0.5, 1.5, 2.5, 3.5, 4.5]
    with pytest.raises(EpisodeIndexError, match=r"episode 'e': index 5 of 'actions' is outside -5 … 4 \(lookback 0"):
        episode.get_actions(5)


def test_older_names_work() -> None:
    episode = filled(2)
    assert (episode.get_observation(-1), episode.get_action(-1), episode.get_reward(-1, fill=0.0)) == (2, 101, 1.5)
    episode.set_observation(new_value=7, at_index=-1)
    episode.set_action(new_value=8, at_index=0)
    episode.set_reward(new_value=9.0, at_index=1)
    assert (episode.get_observations(-1), episode.get_actions(0), episode.get_rewards(1)) == (7, 8, 9.0)


def test_setters_change_what_getters_give() -> None:
    episode = filled(3)
    episode.set_observations(new_data=[7, 8], at_indices=[0, -1])
    episode.set_actions(new_data=1, at_indices=0)
    episode.set_rewards(new_data=[1.0, 2.0, 3.0])
    episode.set_extra_model_outputs(key="logp", new_data=[9], at_indices=slice(1, 2))
    assert episode.get_observations() == [7, 1, 2, 8]
    assert episode.get_actions() == [1, 101, 102]
    assert episode.get_rewards() == [1.0, 2.0, 3.0]
    assert episode.get_extra_model_outputs("logp") == [0, 9, -2]


def test_what_a_setter_refuses_is_named_and_changes_nothing() -> None:
    episode = filled(3).to_numpy()
    before = everything(episode)
    with pytest.raises(EpisodeIndexError, match="episode 'e': 'rewards': 2 new items for 3 places"):
        episode.set_rewards(new_data=[1.0, 2.0])
    with pytest.raises(EpisodeIndexError, match="episode 'e': index -4 of 'actions' is outside -3 … 2"):
        episode.set_actions(new_data=1, at_indices=-4)
    with pytest.raises(ColumnError, match=r"episode 'e': 'actions': new data is float64\[\], expected int64\[\]"):
        episode.set_actions(new_data=0.5, at_indices=-1)
    assert everything(episode) == before


def test_numpy_form_has_arrays_at_the_leaves_and_infos_stay_dicts() -> None:
    episode = SingleAgentEpisode()
    episode.add_env_reset({"a": np.zeros(2), "b": 0})
    episode.add_env_step({"a": np.ones(2), "b": 1}, 3, 0.5, {"x": 1})
    assert episode.to_numpy() is episode
    assert episode.is_numpy
    observations = episode.get_observations()
    assert observations["a"].tolist() == [[0, 0], [1, 1]]
    assert observations["b"].tolist() == [0, 1]
    assert episode.get_observations(-1)["a"].tolist() == [1, 1]
    assert episode.get_infos() == [{}, {"x": 1}]


def test_an_episode_of_length_0_keeps_its_lists() -> None:
    episode = SingleAgentEpisode()
    episode.add_env_reset(np.zeros(2))
    assert not episode.to_numpy().is_numpy
    assert episode.actions.data == []


def test_a_step_that_does_not_fit_the_arrays_is_refused_whole_and_one_that_does_is_added() -> None:
    episode = filled(2).to_numpy()
    before = everything(episode)
    with pytest.raises(ColumnError, match=r"episode 'e': 'logp': new data is int64\[2\], expected int64\[\]"):
        episode.add_env_step(3, 102, 2.5, extra_model_outputs={"logp": np.array([1, 2])})
    assert everything(episode) == before
    episode.add_env_step(3, 102, 2.5, {"at": 3}, extra_model_outputs={"logp": -2})
    assert everything(episode) == everything(filled(3))


def test_a_first_step_that_is_refused_leaves_no_extra_output() -> None:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(np.zeros(2))
    episode.to_numpy()
    with pytest.raises(ColumnError, match="'observations': new data is"):
        episode.add_env_step(np.zeros(3), 0, 0.0, extra_model_outputs={"logp": 1})
    episode.add_env_step(np.ones(2), 0, 0.0)
    assert (len(episode), episode.extra_model_outputs) == (1, {})


def test_ready_buffers_and_arrays_are_taken_as_they_are() -> None:
    rewards = LookbackBuffer(np.array([1.0, 2.0, 3.0]), 1)
    observations = np.arange(4)
    episode = SingleAgentEpisode(observations=observations, actions=[5, 6, 7], rewards=rewards, t_started=8)
    assert episode.rewards is rewards
    assert np.shares_memory(episode.get_observations(), observations)
    assert (len(episode), episode.t, episode.get_actions(), episode.get_infos()) == (2, 10, [6, 7], [{}, {}, {}])


def test_the_spaces_given_go_to_ready_buffers_that_have_none() -> None:
    space = gym.spaces.Discrete(3)
    own = LookbackBuffer([1], 0, gym.spaces.Discrete(4))
    ready: Any = {"observations": LookbackBuffer([0, 2], 0), "actions": own, "rewards": LookbackBuffer([0.5], 0)}
    episode = SingleAgentEpisode(observation_space=space, action_space=space, **ready)
    assert episode.get_observations(-1, one_hot_discrete=True).tolist() == [0, 0, 1]
    assert episode.get_rewards(1, fill=2).dtype == np.float32
    assert (episode.observation_space, episode.action_space) == (space, own.space)


def test_a_space_set_later_is_what_getters_go_by() -> None:
    episode = filled(2)
    with pytest.raises(ValueError, match="one_hot_discrete on 'actions' needs a space"):
        episode.get_actions(one_hot_discrete=True)
    episode.action_space = gym.spaces.Discrete(2, start=100)
    assert np.asarray(episode.get_actions(one_hot_discrete=True)).tolist() == [[1, 0], [0, 1]]
    episode.observation_space = gym.spaces.Box(0, 9, (), np.int16)
    assert episode.get_observations(9, fill=4).dtype == np.int16


@pytest.mark.parametrize("form", ["list", "numpy"])
def test_a_cut_begins_with_the_last_observation_and_looks_back(form: str) -> None:
    episode = filled(5) if form == "list" else filled(5).to_numpy()
    episode.custom_data["seen"] = [1]
    chunk = episode.cut(len_lookback_buffer=2)
    chunk.custom_data["seen"].append(2)
    assert episode.custom_data == {"seen": [1]}
    assert (chunk.id_, chunk.t_started, chunk.t, len(chunk)) == ("e", 5, 5, 0)
    assert chunk.get_observations(-1) == 5
    assert list(chunk.get_observations([-2, -1])) == [4, 5]
    assert (chunk.get_actions(-1), chunk.get_rewards(-1)) == (104, 4.5)
    assert list(chunk.get_rewards(slice(-5, None), fill=0.0)) == [0.0, 0.0, 0.0, 3.5, 4.5]
    with pytest.raises(EpisodeIndexError):
        chunk.get_actions(-3)
    before = everything(episode)
    chunk.add_env_step(6, 105, 5.5, {"at": 6}, extra_model_outputs={"logp": -5})
    chunk.set_rewards(new_data=0.0, at_indices=-1, neg_index_as_lookback=True)
    assert everything(episode) == before
    assert list(chunk.get_observations(slice(-2, 1), neg_index_as_lookback=True)) == [3, 4, 5]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: filled(2, id_="f"), "can't be joined by a chunk of another, 'f'"),
        (lambda: filled(5)[3:], "ends at step 2, but the chunk to join begins at step 3"),
        (
            lambda: SingleAgentEpisode("e", observations=[9], t_started=2),
            "its last observation at step 2 is not the first",
        ),
        (lambda: SingleAgentEpisode("e", t_started=2), "concat_episode before add_env_reset"),
        (
            lambda: SingleAgentEpisode(
                "e", observations=[2, 3], actions=[0], rewards=[0.0], t_started=2, len_lookback_buffer=0
            ),
            r"the chunk to join has extra outputs \[\], expected \['logp'\]",
        ),
    ],
)
def test_what_does_not_follow_is_not_joined(other: Any, told: str) -> None:
    episode = filled(2)
    before = everything(episode)
    with pytest.raises(EpisodeError, match=f"episode 'e'.* {told}"):
        episode.concat_episode(other())
    assert everything(episode) == before
    with pytest.raises(EpisodeError, match="concat_episode after its end"):
        filled(2, truncated=True).concat_episode(filled(4)[2:])


def test_an_episode_without_steps_takes_over_the_extra_outputs_of_what_joins_it() -> None:
    episode = SingleAgentEpisode("e")
    episode.add_env_reset(0, {"at": 0})
    episode.concat_episode(filled(2))
    assert everything(episode) == everything(filled(2))


def test_a_chunk_of_other_shapes_is_not_joined() -> None:
    episode, other = filled(2).to_numpy(), filled(3)[2:]
    other.extra_model_outputs["logp"].data = [np.zeros(2)]
    before = everything(episode)
    with pytest.raises(ColumnError, match=r"'logp': new data is float64\[2\], expected int64\[\]"):
        episode.concat_episode(other)
    assert everything(episode) == before


def test_observations_that_are_not_a_number_join() -> None:
    episode = SingleAgentEpisode("e", observations=[np.nan, np.nan], actions=[0], rewards=[1.0], len_lookback_buffer=0)
    head = episode[:0]
    head.concat_episode(episode.to_numpy()[0:])
    assert len(head) == 1


def test_a_join_keeps_the_form_of_every_quantity_whatever_the_chunk_that_joins_has() -> None:
    for at in range(4):
        for head, tail in ((filled(3)[:at], filled(4).to_numpy()[at:]), (filled(3).to_numpy()[:at], filled(4)[at:])):
            form = head.is_numpy
            head.concat_episode(tail)
            parts = head.observations, head.actions, head.rewards, head.extra_model_outputs["logp"]
            assert [part.is_numpy for part in parts] == [form] * 4
            assert not head.infos.is_numpy
            assert everything(head) == everything(filled(4))


def test_a_join_leaves_the_chunk_that_joins_as_it_was() -> None:
    head, tail = filled(4)[:2], filled(4)[2:]
    head.custom_data, tail.custom_data = {"a": 1, "b": 1}, {"b": 2}
    head.concat_episode(tail)
    head.add_env_step(5, 104, 4.5, extra_model_outputs={"logp": -4})
    assert head.custom_data == {"a": 1, "b": 2}
    assert everything(tail) == everything(filled(4)[2:])


def test_the_data_dict_has_one_row_per_step() -> None:
    data = filled(3, truncated=True)[1:].get_data_dict()
    assert data["obs"] == [1, 2]
    assert data["infos"] == [{"at": 1}, {"at": 2}]
    assert (data["actions"], data["rewards"], data["logp"]) == ([101, 102], [1.5, 2.5], [-1, -2])
    assert data["terminateds"].tolist() == [False, False]
    assert data["truncateds"].tolist() == [False, True]
    assert data["t"].tolist() == [1, 2]
    assert data["eps_id"].tolist() == ["e", "e"]


def test_the_return_counts_current_rewards_only() -> None:
    assert filled(3).get_return() == 4.5
    assert filled(3)[1:].get_return() == 4.0
    assert filled(3).to_numpy().get_return() == 4.5


def test_the_duration_runs_from_reset_to_newest_step_over_cuts_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("rollflow.stream.episodes.single_agent.time", SimpleNamespace(perf_counter=lambda: now))
    episode = SingleAgentEpisode("e")
    assert episode.get_duration_s() == 0.0
    now = 10.0
    episode.add_env_reset(0)
    now = 11.0
    episode.add_env_step(1, 0, 0.0)
    chunk = episode.cut()
    now = 14.0
    chunk.add_env_step(2, 0, 0.0)
    assert (episode.get_duration_s(), chunk.get_duration_s()) == (1.0, 3.0)
    now = 99.0
    copied = SingleAgentEpisode.from_state(chunk.get_state())
    assert copied.get_duration_s() == 3.0
    copied.add_env_step(3, 0, 0.0)  # the time in storage is not the environment's
    now = 100.0
    copied.add_env_step(4, 0, 0.0)
    assert copied.get_duration_s() == 4.0
    episode.concat_episode(copied)
    assert episode.get_duration_s() == 5.0


forms = st.sampled_from(["list", "numpy"])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 5), forms)
def test_cut_chunks_join_to_the_whole(lengths: list[int], lookback: int, form: str) -> None:
    chunks, chunk, t = [], SingleAgentEpisode("e"), 0
    chunk.add_env_reset(0, {"at": 0})
    for length in lengths:
        for _ in range(length):
            chunk.add_env_step(t + 1, 100 + t, t + 0.5, {"at": t + 1}, extra_model_outputs={"logp": -t})
            t += 1
        chunks.append(chunk)
        chunk = chunk.cut(lookback)
        if form == "numpy":
            chunks[-1].to_numpy()
    whole = chunks[0]
    for chunk in chunks[1:]:
        assert chunk.rewards.lookback == min(lookback, chunk.t_started)
        whole.concat_episode(chunk)
    assert everything(whole) == everything(filled(t))


@given(st.integers(0, 6), st.integers(0, 3), forms, st.booleans())
def test_a_state_gives_an_equal_episode(steps: int, lookback: int, form: str, ends: bool) -> None:
    episode = filled(steps)
    if steps and form == "numpy":
        episode.to_numpy()
    episode = episode.cut(lookback)
    episode.add_env_step(steps + 1, 1, 2.0, {"at": 0}, extra_model_outputs={"logp": 1}, terminated=ends)
    episode.custom_data["x"] = [1]
    copied = SingleAgentEpisode.from_state(episode.get_state())
    assert everything(copied) == everything(episode)
    assert copied.rewards.lookback == episode.rewards.lookback
    assert (copied.custom_data, copied.is_numpy) == (episode.custom_data, episode.is_numpy)
    copied.set_rewards(new_data=9.0, at_indices=-1)
    assert episode.get_rewards(-1) == 2.0


def test_a_state_is_a_copy_and_names_whose_episode_it_is() -> None:
    spaces = {"observation_space": gym.spaces.Discrete(9), "action_space": gym.spaces.Discrete(200)}
    of = {"agent_id": "a", "module_id": "m", "multi_agent_episode_id": "many"}
    episode = SingleAgentEpisode("e", observations=[[0], [1]], actions=[3], rewards=[0.5], **spaces, **of)
    state = episode.get_state()
    copied = SingleAgentEpisode.from_state(state)
    state["buffers"]["observations"]["data"][-1].append(9)
    episode.observations[0].append(9)
    assert copied.get_observations() == [[1]]
    assert {key: getattr(copied, key) for key in (*spaces, *of)} == {**spaces, **of}


@pytest.mark.parametrize("kind", [SingleAgentEpisode, MultiAgentEpisode])
def test_a_slice_has_the_type_of_its_episode(kind: Any) -> None:
    assert get_type_hints(kind.__getitem__)["return"] is Self


bounds = st.none() | st.integers(-9, 9)


@given(st.integers(1, 6), st.integers(0, 4), bounds, bounds, st.none() | st.integers(0, 9))
def test_slices_agree_with_the_steps_counted_by_hand_in_both_forms(
    steps: int, lookback: int, start: int | None, stop: int | None, wanted: int | None
) -> None:
    episode = filled(lookback).cut(lookback)
    for t in range(lookback, lookback + steps):
        episode.add_env_step(t + 1, 100 + t, t + 0.5, {"at": t + 1}, extra_model_outputs={"logp": -t})
    episode.is_truncated = True
    taken = range(lookback, lookback + steps)[start:stop]
    begin = min(taken.start, lookback + steps)
    end = max(begin, taken.stop)
    before = min(lookback if wanted is None else wanted, begin)
    for form in (episode, SingleAgentEpisode.from_state(episode.get_state()).to_numpy()):
        part = form.slice(slice(start, stop), len_lookback_buffer=wanted)
        assert everything(part) == {
            "observations": list(range(begin, end + 1)),
            "infos": [{"at": t} for t in range(begin, end + 1)],
            "actions": [100 + t for t in range(begin, end)],
            "rewards": [t + 0.5 for t in range(begin, end)],
            "logp": [-t for t in range(begin, end)],
            "ends": (False, end == lookback + steps),
            "t": (begin, end),
            "id": "e",
        }
        assert part.rewards.lookback == before
        history = part.get_observations(slice(-before, 0), neg_index_as_lookback=True)
        assert np.asarray(history).tolist() == list(range(begin - before, begin))
        assert part.is_numpy == form.is_numpy
