"""Sessions of a policy: what each remembers, and what is refused."""

from typing import Any

import numpy as np
import pytest
from drawn_policies import SPACES

from rollflow import ConnectorV2, Policy
from rollflow.nodes import DefaultModule, FlattenObservations, LambdaConnector, PrevActionsPrevRewards, RandomModule
from rollflow.nodes.policies.policy import has_memory
from rollflow.stream import ColumnError, PolicyError

ITEM = np.ones(3, np.float32)


def policy_with(*pieces: ConnectorV2) -> Policy:
    """Policy with a random module behind these pieces."""
    return Policy(RandomModule, pieces, **SPACES)


def counting() -> tuple[Policy, list[list[tuple[str, int]]]]:
    """A policy, and what each pass has seen: the id and the length of every episode."""
    seen: list[list[tuple[str, int]]] = []

    def count(episodes: Any) -> None:
        seen.append([(episode.id_, episode.t) for episode in episodes])

    return policy_with(LambdaConnector(count, lookback=1)), seen


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        (["act a", "act b", "act a", "act b c a"], [[("b/0", 0)], [("a/0", 1)], [("b/0", 1), ("c/0", 0), ("a/0", 2)]]),
        (["act a b", "act a b", "reset b", "act a b", "act b"], [[("a/0", 2), ("b/1", 0)], [("b/1", 1)]]),
        # Alone, and so does the other one.
        (["act a b", "act a b", "reset b", "act b", "act a"], [[("b/1", 0)], [("a/0", 2)]]),
        (["act a", "act b", "forget a", "act a"], [[("a/0", 0)]]),
        (["act a"] * 100, [[("a/0", step)] for step in range(100)]),
    ],
    ids=["company", "reset", "reset alone", "forgotten", "long"],
)
def test_each_session_has_an_episode_of_its_own(calls: list[str], expected: list[list[tuple[str, int]]]) -> None:
    policy, seen = counting()
    for verb, *ids in map(str.split, calls):
        if verb == "act":
            policy.act_batch(np.stack([ITEM] * len(ids)), sessions=ids)
        else:
            getattr(policy, verb)(*ids)
        assert set(policy.sessions) >= set(ids) or verb == "forget"
    assert seen[-len(expected) :] == expected


def test_an_observation_may_be_a_list() -> None:
    policy = Policy(DefaultModule, **SPACES)
    observation = [0.5, -1.0, 2.0]
    assert policy.act(observation) == policy.act(np.array(observation, np.float32))
    with pytest.raises(ColumnError, match=r"got float32\[1, 2\], expected float32\[1, 3\]"):
        policy.act([0.5, 1.0])


def test_infos_come_to_the_pieces_and_stay_with_their_session() -> None:
    seen: list[list[Any]] = []

    def look(episodes: Any) -> None:
        seen.append(
            [episode.get_infos([-2, -1], fill=None) if episode.t else episode.get_infos(-1) for episode in episodes]
        )

    policy = policy_with(LambdaConnector(look, lookback=2))
    two = np.stack([ITEM] * 2)
    policy.act_batch(two, sessions=["a", "b"], infos=[{"n": 1}, {"n": 2}])
    policy.act(ITEM, session="b", info={"n": 3})
    policy.act_batch(two, sessions=["b", "a"], infos=[{"n": 4}, {"m": 5}])
    policy.act_batch(two, sessions=["a", "b"])
    assert seen == [
        [{"n": 1}, {"n": 2}],
        [[{"n": 2}, {"n": 3}]],
        [[{"n": 3}, {"n": 4}], [{"n": 1}, {"m": 5}]],
        [[{"m": 5}, {}], [{"n": 4}, {}]],
    ]
    with pytest.raises(PolicyError, match="1 infos for 2 sessions"):
        policy.act_batch(two, infos=[{}])


def test_an_observation_outside_its_space_changes_nothing() -> None:
    policy, seen = counting()
    policy.act(ITEM)
    with pytest.raises(ColumnError, match=r"\[1, 2\]"):
        policy.act(np.ones(2, np.float32))
    with pytest.raises(ColumnError):
        policy.act(np.ones(2, np.float32), session="new")
    policy.act(ITEM)
    policy.act(ITEM, session="new")
    assert seen[-2:] == [[("default/0", 1)], [("new/0", 0)]]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: policy_with().act_batch(np.stack([ITEM] * 2), sessions=["a", "a"]), "session 'a' comes more than"),
        (lambda: policy_with().act_batch(np.stack([ITEM] * 2), sessions=["a"]), "2 observations for 1 sessions"),
        (lambda: policy_with().act_batch(np.stack([ITEM] * 2), sessions=[*"abc"]), "2 observations for 3 sessions"),
        (lambda: policy_with().act((ITEM, {})), r"as reset\(\) and step\(\) of an environment give it; expected"),
        (lambda: Policy(RandomModule), "observation_space is None"),
    ],
)
def test_calls_that_do_not_fit_are_refused(call: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=text):
        call()


def test_rewards_that_a_piece_looks_back_to_have_to_come() -> None:
    policy = policy_with(PrevActionsPrevRewards(), FlattenObservations())
    policy.act(ITEM)
    with pytest.raises(PolicyError, match="'PrevActionsPrevRewards' looks back to rewards"):
        policy.act(ITEM)
    policy.act(ITEM, reward=2.0)


def test_rewards_that_a_users_piece_looks_back_to_are_refused_where_they_did_not_come() -> None:
    def add(batch: dict[str, Any], episodes: Any) -> None:
        for episode in episodes:
            last = episode.get_rewards(-1) if len(episode) else 0.0
            episode.set_observations(new_data=episode.get_observations(-1) + np.float32(last), at_indices=-1)

    policy = Policy(DefaultModule, [LambdaConnector(add, lookback=1)], **SPACES)
    policy.act(ITEM)
    with pytest.raises(ValueError, match="is NaN"):
        policy.act(ITEM)


def test_a_session_whose_step_failed_says_that_its_memory_is_lost() -> None:
    fails: list[int] = []

    def fail(batch: dict[str, Any]) -> None:
        if fails:
            raise ZeroDivisionError(fails.pop())

    policy = policy_with(LambdaConnector(fail))
    policy.act_batch(np.stack([ITEM] * 2), sessions=["a", "b"])
    fails.append(1)
    with pytest.raises(ZeroDivisionError):
        policy.act(ITEM, session="a")
    with pytest.raises(PolicyError, match="session 'a' lost its memory"):
        policy.act(ITEM, session="a")
    policy.act(ITEM, session="b")
    policy.reset("a")
    policy.act(ITEM, session="a")


def test_where_nothing_is_remembered_any_company_acts_in_one_lane() -> None:
    policy = Policy(DefaultModule, [FlattenObservations()], **SPACES)
    made: list[int] = []
    make = policy._sessions._make
    policy._sessions._make = lambda ids: made.append(len(ids)) or make(ids)
    rng = np.random.default_rng(0)
    for _ in range(20):
        ids = rng.permutation(9)[: rng.integers(1, 4)].tolist()
        observations = rng.normal(size=(len(ids), 3)).astype(np.float32)
        actions = policy.act_batch(observations, sessions=ids)
        assert actions.tolist() == [int(policy.act(each)) for each in observations]
        policy.reset(ids[0])
    assert sorted(made) == [1, 2, 3]
    assert policy.sessions == ()


def test_a_function_of_a_user_may_remember_by_the_episode() -> None:
    def count(episodes: Any) -> None:
        for episode in episodes:
            episode.custom_data["steps"] = episode.custom_data.get("steps", 0) + 1
            counts.append(episode.custom_data["steps"])

    counts: list[int] = []
    policy = policy_with(LambdaConnector(count))
    assert has_memory(policy.module, policy.env_to_module, policy.module_to_env)
    for ids in (["a", "b"], ["b"], ["c", "a"]):
        policy.act_batch(np.stack([ITEM] * len(ids)), sessions=ids)
    assert counts[-5:] == [1, 1, 2, 1, 2]
