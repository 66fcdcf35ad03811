"""Replays of several agents: what is sampled of each module is what its agents did."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_agents import Drawn, drawn_settings
from feeding_rollouts import feeding, weights_of_agents
from held_envs import await_that
from hypothesis import given, settings, strategies as st
from lost_agents import numbers
from newest_sampler import Newest
from property_examples import examples
from replayed import Played, client_of, insert_all, serving
from replayed_agents import TURNS, fragments_of, of_two_modules, rows_in, steps_by_module
from serial_module import at_of

from rollflow import Replay
from rollflow.sinks import Prioritized, SampledNStepReturns, SamplesPerInsert, Storage
from rollflow.stream import ReplayError
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment


@settings(max_examples=examples(10), deadline=None)
@given(drawn=drawn_settings, is_prioritized=st.booleans(), capacity=st.sampled_from([40, 4000]))
def test_what_is_sampled_of_a_module_is_what_its_agents_did(drawn: Drawn, is_prioritized: bool, capacity: int) -> None:
    fragments = fragments_of(drawn, 4)
    replay = Replay(capacity, sampler=Prioritized() if is_prioritized else None, seed=0)
    newest = Replay(4000, sampler=Newest())
    kept = []
    for fragment in fragments:
        try:
            replay(fragment)
        except ReplayError as error:
            assert "rows, but the replay has 40" in str(error)
            assert replay.report().inserted == sum(each.num_steps for each in kept)
            return
        kept.append(fragment)
        newest(fragment)
        expected = steps_by_module(kept)
        batches = replay.sample(32) if len(replay) else {}
        assert batches.keys() == expected.keys()
        for module_id, batch in batches.items():
            assert all(expected[module_id][at] == row for at, row in rows_in(batch))
            if is_prioritized:
                replay.update_priorities(batch["ids"], torch.rand(32), module_id)
    report = replay.report()
    assert report.inserted == sum(fragment.num_steps for fragment in fragments)
    assert len(replay) == report.inserted - report.removed
    for module_id, batch in newest.sample(4000).items():  # each step once, under its module
        assert Counter(at for at, _ in rows_in(batch)) == Counter(expected[module_id].keys())
        assert newest.report(module_id).inserted == len(expected[module_id])


def test_n_step_returns_go_along_an_agents_own_steps() -> None:
    """Whoever waits, comes late or leaves: k steps on are k steps of the same agent in the same episode."""
    fragments = fragments_of()
    replay = Replay(4000, sampler=Newest(), pieces=[SampledNStepReturns(n_step=3, gamma=0.5)])
    insert_all(replay, fragments)
    for module_id, batch in replay.sample(4000).items():
        steps = steps_by_module(fragments)[module_id]
        for place, at in enumerate(map(numbers, at_of(batch["obs"]))):
            total, count, row = 0.0, 0, steps.get(at)
            while row is not None and count < 3:
                after, _, reward, _, *flags = row
                total, count, last = total + 0.5**count * reward, count + 1, (after, *flags)
                row = None if any(flags) else steps.get(after)
            assert batch["n_step"][place] == count
            assert float(batch["rewards"][place]) == pytest.approx(total)
            found = numbers(at_of(batch["new_obs"])[place]), *(bool(batch[each][place]) for each in FLAGS)
            assert found == last


FLAGS = "terminateds", "truncateds"


def _is_inserted(replay: Replay, fragment: MultiAgentFragment) -> bool:
    """Insert a fragment; False: the rate holds it back."""
    try:
        replay(fragment)
    except ReplayError:
        return False
    return True


def test_each_module_keeps_to_the_rate() -> None:
    """A module that acts seldom is not drawn as often as the others; an insert waits for all of its modules."""
    fragments = fragments_of(TURNS._replace(nested=1, by_episode=False), 12)
    replay = Replay(4000, rate=SamplesPerInsert(2.0, min_size=4), batch_size=4, seed=0)
    for fragment in fragments:
        while not _is_inserted(replay, fragment):
            assert replay.sample()  # whatever holds the insert back may be sampled
        for _ in replay.batches():
            pass
    reports = [replay.report(module_id) for module_id in replay.module_ids]
    assert len({report.inserted for report in reports}) > 1
    for report in reports:
        beyond = max(0, report.inserted - 4)
        assert abs(report.sampled - 2.0 * beyond) <= 4 + 2.0 * max(fragment.num_steps for fragment in fragments)
    assert replay.report().sampled == sum(report.sampled for report in reports)


def without(output: str, fragment: MultiAgentFragment) -> MultiAgentFragment:
    """The fragment, whose module "b" has not made an output."""
    part = fragment.of_module("b")
    part.columns = {name: column for name, column in part.columns.items() if name != output}
    return fragment


@pytest.mark.parametrize(
    ("make", "output", "told"),
    [
        (lambda: Replay(14), None, r"takes 15 rows, but the replay has 14"),
        (lambda: Replay(400, storage=Storage(extra=("weight",))), "weight", "no output 'weight', which the replay is"),
        (lambda: Replay(20, rate=SamplesPerInsert(1.0, 19)), None, r"min_size is 19, but all 20 rows are taken"),
        (lambda: Replay(400, rate=SamplesPerInsert(1.0), batch_size=4), None, "holds this insert back: .* of module '"),
    ],
)
def test_a_fragment_that_one_module_does_not_take_is_refused_as_a_whole(
    make: Callable[[], Replay], output: str | None, told: str
) -> None:
    fragments, replay, taken = of_two_modules(), make(), 0
    if output is not None:
        fragments = [without(output, fragment) for fragment in fragments]
    with pytest.raises(ReplayError, match=told):
        for fragment in fragments:
            replay(fragment)
            taken += fragment.num_steps
    assert replay.report("a").inserted == taken // 4
    with pytest.raises(ReplayError, match=told):
        replay(fragment)
    assert replay.report().inserted == taken


def test_modules_whose_ids_have_one_text_are_refused(tmp_path: Path) -> None:
    """They would have one seed, and one file."""
    replay = Replay(400, storage=Storage(path=tmp_path / "steps"), seed=0)
    told = r"the modules (1 and '1'|'1' and 1) have one text as their ids, expected another text for each module"
    with pytest.raises(ReplayError, match=told):
        replay(of_two_modules(1, "1")[0])
    assert not list(tmp_path.iterdir())
    (first, *_) = of_two_modules(1, "b")
    replay(first)
    with pytest.raises(ReplayError, match=told):
        replay(of_two_modules("1", "b")[0])
    assert replay.report().inserted == first.num_steps


def test_each_module_has_a_file_with_its_id_behind_the_name(tmp_path: Path) -> None:
    (tmp_path / "steps.b").write_text("mine")
    replay = Replay(400, storage=Storage(path=tmp_path / "steps"), seed=0)
    with pytest.raises(ReplayError, match=r"steps.b'\): a file is there already"):
        replay(of_two_modules("a", "b")[0])
    assert (tmp_path / "steps.b").read_text() == "mine"


def test_a_state_that_cant_be_taken_leaves_the_steps_that_are_there() -> None:
    fragments = of_two_modules()
    plain, replay = Replay(400, seed=0), Replay(400, sampler=Prioritized(), seed=0)
    plain(fragments[0])
    insert_all(replay, fragments)
    before, state = replay.report(), replay.get_state()
    cut = {**state, "tables": [state["tables"][0], ["b", {**state["tables"][1][1], "rows": {}}]]}
    cant_be_taken = r"can't be taken: .*; expected get_state\(\) of a replay with the same"
    of_another = "of a replay with sampler=<one without a state>, expected Prioritized"
    wrongs = (plain.get_state(), of_another), (cut, cant_be_taken), ({**state, "tables": 3}, cant_be_taken)
    for wrong, told in wrongs:
        with pytest.raises(ReplayError, match=told):
            replay.set_state(wrong)
        assert replay.report() == before
    assert {each: len(rows["ids"]) for each, rows in replay.sample(8).items()} == {"a": 8, "b": 8}
    message = r"^the replay has .* got the state of one; expected that of several, or a new Replay"
    with pytest.raises(ReplayError, match=message):
        replay.set_state(Replay(400, sampler=Prioritized()).get_state())
    with pytest.raises(ReplayError, match=r"of a replay with capacity=None, expected 400"):
        replay.set_state({})


def test_one_agent_and_several_are_kept_apart() -> None:
    fragment = fragments_of(count=1)[0]
    (single,) = Played(1, 1).fragments
    replay = Replay(400)
    replay(single)
    with pytest.raises(ReplayError, match="has steps of one agent, got a fragment of several"):
        replay(fragment)
    replay = Replay(400, seed=0)
    replay(fragment)
    with pytest.raises(ReplayError, match="has steps of several agents, got a fragment of one"):
        replay(single)
    with pytest.raises(ReplayError, match="has steps of several agents, got the state of one"):
        replay.set_state(Replay(400).get_state())
    with pytest.raises(ReplayError, match=r"no steps of module 'nobody', expected module_id to be one of \["):
        replay.update_priorities(np.zeros(1, np.int64), np.zeros(1), "nobody")
    with pytest.raises(ReplayError, match=r"no steps of module \['nobody'\], expected module_id to be one of \["):
        replay.report(["nobody"])


def test_a_host_takes_several_agents_and_gives_batches_by_module(tmp_path: Path) -> None:
    replay = Replay(4096, sampler=Prioritized(), seed=0)
    with serving(replay, tmp_path) as host, client_of(host) as client:
        with feeding(host.rollouts, [0, 1], agents=2, num_fragments=4) as running:
            await_that(lambda: client.report().inserted > 0)
            for module_id, batch in client.sample(16).items():
                at, after = (at_of(batch[name]) for name in ("obs", "new_obs"))
                assert set(at[:, 1].tolist()) == {0 if module_id == "nested" else 1}
                assert torch.equal(after - at, torch.tensor([0, 0, 0, 1, 1]).expand(16, 5))
                client.update_priorities(batch["ids"], torch.zeros(16), module_id)
                assert client.report(module_id).sampled == 16
            assert client.publish(weights_of_agents(1.0)) > 0
            with pytest.raises(ReplayError, match="no steps of module 'nobody', expected module_id to be one of"):
                client.report("nobody")
            wrong: Any
            for wrong in (["plain"], {"plain": 1}, b"plain", 1.0, True):
                with pytest.raises(ReplayError, match=r"module_id is .*, expected text, a whole number, or none"):
                    client.report(wrong)
                with pytest.raises(ReplayError, match=r"module_id is .*, expected text, a whole number, or none"):
                    client.update_priorities(np.zeros(1, np.int64), np.zeros(1), wrong)
        made = running.rollout.num_steps
    assert replay.report().inserted == made
    assert [replay.report(each).inserted for each in ("nested", "plain")] == [made // 2, made // 2]


def test_what_a_host_had_when_it_failed_is_sent_again_and_is_there_once(tmp_path: Path) -> None:
    saved, (first, second) = tmp_path / "saved", (Replay(4096, sampler=Newest(), seed=0) for _ in range(2))
    with ExitStack() as stack:
        running = stack.enter_context(feeding(f"unix:{tmp_path / 'rollouts'}", [0, 1], agents=2, num_fragments=6))
        with suppress(ZeroDivisionError), serving(first, tmp_path, checkpoint=saved, every=3600.0):
            await_that(lambda: first.report().inserted > 0)
            raise ZeroDivisionError  # the host fails
        with serving(second, tmp_path, checkpoint=saved, every=0.05):
            stack.close()  # the rollout ends once a checkpoint has all of it
    batches = second.sample(4096)
    for batch in batches.values():
        counts = Counter(map(numbers, at_of(batch["obs"])))
        assert set(counts.values()) == {1}
    assert sum(len(batch["rewards"]) for batch in batches.values()) == running.rollout.num_steps == 6 * 8 * 4
