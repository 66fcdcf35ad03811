"""Hosts of whole rollouts that say what makes no sense: they are told so and leave, and the others go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ending_envs import rewards_by_slot
from remote_hosts import listening
from remote_rollouts import (
    RawRollouts,
    check_counts,
    check_laws,
    makers,
    rollout_over,
    rollouts_on,
    slots_of,
    taken_until,
)

from rollflow import Fragment, MeanStdFilter, RemoteRollouts, Rollout
from rollflow.nodes.offloaded.fragment_message import fragment_of
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Failed, Fragment as Answer, Goodbye, Metrics, Reset, Rows, Turn

Change = Callable[[Answer], Answer]


def rest(**changed: Any) -> Change:
    return lambda answer: replace(answer, rest={**answer.rest, **changed})


def without(name: str) -> Change:
    return lambda answer: replace(answer, rest={key: value for key, value in answer.rest.items() if key != name})


def columns(**changed: Any) -> Change:
    return lambda answer: replace(answer, columns={**answer.columns, **changed})


def no_column(name: str) -> Change:
    return lambda answer: replace(answer, columns={key: tree for key, tree in answer.columns.items() if key != name})


def cast(name: str, dtype: Any) -> Change:
    return lambda answer: columns(**{name: np.asarray(answer.columns[name]).astype(dtype)})(answer)


def cut(name: str, rows: int, slots: int = 2) -> Change:
    return lambda answer: columns(**{name: np.asarray(answer.columns[name])[:rows, :slots].copy()})(answer)


# What one check refuses stands here once.
NONSENSE: dict[str, tuple[Change, str]] = {
    "a column with a row less": (cut("rewards", 8), r"rewards is float32\[8, 2\], expected \[9, 2, …\]"),
    "observations with a row less": (cut("obs", 9), r"obs is int64\[9, 2, 3\], expected \[10, 2, …\]"),
    "rewards of another dtype": (cast("rewards", "f8"), r"rewards is float64\[9, 2\], expected rows of float32\[2\]"),
    "actions of another dtype": (cast("actions", "f4"), r"actions is float32\[9, 2\], expected rows of int64\[2\]"),
    "no rewards": (no_column("rewards"), "KeyError: 'rewards'"),
    "a tree for an array": (
        columns(rewards={"a": np.zeros((9, 2), "f4")}),
        "rewards is .'a': .*, expected rows of float32",
    ),
    "no sequence": (without("sequence"), "KeyError: 'sequence'"),
    "rows that are no number": (rest(num_rows="8"), "is no fragment: TypeError"),
    "episodes that begin with another shape": (rest(episode_start=np.zeros((3, 3))), "episode_start is"),
    "finals that are no list": (rest(finals=7), "it is no fragment: TypeError"),
    "data of nonsense": (rest(custom_data=[[1]]), "is no fragment: ValueError"),
    "a space that there is not": (rest(space=4), "is no fragment: IndexError"),
}

# What a host says of its first fragment, and is told; the others go on.
REFUSED: dict[str, tuple[Change, str]] = {
    "a fragment": (cast("rewards", "f8"), r"rewards is float64\[9, 2\], expected rows of float32\[2\]"),
    "a report": (without("steps"), "KeyError: 'steps'"),
    "steps that are no number": (rest(steps="x"), "steps is 'x', expected a whole number"),
    "losses that are no number": (rest(lost_steps="x"), "lost_steps is 'x', expected a whole number"),
    "stages of nonsense": (rest(nodes=[["env", 1]]), r"nodes is .*, expected lists of name, items, busy seconds"),
    "a failure of nonsense": (rest(failure={"type": 1}), "TypeError: .* missing"),
    "a sequence that is no number": (rest(sequence="x"), "sequence is 'x', expected a whole number"),
    "outputs of another form": (columns(vf_preds=np.zeros((9, 2, 1), "f4")), "a row of vf_preds is 'float32"),
    "more outputs": (columns(more=np.zeros((9, 2), "f4")), "columns are .*'more'.*, as in others"),
}

# What connectors and metrics can't take: the fragment itself is good.
HEARD: dict[str, tuple[Change, str]] = {
    "metrics of nonsense": (rest(metrics={"x": 1}), "MetricsError: a state with .*, expected 'statistics'"),
    "metrics that are no map": (rest(metrics=3), "TypeError"),
    "metrics without values": (rest(metrics={"statistics": [[["a"], {}]]}), "MetricsError: 'a': a state without"),
    "states of nonsense": (rest(states=7), "TypeError"),
    "states for one pipeline": (rest(states=[{}]), "ValueError"),
    "states of other pieces": (rest(states=[{"x": {"a": 1}}, {}]), "Error"),
    "states that are no maps": (rest(states=[3, "x"]), "Error"),
}


@contextmanager
def raw_beside(**connectors: Any) -> Iterator[tuple[Rollout, Iterator[Fragment], RawRollouts]]:
    """A rollout with a real host of slots 0 and 1, and one made by hand that has joined."""
    envs = listening(RemoteRollouts)
    real = rollouts_on(envs.addresses[0], makers(0, 1), **connectors)
    with real, rollout_over(envs, prefetch=2, **connectors) as rollout:
        fragments = iter(rollout.fragments())
        raw = RawRollouts(envs.addresses[0], connectors=connectors)
        try:
            yield rollout, fragments, raw
        finally:
            raw.close()


def others_go_on(rollout: Rollout, fragments: Iterator[Fragment], taken: list[Fragment]) -> None:
    """The real host is undisturbed, and every transition is accounted for."""
    taken += [next(fragments) for _ in range(5)]
    rollout.report()
    rollout.drain()
    taken += list(fragments)
    mine = [fragment for fragment in taken if fragment.lane == 0]
    check_laws(mine, rollout.lost, slots_lost=2 * (8 + 1))
    assert len(rewards_by_slot(mine)[1]) >= 3 * 8
    check_counts(taken, rollout)


def refused(said: Callable[[RawRollouts, Turn], Any], expected: str) -> tuple[list[Fragment], Rollout]:
    """Check that what a host says to its first turn is refused; return other fragments, and the ended rollout."""
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        raw.send(said(raw, raw.next_turn_beside(fragments, taken)))
        with pytest.raises(WireError, match=f"^gateway: refuses: {expected}"):
            raise raw.refusal()
        others_go_on(rollout, fragments, taken)
    return taken, rollout


def refused_fragment(change: Change, expected: str) -> tuple[list[Fragment], Rollout]:
    return refused(lambda raw, turn: change(raw.made(turn)), f"host raw .*: fragment 1 of lane 1.*{expected}")


@pytest.fixture(scope="module")
def pattern() -> Any:
    """A fragment's message, and the layout that it has."""
    with raw_beside() as (rollout, fragments, raw):
        answer = raw.made(raw.next_turn_beside(fragments, []))
        node = rollout.environments
        return answer, node.kind.layout(node, 1, node.envs[1], 0), [node.observation_space]


@pytest.mark.parametrize("name", NONSENSE)
def test_a_fragment_that_makes_no_sense_is_refused(pattern: Any, name: str) -> None:
    answer, layout, spaces = pattern
    change, expected = NONSENSE[name]
    message = change(answer)
    with pytest.raises(WireError, match=expected):
        fragment_of(message, layout, spaces)


@pytest.mark.parametrize("name", REFUSED)
def test_a_host_that_sends_what_makes_no_sense_leaves(name: str) -> None:
    taken, rollout = refused_fragment(*REFUSED[name])
    assert slots_of(taken) == {0, 1}
    assert rollout.lost.get("workers", 0) <= 16 + 2


@pytest.mark.parametrize("name", HEARD)
def test_what_else_makes_no_sense_costs_no_transition(name: str) -> None:
    taken, rollout = refused_fragment(*HEARD[name])
    assert [fragment.num_steps for fragment in taken if fragment.lane] == [16]
    assert rollout.lost.get("workers", 0) == 0


def test_what_it_gave_before_is_kept_and_counted_once() -> None:
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        for _ in range(2):
            raw.answer(raw.next_turn_beside(fragments, taken))
        raw.send(without("steps")(raw.made(raw.next_turn_beside(fragments, taken))))
        with pytest.raises(WireError, match=r"fragment 3 of lane 1: KeyError: 'steps'"):
            raise raw.refusal()
        taken += taken_until(fragments, lambda more: sum(f.lane for f in taken + more) == 2)
        others_go_on(rollout, fragments, taken)
    assert [fragment.num_steps for fragment in taken if fragment.lane] == [16, 16]


# How far it says that it is

TOLD: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "KeyError: 'lanes'"),
    "lists of another length": ({"lanes": [[1, 0, 0, 0, False, 0]]}, "TypeError: .* positional arguments"),
    "steps that are no number": ({"lanes": [[1, 0, "x", 1, False]]}, "steps is 'x', expected a whole number"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_host_that_says_nonsense_of_its_progress_leaves(name: str) -> None:
    metrics, expected = TOLD[name]
    refused(lambda raw, turn: Metrics(metrics), f"host raw .*: metrics: .*{expected}")


def test_what_it_says_of_its_progress_is_lost_when_it_leaves() -> None:
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        raw.next_turn_beside(fragments, taken)
        count = rollout.environments.remotes[1]
        for pulse in range(1, 8):
            raw.send(Metrics({"lanes": [[1, 0, 2 * pulse, pulse, False]]}))
            taken += taken_until(fragments, lambda more, pulse=pulse: count.progress.pulse == pulse)
        raw.send(Goodbye("enough"))
        taken += taken_until(fragments, lambda more: bool(rollout.lost))
        assert rollout.lost == {"workers": 14 + 2}
        taken += [next(fragments) for _ in range(5)]
        rollout.drain()
        taken += list(fragments)
    check_counts(taken, rollout)
    check_laws(taken, rollout.lost, slots_lost=14 + 2)


# Answers to nothing


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            lambda turn: Rows(turn.lane, turn.number, np.zeros(2), None, None, None, (), None, {}, {}),
            "expected fragment or failed 1",
        ),
        (lambda turn: Failed(turn.lane, 9, "E", "x", (), ""), "failed 9 of lane 1: nothing above number 1"),
        (lambda turn: Answer(0, turn.number, {}, {}), "lane 0, expected one of"),
        (lambda turn: Turn(turn.lane, 1), "turn from a host, expected an answer or metrics"),
        (lambda turn: Reset(turn.lane, 1, None, None), "reset from a host, expected an answer or metrics"),
    ],
)
def test_what_is_no_answer_to_a_turn_is_refused(said: Callable[[Turn], Any], expected: str) -> None:
    refused(lambda raw, turn: said(turn), f".*{expected}")


@pytest.mark.wait_times(first_pause_s=0.001)
@pytest.mark.slow
def test_one_that_fails_every_turn_leaves(caplog: pytest.LogCaptureFixture) -> None:
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        for _ in range(6):
            turn = raw.next_turn_beside(fragments, taken)
            raw.connection.answer(turn, Failed(turn.lane, turn.number, "Nope", "never", ("at all",), ""))
            raw.flush()
        taken += taken_until(fragments, lambda more: "is set aside" in caplog.text)
        others_go_on(rollout, fragments, taken)
    assert "lane 1 is set aside, lost 6 times in a row: host raw" in caplog.text
    assert "Nope: never (at all)" in caplog.text


def test_states_that_can_not_be_merged_spoil_nothing_for_others() -> None:
    with raw_beside(env_to_module_connector=lambda env: MeanStdFilter()) as (rollout, fragments, raw):
        taken = [next(fragments)]
        answer = raw.made(raw.next_turn_beside(fragments, taken))
        [name] = [name for name in answer.rest["states"][0] if "MeanStd" in name]
        raw.send(rest(states=[{name: {"space": "another", "sources": {}}}, {}])(answer))
        with pytest.raises(WireError, match="fragment 1 of lane 1: ConnectorError"):
            raise raw.refusal()
        taken += taken_until(fragments, lambda more: len(more) > 5)
    [state] = [state for key, state in rollout.env_to_module.get_state().items() if "MeanStd" in key]
    assert len(state["sources"]) == 1
