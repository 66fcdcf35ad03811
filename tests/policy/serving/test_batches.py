"""Batches of a served policy: who acts together, what is refused, and what sessions remember."""

from typing import Any

import gymnasium as gym
import pytest
from served_policies import Echo, Held, Sums, Taking, first_of, policy_of, value_of

from rollflow import Policy
from rollflow.nodes import DefaultModule, PrevActionsPrevRewards
from rollflow.policy.serving.request import Acted, ClosedError, RequestError, SessionLostError
from rollflow.policy.serving.shelf import Batcher, BatchOptions, Meters


def batcher_of(policy: Any, **options: Any) -> Batcher:
    """Batches of a policy, with these options."""
    return Batcher(policy, "a", "1", BatchOptions(**options), Meters())


def test_what_waits_acts_in_one_pass() -> None:
    held, front, meters = Held(policy_of(Echo)), Taking(), Meters()
    batcher = Batcher(held, "a", "1", BatchOptions(max_batch=4), meters)
    batcher.submit(front.request(0.0, "first"))
    held.begun.acquire()
    for number in range(1, 7):
        batcher.submit(front.request(float(number), number))
    held.go.release(3)
    answers = front.take(7)
    sizes = [value_of(meters, "actions_total"), value_of(meters, "batch_size_count")]
    batcher.close()
    assert held.sizes == [1, 4, 2]
    assert {ticket: first_of(answer) for ticket, answer in answers.items()} == {"first": 0.0} | {
        number: float(number) for number in range(1, 7)
    }
    assert sizes == [7, 3]


def test_requests_of_one_session_never_share_a_pass_and_keep_their_order() -> None:
    held, front = Held(policy_of(Sums)), Taking()
    batcher = batcher_of(held)
    batcher.submit(front.request(1.0, "a", begins=True, ticket=0))
    held.begun.acquire()
    for ticket, (session, number) in enumerate([("a", 2.0), ("a", 3.0), ("b", 5.0), ("a", 4.0)], 1):
        batcher.submit(front.request(number, session, begins=session == "b", ticket=ticket))
    held.go.release(4)
    answers = front.take(5)
    batcher.close()
    assert held.sizes == [1, 2, 1, 1]
    assert [first_of(answers[ticket]) for ticket in range(5)] == [1.0, 3.0, 6.0, 5.0, 10.0]


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        ([(1, "a", True), (2, "a", False), (7, "a", True), (1, "a", False)], [1, 3, 7, 8]),  # an episode begins anew
        ([(3, None, False)] * 2, [3, 3]),
        ([(1, "a", False)], ["session 'a' has no memory here: it never began, it was forgotten, or a new version"]),
        # Two sessions have room: the one that is idle for longest is forgotten.
        ([*((1, each, True) for each in "abac"), (1, "a", False), (1, "b", False)], [1, 1, 1, 1, 2, "session 'b' has"]),
    ],
)
def test_a_session_remembers_its_episode(requests: list[Any], expected: list[Any]) -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums), max_sessions=2)
    outcomes = []
    for number, session, begins in requests:
        batcher.submit(front.request(number, session, begins=begins, ticket=0))
        outcomes.append(front.take()[0])
    batcher.close()
    for outcome, sum_or_error in zip(outcomes, expected, strict=True):
        if isinstance(sum_or_error, str):
            assert isinstance(outcome, SessionLostError | RequestError)
            assert str(outcome).startswith(sum_or_error)
        else:
            assert first_of(outcome) == sum_or_error


def test_a_closed_one_answers_what_waits_and_takes_nothing_more() -> None:
    held, front = Held(policy_of(Echo)), Taking()
    batcher = batcher_of(held)
    batcher.submit(front.request(1.0, 1))
    held.begun.acquire()
    batcher.submit(front.request(2.0, 2))
    held.go.release(2)
    batcher.close()
    assert len(front.take(2)) == 2
    with pytest.raises(ClosedError, match="version '1' is being closed"):
        batcher.submit(front.request(3.0, 3))


def test_new_weights_act_from_the_next_pass_on() -> None:
    front, policy = Taking(), policy_of(Echo)
    batcher = batcher_of(policy)
    made = []
    for offset, given in ((0.0, None), (5.0, 70)):
        weights = {name: value * 0 + offset for name, value in policy.module.state_dict().items()}
        version = batcher.publish(weights, given)
        batcher.submit(front.request(1.0, "a"))
        answer: Any = front.take()["a"]
        made.append((answer.action[1], answer.weights == version == (given or 1)))
    batcher.close()
    assert made == [(0.0, True), (5.0, True)]


def test_a_request_without_the_reward_that_is_looked_back_to_costs_nobody_else_a_session() -> None:
    spaces = {"observation_space": gym.spaces.Box(-9, 9, (2,)), "action_space": gym.spaces.Discrete(2)}
    held, front = Held(Policy(DefaultModule, [PrevActionsPrevRewards()], **spaces)), Taking()
    batcher = batcher_of(held)
    for begins in (True, False, False):
        batcher.submit(front.request(0.0, ticket="first"))  # so that the others wait, and act together
        held.begun.acquire()
        for session in "ab":
            request = front.request(1.0, session, begins=begins)
            batcher.submit(request if begins or session == "b" else request._replace(reward=1.0))
        held.go.release(2)
        answers = front.take(3)
        held.begun.acquire()
        assert isinstance(answers["a"], Acted)
        if not begins:
            assert isinstance(answers["b"], RequestError)
            assert "reward is missing, but 'PrevActionsPrevRewards' looks back to rewards" in str(answers["b"])
    batcher.submit(front.request(1.0, "b")._replace(reward=0.0))  # goes on where it was
    held.go.release()
    assert isinstance(front.take()["b"], Acted)
    batcher.close()
