"""Hosts of whole rollouts that say what makes no sense: they are told so and leave, and the others go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ending_envs import rewards_by_slot
from hypothesis import Phase, given, settings, strategies as st
from property_examples import examples
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
from rollflow.nodes.offloaded.rollout_settings import account_of, progress_of
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


def ended_too_early(answer: Answer) -> Answer:
    """With last observations in a row in which no episode ends."""
    going = ~(np.asarray(answer.columns["terminateds"]) | np.asarray(answer.columns["truncateds"])).any(axis=1)
    row = next(row for row in range(1, 8) if going[row])
    last = {"rows": np.full(2, row), "counts": [2], "slots": np.arange(2), "observations": np.zeros((2, 3), np.int64)}
    return rest(finals={**last, "infos": None})(answer)


# What one check refuses stands here once.
NONSENSE: dict[str, tuple[Change, str]] = {
    "a column with a row less": (cut("rewards", 8), r"rewards is float32\[8, 2\], expected \[9, 2, …\]"),
    "observations with a row less": (cut("obs", 9), r"obs is int64\[9, 2, 3\], expected \[10, 2, …\]"),
    "rewards of another dtype": (cast("rewards", "f8"), r"rewards is float64\[9, 2\], expected rows of float32\[2\]"),
    "actions of another dtype": (cast("actions", "f4"), r"actions is float32\[9, 2\], expected rows of int64\[2\]"),
    "no rewards": (no_column("rewards"), "KeyError: 'rewards'"),
    "a tree for an array": (columns(rewards={"a": np.zeros((9, 2), "f4")}), "rewards differs from its form"),
    "another form": (rest(forms=[]), r"forms is \[\], expected a map"),
    "no sequence": (without("sequence"), "KeyError: 'sequence'"),
    "a sequence of another kind": (rest(sequence="x"), "sequence is 'x', expected a whole number"),
    "more rows than there are": (rest(num_rows=9), "num_rows is 9, expected a whole number from 0 to 8"),
    "rows that are no number": (rest(num_rows="8"), "num_rows is '8', expected a whole number"),
    "episodes that begin with another shape": (rest(episode_start=np.zeros((3, 3))), "episode_start is"),
    "episodes that begin nowhere": (
        rest(episode_start=np.array([1 << 40, 0])),
        r"episode_start is an array int64\[2\], expected numbers from -\d+ to 2",
    ),
    "an episode before the first, where nothing was lost": (
        rest(episode_number=np.array([-1, 0])),
        r"episode_number is an array int64\[2\], expected numbers from 0",
    ),
    "finals of nonsense": (
        rest(finals={"rows": np.zeros(1, np.int64), "counts": [5], "slots": 3, "infos": None}),
        r"finals: rows is .*, expected numbers from 1 to 8",
    ),
    "finals of episodes that do not end": (
        ended_too_early,
        r"finals: no episode of slot . ends in row \d, expected one",
    ),
    "finals that are no list": (rest(finals=7), "it is no fragment: TypeError"),
    "losses of slots that there are not": (rest(losses=[[1, np.array([9]), np.array([9]), "x"]]), "losses: slots is"),
    "infos of too many rows": (rest(infos=[{}] * 99), "infos is .*, expected a list of at most 10 maps"),
    "infos that are no maps": (rest(infos=[3] * 10), "infos: 3, expected a map"),
    "infos with a mask of nonsense": (rest(infos=[{"a": 1, "_a": 2}]), r"infos\['_a'\] is 2, expected an array"),
    "data of nonsense": (rest(custom_data=[[1]]), "is no fragment: ValueError"),
    "a space that there is not": (rest(space=4), "space is 4, expected a whole number from 0 to 0"),
    "no steps": (without("steps"), "rest has no field 'steps', expected start, steps"),
    "a start below nothing": (rest(start=-1), "start is -1, expected a whole number from 0"),
    "more lost than slots": (rest(lost_steps=3), "lost_steps is 3, expected a whole number from 0 to 2"),
    "a failure that is no text": (rest(failure=[1]), r"failure is \[1\], expected a string of at most 65536"),
    "stages of nonsense": (rest(nodes=[["env", "many", None]]), "nodes.* is .*, expected a list of name, items, busy"),
    "observations that differ in no known way": (rest(deviations=[["color", "red"]]), "is 'color', expected one of"),
    "a deviation that is no text": (rest(deviations=[["bounds", 5]]), "is 5, expected a string of at most 1024"),
    "a deviation of many words": (rest(deviations=[["bounds", "x" * 1025]]), "expected a string of at most 1024"),
}

# What a host says of its first fragment, and is told; the others go on.
REFUSED: dict[str, tuple[Change, str]] = {
    "a fragment": (cast("rewards", "f8"), r"rewards is float64\[9, 2\], expected rows of float32\[2\]"),
    "a report": (without("steps"), "rest has no field 'steps', expected start, steps"),
    "a sequence that comes later": (rest(sequence=1), "sequence is 1, expected 0"),
    "other steps": (rest(steps=15), "steps is 15, expected 16"),
    "more steps than a fragment has": (rest(steps=17), "17 steps, expected at most 16"),
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
        account_of(message.rest, 2)
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
        raw.send(rest(steps=99)(raw.made(raw.next_turn_beside(fragments, taken))))
        with pytest.raises(WireError, match=r"fragment 3 of lane 1: 99 steps, expected at most 48"):
            raise raw.refusal()
        taken += taken_until(fragments, lambda more: sum(f.lane for f in taken + more) == 2)
        others_go_on(rollout, fragments, taken)
    assert [fragment.num_steps for fragment in taken if fragment.lane] == [16, 16]


# How far it says that it is

TOLD: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "metrics.lanes is None, expected a list of at most 1"),
    "lists of another length": ({"lanes": [[1, 0, 0, 0]]}, "metrics.lanes.* is .*, expected a list of 5 values"),
    "a lane of another host": ({"lanes": [[0, 0, 0, 0, False]]}, r"lanes \[0\], expected some of \[1\]"),
    "more steps than a fragment has": ({"lanes": [[1, 0, 17, 1, False]]}, "17 steps, expected at most 16"),
    "a pulse that is none": (
        {"lanes": [[1, 0, 0, None, False]]},
        r"metrics.lanes\[0\].pulse is None, expected a whole number",
    ),
    "an end that is none": ({"lanes": [[1, 0, 0, 0, 3]]}, r"lanes\[0\].is_in_vain is 3, expected true or false"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_host_that_says_nonsense_of_its_progress_leaves(name: str) -> None:
    metrics, expected = TOLD[name]
    refused(lambda raw, turn: Metrics(metrics), f"host raw .*: metrics: .*{expected}")


def test_one_that_says_more_than_it_has_credits_for_leaves() -> None:
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        raw.next_turn_beside(fragments, taken)
        gateway = rollout.environments.gateway
        gateway.give_credit = lambda host: None  # type: ignore[method-assign]
        for pulse in range(2):
            raw.send(Metrics({"lanes": [[1, 0, 0, pulse, False]]}))
        with pytest.raises(WireError, match="metrics without a credit, expected to wait for more"):
            raise raw.refusal()
        del gateway.give_credit
        others_go_on(rollout, fragments, taken)


def test_what_it_says_of_its_progress_is_lost_when_it_leaves() -> None:
    with raw_beside() as (rollout, fragments, raw):
        taken = [next(fragments)]
        raw.next_turn_beside(fragments, taken)
        count = rollout.environments.remotes[1]
        for pulse in range(1, 8):  # each for a credit, which the one before has come back as
            raw.send(Metrics({"lanes": [[1, 0, 2 * pulse, pulse, False]]}))
            taken += taken_until(fragments, lambda more, pulse=pulse: count.pulse == pulse)
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


# Whatever it says

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([np.zeros(2, np.int64), np.zeros((9, 2)), np.array([np.nan, 1e300])]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(drawn=st.data())
@settings(max_examples=examples(200), phases=[Phase.explicit, Phase.generate])
def test_whatever_stands_in_a_fragment_it_is_one_or_is_refused(pattern: Any, drawn: st.DataObject) -> None:
    answer, layout, spaces = pattern
    names = st.sampled_from(sorted(answer.rest))
    changed = drawn.draw(st.dictionaries(names, plain, min_size=1, max_size=2))
    message = rest(**changed)(answer)
    try:
        account = account_of(message.rest, 2)
        fragment = fragment_of(message, layout, spaces)
    except WireError:
        return
    assert account.lost_steps <= 2
    for chunk in fragment.episodes():
        chunk.get_state()
        chunk.get_infos()
    assert fragment.num_steps <= 16
    fragment.last_observations()


@given(
    metrics=st.dictionaries(st.sampled_from(["lanes", "x"]), plain | st.lists(st.lists(plain, min_size=5, max_size=5)))
)
@settings(max_examples=examples(80), phases=[Phase.explicit, Phase.generate])
def test_whatever_is_said_of_progress_it_makes_sense_or_is_refused(metrics: Any) -> None:
    try:
        progress = progress_of(metrics, [0, 1])
    except WireError:
        return
    assert all(lane in (0, 1) and each.steps >= 0 for lane, each in progress.items())
