"""Batches of a served policy: who acts together, what is refused, and what sessions remember."""

from typing import Any

import gymnasium as gym
import pytest
from served_policies import Echo, Held, Sums, Taking, first_of, policy_of

from rollflow import Policy
from rollflow.nodes import DefaultModule, PrevActionsPrevRewards
from rollflow.policy.serving.batcher import Batcher, BatchOptions
from rollflow.policy.serving.request import Acted, ClosedError, OverloadedError, RequestError, SessionLostError


def batcher_of(policy: Any, **options: Any) -> Batcher:
    """Batches of a policy, with these options."""
    return Batcher(policy, "1", BatchOptions(**options))


def test_what_waits_acts_in_one_pass() -> None:
    held, front = Held(policy_of(Echo)), Taking()
    batcher = batcher_of(held, max_batch=4)
    batcher.submit(front.request(0.0, "first"))
    held.begun.acquire()
    for number in range(1, 7):
        batcher.submit(front.request(float(number), number))
    for _ in range(3):
        held.go.release()
    answers = front.take(7)
    batcher.close()
    assert held.sizes == [1, 4, 2]
    assert {ticket: first_of(answer) for ticket, answer in answers.items()} == {"first": 0.0} | {
        number: float(number) for number in range(1, 7)
    }
    assert (batcher.tally.acted, batcher.tally.batch_sizes.buckets[:3]) == (7, [1, 1, 1])


def test_requests_of_one_session_never_share_a_pass_and_keep_their_order() -> None:
    held, front = Held(policy_of(Sums)), Taking()
    batcher = batcher_of(held)
    batcher.submit(front.request(1.0, "a", begins=True, ticket=0))
    held.begun.acquire()
    for ticket, (session, number) in enumerate([("a", 2.0), ("a", 3.0), ("b", 5.0), ("a", 4.0)], 1):
        batcher.submit(front.request(number, session, begins=session == "b", ticket=ticket))
    for _ in range(4):
        held.go.release()
    answers = front.take(5)
    batcher.close()
    assert held.sizes == [1, 2, 1, 1]
    assert [first_of(answers[ticket]) for ticket in range(5)] == [1.0, 3.0, 6.0, 5.0, 10.0]


def test_a_session_that_begins_anew_remembers_nothing() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums))
    sums = []
    for number, begins in [(1.0, True), (2.0, False), (7.0, True), (1.0, False)]:
        batcher.submit(front.request(number, "a", begins=begins))
        sums.append(first_of(front.take()["a"]))
    batcher.close()
    assert sums == [1.0, 3.0, 7.0, 8.0]


def test_a_session_that_never_began_is_refused_where_it_would_remember() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums))
    batcher.submit(front.request(1.0, "a"))
    error = front.take()["a"]
    batcher.close()
    assert isinstance(error, SessionLostError)
    assert str(error).startswith("session 'a' has no memory here: it never began, or it was forgotten; expected")


def test_an_observation_without_a_session_has_no_memory() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums))
    sums = []
    for _ in range(2):
        batcher.submit(front.request(3.0, None, ticket="alone"))
        sums.append(first_of(front.take()["alone"]))
    batcher.close()
    assert sums == [3.0, 3.0]


def test_a_request_that_comes_again_gets_the_same_answer_and_counts_once() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums))
    answers = []
    for number, begins in [(0, True), (0, True), (1, False), (1, False), (2, False)]:
        batcher.submit(front.request(1.0, "a", begins=begins, asked=number))
        answers.append(front.take()["a"])
    batcher.submit(front.request(1.0, "a", asked=5))
    error = front.take()["a"]
    batcher.close()
    assert [first_of(answer) for answer in answers] == [1.0, 1.0, 2.0, 2.0, 3.0]
    assert isinstance(error, RequestError)
    assert "number is 5, expected 3, or 2" in str(error)


def test_the_session_that_is_idle_for_longest_is_forgotten_first() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Sums), max_sessions=2)
    for session in ("a", "b", "a", "c"):
        batcher.submit(front.request(1.0, session, begins=True))
        front.take()
    assert batcher.num_sessions == 2
    outcomes = {}
    for session in ("a", "b"):
        batcher.submit(front.request(1.0, session))
        outcomes |= front.take()
    batcher.close()
    assert first_of(outcomes["a"]) == 2.0
    assert isinstance(outcomes["b"], SessionLostError)


def test_too_many_that_wait_are_refused() -> None:
    held, front = Held(policy_of(Echo)), Taking()
    batcher = batcher_of(held, max_waiting=2)
    batcher.submit(front.request(1.0, 1))
    held.begun.acquire()
    for session in (2, 3):
        batcher.submit(front.request(1.0, session))
    with pytest.raises(OverloadedError, match="2 requests wait already; ask again later"):
        batcher.submit(front.request(1.0, 4))
    for _ in range(2):
        held.go.release()
    assert len(front.take(3)) == 3
    batcher.close()
    assert batcher.tally.refused == 1


def test_a_pass_that_fails_says_so_to_its_requests_and_the_next_one_goes_on() -> None:
    front = Taking()
    batcher = batcher_of(policy_of(Echo))
    for number in (13.0, 14.0):
        batcher.submit(front.request(number, number))
    answers = front.take(2)
    batcher.close()
    assert str(answers[13.0]) == "thirteen"
    assert batcher.tally.failed in (1, 2)  # alone, or with the other one


def test_a_closed_one_answers_what_waits_and_takes_nothing_more() -> None:
    held, front = Held(policy_of(Echo)), Taking()
    batcher = batcher_of(held)
    batcher.submit(front.request(1.0, 1))
    held.begun.acquire()
    batcher.submit(front.request(2.0, 2))
    for _ in range(2):
        held.go.release()
    batcher.close()
    assert len(front.take(2)) == 2
    with pytest.raises(ClosedError, match="version '1' is being closed"):
        batcher.submit(front.request(3.0, 3))


def test_new_weights_act_from_the_next_pass_on() -> None:
    front, policy = Taking(), policy_of(Echo)
    batcher = batcher_of(policy)
    made = []
    for offset in (0.0, 5.0):
        weights = {name: value * 0 + offset for name, value in policy.module.state_dict().items()}
        version = batcher.publish(weights)
        batcher.submit(front.request(1.0, "a"))
        answer: Any = front.take()["a"]
        made.append((answer.action[1], answer.weights == version))
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
