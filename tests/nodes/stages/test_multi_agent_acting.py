"""Acting on multi-agent episodes: what each module sees of the agents that are to act."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn_plays import ACTED, ACTIONS, OBSERVATIONS, OBSERVED, all_played, alone, modules, played
from drawn_turns import Told, turns
from gymnasium import spaces
from hypothesis import given, settings, strategies as st
from piece_forms import equal
from property_examples import examples

from rollflow import ConnectorV2, MultiAgentEpisode, SingleAgentEpisode, nodes
from rollflow.nodes import EnvToModulePipeline
from rollflow.stream import ConnectorError

plays = st.lists(turns(), min_size=1, max_size=3)


class Doubled(nodes.SingleAgentObservationPreprocessor):
    def preprocess(self, observation: Any, episode: Any) -> Any:
        return observation * 2 + len(episode)


PIECES: dict[str, Callable[[bool], ConnectorV2]] = {
    "as they are": lambda several: nodes.LambdaConnector(lambda batch: batch),
    "flat": lambda several: nodes.FlattenObservations(multi_agent=several),
    "with earlier steps": lambda several: nodes.PrevActionsPrevRewards(multi_agent=several, n_prev_actions=2),
    "stacked": lambda several: nodes.FrameStacking(multi_agent=several, num_frames=3),
    "doubled": lambda several: Doubled(),
}


def forward_batch(piece: list[ConnectorV2], episodes: list[Any], module: Any, several: bool, **given_: Any) -> Any:
    where = (OBSERVATIONS, ACTIONS) if several else (OBSERVED, ACTED)
    pipeline = EnvToModulePipeline.default(*where, piece, multi_agent=several, **given_)
    return pipeline(rl_module=module, episodes=episodes, explore=True)


def to_act(episodes: list[MultiAgentEpisode], module: str) -> list[SingleAgentEpisode]:
    agents = [
        each
        for episode in episodes
        for agent_id, each in episode.agent_episodes.items()
        if agent_id in episode.get_agents_to_act()
    ]
    return [alone(each) for each in agents if each.module_id == module]


@pytest.mark.parametrize("name", PIECES)
@given(tolds=plays, m=st.booleans(), stateful=st.booleans())
@settings(max_examples=examples(40))
def test_each_module_sees_what_its_agents_alone_show(name: str, tolds: list[Told], m: bool, stateful: bool) -> None:
    episodes, rl_modules = all_played(tolds), modules(m=m and stateful)
    expected = {
        module: forward_batch([PIECES[name](False)], theirs, rl_modules[module], several=False, stateful=stateful)
        for module in ("m", "n")
        if (theirs := to_act(episodes, module))
    }
    made = forward_batch([PIECES[name](True)], episodes, rl_modules, several=True, stateful=stateful)
    assert made.keys() == expected.keys()
    for module in made:
        equal(made[module], expected[module])


@given(tolds=plays, times=st.integers(1, 2))
@settings(max_examples=examples(40))
def test_every_agent_has_a_filter_of_its_own(tolds: list[Told], times: int) -> None:
    piece = nodes.MeanStdFilter(OBSERVATIONS, ACTIONS, multi_agent=True)
    one_by_one = {agent_id: nodes.MeanStdFilter(OBSERVED, ACTED) for agent_id in "abc"}
    for _ in range(times):
        episodes = all_played(tolds)
        stepped = [
            each
            for episode in episodes
            for agent_id, each in episode.agent_episodes.items()
            if agent_id in episode.get_agents_that_stepped()
        ]
        before = [each.get_observations(-1) for each in stepped]
        piece(rl_module=None, batch={}, episodes=episodes)
        for agent_id, filter_ in one_by_one.items():
            pairs = [(each, seen) for each, seen in zip(stepped, before, strict=True) if each.agent_id == agent_id]
            theirs = [SingleAgentEpisode(observations=[seen]) for _, seen in pairs]
            filter_(rl_module=None, batch={}, episodes=theirs)
            for (each, _), expected in zip(pairs, theirs, strict=True):
                np.testing.assert_array_equal(each.get_observations(-1), expected.get_observations(-1))
                assert each.observation_space == filter_.observation_space
            assert piece.of_agent(agent_id).count == filter_.count


def numbers(**seen: list[float]) -> list[MultiAgentEpisode]:
    """Episodes of one reset each: agent id -> its observations, episode by episode."""
    count = max(map(len, seen.values()))
    episodes = [MultiAgentEpisode(f"e{place}") for place in range(count)]
    for place, episode in enumerate(episodes):
        observed = {agent_id: np.array([each[place]]) for agent_id, each in seen.items() if place < len(each)}
        episode.add_env_reset(observations=observed)
    return episodes


NUMBERS = spaces.Dict(dict.fromkeys("ab", spaces.Box(-np.inf, np.inf, (1,), np.float64)))


def filtering() -> nodes.MeanStdFilter:
    return nodes.MeanStdFilter(NUMBERS, None, multi_agent=True)


def test_filters_of_agents_merge_agent_by_agent() -> None:
    one, other, whole = filtering(), filtering(), filtering()
    one(rl_module=None, batch={}, episodes=numbers(a=[1.0, 2.0], b=[10.0]))
    other(rl_module=None, batch={}, episodes=numbers(a=[6.0]))
    states = [one.get_state(), other.get_state()]
    assert [sorted(state) for state in states] == [["a", "b"], ["a"]]
    whole.set_state(whole.merge_states(states))
    assert (whole.count, whole.of_agent("a").count, whole.of_agent("a").mean.tolist()) == (4, 3, [3.0])
    assert whole.of_agent("b").mean.tolist() == [10.0]
    copied = copy.copy(whole)
    whole.reset_state()
    assert (whole.get_state(), copied.of_agent("a").count) == ({}, 3)
    with pytest.raises(ConnectorError, match="no filter for agent 'space': the observation space is by agents a, b"):
        whole.set_state(states[0]["a"] | {"space": None})
    with pytest.raises(ConnectorError, match=r"a filter for each agent, expected of_agent\(agent id\).mean"):
        _ = whole.mean
    with pytest.raises(ConnectorError, match=r"observation space Box.*, expected a Dict by agent ids"):
        nodes.MeanStdFilter(OBSERVED, ACTED, multi_agent=True).observation_space  # noqa: B018
    with pytest.raises(ConnectorError, match=r"agent 'b': MeanStdFilter: number 0 .* is nan"):
        whole(rl_module=None, batch={}, episodes=numbers(b=[np.nan]))


def test_options_of_a_filter_hold_for_all_agents() -> None:
    piece = filtering()
    piece(rl_module=None, batch={}, episodes=numbers(a=[1.0, 3.0]))
    piece.update_stats, piece.de_std_to_one = False, False
    episodes = numbers(a=[5.0])
    piece(rl_module=None, batch={}, episodes=episodes)
    assert episodes[0].get_observations(-1)["a"].tolist() == [3.0]
    assert piece.count == 2


MIXED = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-9.0, 9.0, (2,), np.float32)})
MIXED_ACTIONS = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1.0, 1.0, (1,), np.float32)})


def mixed() -> MultiAgentEpisode:
    """Agent "a" has acted, agent "b" has just come."""
    episode = MultiAgentEpisode("e", observation_space=MIXED, action_space=MIXED_ACTIONS)
    episode.add_env_reset(observations={"a": 1})
    episode.add_env_step({"a": 2, "b": np.array([3.0, 4.0], np.float32)}, {"a": 1}, {"a": 0.5})
    return episode


@pytest.mark.parametrize(
    ("piece", "seen", "space"),
    [
        (
            nodes.FlattenObservations(MIXED, MIXED_ACTIONS, multi_agent=True),
            [0, 0, 1],
            spaces.Box(-np.inf, np.inf, (3,)),
        ),
        (nodes.FlattenObservations(MIXED, MIXED_ACTIONS, multi_agent=True, agent_ids=["b"]), 2, MIXED["a"]),
        (nodes.OneHotObservations(MIXED, MIXED_ACTIONS), [0, 0, 1], spaces.Box(0.0, 1.0, (3,))),
    ],
    ids=["flat", "flat of some", "one-hot"],
)
def test_observations_of_agents_of_different_spaces_are_made_each_in_its_own(
    piece: ConnectorV2, seen: Any, space: spaces.Space[Any]
) -> None:
    episode = mixed()
    piece(rl_module=None, batch={}, episodes=[episode])
    assert {key: np.asarray(each).tolist() for key, each in episode.get_observations(-1).items()} == {
        "a": seen,
        "b": [3, 4],
    }
    assert piece.observation_space["a"] == episode.agent_episodes["a"].observation_space == space


def test_earlier_actions_are_in_each_agents_own_action_space() -> None:
    piece, episode = nodes.PrevActionsPrevRewards(MIXED, MIXED_ACTIONS, multi_agent=True), mixed()
    piece(rl_module=None, batch={}, episodes=[episode])
    seen = episode.get_observations(-1)
    assert (seen["a"]["prev_n_actions"].tolist(), seen["a"]["prev_n_rewards"].tolist()) == ([0.0, 1.0], [0.5])
    assert (seen["b"]["prev_n_actions"].tolist(), seen["b"]["prev_n_rewards"].tolist()) == ([0.0], [0.0])
    assert all(piece.observation_space[agent_id].contains(seen[agent_id]) for agent_id in "ab")


def test_observations_of_the_batch_are_written_to_the_agents_that_stepped() -> None:
    episode = mixed()
    episode.add_env_step({"a": 0}, {"a": 0}, {"a": 0.0})
    piece, key = nodes.WriteObservationsToEpisodes(), ("e", "a", "default_policy")
    piece(rl_module=None, batch={"obs": {key: [7]}}, episodes=[episode])
    assert episode.get_observations(-1) == {"a": 7}
    with pytest.raises(ConnectorError, match="has 2 items, expected 1: one for each episode, or for each agent"):
        piece(rl_module=None, batch={"obs": [1, 2]}, episodes=[episode])


class Relative(nodes.MultiAgentObservationPreprocessor):
    """Each agent sees how much more it has than all have."""

    def recompute_output_observation_space(self, observations: Any, actions: Any) -> Any:
        return spaces.Dict(dict.fromkeys("abc", spaces.Box(-99.0, 99.0, (1,))))

    def preprocess(self, observations: Any, episode: Any) -> Any:
        total = sum(observations.values())
        return {agent_id: each - total for agent_id, each in observations.items() if agent_id != "c"}


def test_a_preprocessor_sees_what_all_agents_observed_at_once() -> None:
    piece = Relative(NUMBERS, None)
    episodes = numbers(a=[1.0, 2.0], b=[10.0], c=[5.0])
    batch = {"there": 1}
    assert piece(rl_module=None, batch=batch, episodes=episodes) is batch
    seen = [{key: each.tolist() for key, each in episode.get_observations(-1).items()} for episode in episodes]
    assert seen == [{"a": [-15.0], "b": [-6.0], "c": [5.0]}, {"a": [0.0]}]
    assert episodes[0].observation_space == piece.observation_space
    assert episodes[0].agent_episodes["b"].observation_space == piece.observation_space["b"]


class Talkative(nodes.MultiAgentObservationPreprocessor):
    def preprocess(self, observations: Any, episode: Any) -> Any:
        return {**observations, "b": np.zeros(1)}


def test_a_preprocessor_that_invents_observations_is_refused() -> None:
    with pytest.raises(ConnectorError, match="observation of agent 'b' of episode 'e0' at env step 0, expected only"):
        Talkative()(rl_module=None, batch={}, episodes=numbers(a=[1.0]))
    with pytest.raises(ConnectorError, match="episode 'x' is of a single agent, expected several"):
        Talkative()(rl_module=None, batch={}, episodes=[SingleAgentEpisode("x", observations=[1])])


def test_a_space_that_all_agents_share_need_not_be_by_agents() -> None:
    episode = numbers(a=[1.0], b=[2.0])[0]
    shared = spaces.Box(-9.0, 9.0, (1,))
    Talkative(shared, None)(rl_module=None, batch={}, episodes=[episode])
    assert episode.observation_space == {"a": shared, "b": shared}


# The iterator


def agents(iterated: Any) -> list[Any]:
    return [each.agent_id for each in iterated]


def three() -> list[Any]:
    """Agent "b" in a gap, a single agent's episode, and agent "a" done."""
    told = Told()
    told.reset(["b", "a"])
    told.go_on({"a": (True, False, True, ""), "b": (False, False, True, "")})
    done = Told()
    done.reset(["a", "b"])
    done.go_on({"a": (True, False, True, "terminated"), "b": (True, False, True, "")})
    return [played(told, "e0"), SingleAgentEpisode("x", observations=[0]), played(done, "e1")]


def test_agents_come_in_the_order_of_their_first_observations() -> None:
    iterate = ConnectorV2.single_agent_episode_iterator
    assert agents(iterate(three())) == ["a", None, "a", "b"]
    assert agents(iterate(three(), agents_that_stepped_only=False)) == ["b", "a", None, "a", "b"]


def test_items_are_paired_with_agents_by_key_or_one_by_one() -> None:
    iterate, episodes = ConnectorV2.single_agent_episode_iterator, three()
    column = {("e1", "b", "n"): [4], ("e0", "a", "m"): [1], ("x",): [2], ("e1", "a", "m"): [3]}
    assert [item for _, item in iterate(episodes, zip_with_batch_column=column)] == [1, 2, 3, 4]
    assert [item for _, item in iterate(episodes, zip_with_batch_column=[5, 6, 7, 8])] == [5, 6, 7, 8]
    del column["e1", "b", "n"]
    with pytest.raises(ValueError, match=r"0 items for episode \('e1', 'b', 'n'\), expected one"):
        list(iterate(episodes, zip_with_batch_column=column))
    with pytest.raises(ValueError, match="has 3 items, expected one for each of 4 episodes"):
        list(iterate(episodes, zip_with_batch_column=[5, 6, 7]))


def test_single_agents_beside_several_are_the_default_modules() -> None:
    episodes = three()
    episodes[1] = SingleAgentEpisode("x", observations=[np.zeros(2, np.float32)])
    batch = forward_batch([], episodes, {**modules(), "default_policy": modules()["m"]}, several=True, stateful=True)
    assert {module: len(columns["obs"]) for module, columns in batch.items()} == {"m": 1, "default_policy": 1, "n": 1}


def test_spaces_go_from_agents_to_modules_with_the_mapping() -> None:
    piece = nodes.AgentToModuleMapping(
        MIXED, MIXED_ACTIONS, agent_to_module_mapping_fn=lambda agent_id, _: f"{agent_id}!"
    )
    assert piece.observation_space == spaces.Dict({"a!": MIXED["a"], "b!": MIXED["b"]})
    assert piece.action_space == spaces.Dict({"a!": MIXED_ACTIONS["a"], "b!": MIXED_ACTIONS["b"]})
    assert nodes.AgentToModuleMapping(MIXED, MIXED_ACTIONS).observation_space == MIXED


class Scripted:
    framework = None


def test_tensors_are_made_for_modules_that_take_them() -> None:

    batch = forward_batch([], three()[2:], {"m": Scripted(), "n": Scripted()}, several=True)
    assert isinstance(batch["n"]["obs"], np.ndarray)
    infos = {"n": {"infos": [{"seen": np.zeros(1)}], "obs": np.zeros(1)}}
    made = nodes.NumpyToTensor()(
        rl_module=modules(), batch=infos, episodes=[], shared_data={"memorized_map_structure": {"n": [("e1", "b")]}}
    )
    assert isinstance(made["n"]["infos"][0]["seen"], np.ndarray)
