"""One forward pass of each module over several ready lanes: the same fragments, in fewer passes."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from drawn_agents import WAYS, Drawn, drawn_settings, fragments_of, made
from fragment_equality import assert_alike, in_time
from hypothesis import given, settings, strategies as st
from leftovers import join_loop_workers
from lost_agents import emitted_steps
from numbered_agents import NumberedAgents
from property_examples import examples
from serial_module import BreakingModule, SerialModule

from rollflow import ConnectorV2, DefaultModelConfig, Forward, MultiAgentRollout
from rollflow.nodes import LambdaConnector
from rollflow.nodes.stages.ring import JointForward
from rollflow.stream import ModuleError
from rollflow.stream.graph.background import AtWork
from rollflow.stream.graph.meter import NodeMeter

few = settings(max_examples=examples(20))
LARGEST = 3 * 4  # slots of agents in the largest lane that is drawn
GATHERING: dict[str, dict[str, Any]] = {
    "ready": {"forward": Forward(max_batch=2 * LARGEST)},
    "ready, in threads": {"forward": Forward(max_batch=2 * LARGEST), "where": "threads"},
    "waiting": {"forward": Forward(max_batch=2 * LARGEST, max_wait=1e-3)},
}


@few
@given(drawn_settings, st.integers(1, 6), st.sampled_from(list(GATHERING)), st.sampled_from(list(WAYS)))
def test_every_step_is_handed_out_and_every_version_is_that_of_its_pass(
    drawn: Drawn, count: int, how: str, way: str
) -> None:
    _, rollout = made(drawn, **GATHERING[how])
    fragments = WAYS[way](rollout, count)
    assert len(emitted_steps(fragments)) == rollout.num_steps
    assert rollout.lost == {}
    for fragment in fragments:
        for module_id in fragment.module_ids:
            columns = fragment.of_module(module_id)
            assert columns.gather("weight").tolist() == columns.gather("policy_version").tolist()


def passes_of(**options: Any) -> dict[str, int]:
    """Passes of each module in the 8 vector steps of three lanes, each with 4 agents that act at once."""
    drawn = Drawn(3, 3, 4, 0, 100, True, 8, 1, False, 5)
    _, rollout = made(drawn, num_fragments=1, **options)
    with rollout:
        assert len(list(rollout.fragments())) == 3
    return {module_id: len(module.passes.done) for module_id, module in rollout.module.items()}


def test_all_lanes_that_are_ready_go_into_one_pass_of_each_module() -> None:
    alone = passes_of()
    assert set(alone.values()) == {3 * 8}
    assert passes_of(forward=Forward(max_batch=12)) == {name: count // 3 for name, count in alone.items()}
    # Two lanes of 4 agents each, then the third and the first, which has made a step meanwhile.
    assert passes_of(forward=Forward(max_batch=8)) == {name: count // 2 for name, count in alone.items()}
    assert passes_of(forward=Forward(max_batch=4)) == alone


class Passes:
    """Notes the lanes of each pass, which have one row each."""

    def __init__(self) -> None:
        self.done: list[list[str]] = []

    def rows(self, lane: str) -> int:
        return 1

    def forward_lanes(self, lanes: Sequence[str]) -> None:
        self.done.append(list(lanes))


def test_a_pass_begins_once_the_outputs_of_the_one_before_are_carried_on() -> None:
    passes = Passes()
    forward = JointForward(passes, max_batch=1)
    for lane in ("one", "two"):
        assert forward(lane) is None
    for number in (1, 2):
        assert list(forward.completed()) == [("one", "two")[number - 1]]
        assert len(passes.done) == number
    assert forward.in_flight == 0


def test_a_wait_for_lanes_is_no_work() -> None:
    meter = NodeMeter("module", counts_itself=True)
    forward = JointForward(Passes(), max_batch=2, max_wait=60.0)
    forward.take_meter(meter)
    forward("one")
    with AtWork([meter]):  # as a run waits
        assert list(forward.completed()) == []
    assert meter.busy_ns == 0
    forward.hasten()
    assert list(forward.completed()) == ["one"]
    assert meter.busy_ns > 0
    assert meter.works_since is None


class Doubles(ConnectorV2):
    """A piece of a user's, which is run for each lane alone."""

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.foreach_batch_item_change_in_place(batch, "vf_preds", lambda value, *whose: 2 * value)
        return batch


def test_pieces_that_know_one_lane_at_a_time_get_the_rows_of_one() -> None:
    drawn = Drawn(3, 3, 4, 2, 9, False, 8, 1, True, 7)
    options: dict[str, Any] = {"module_to_env_connector": lambda part: Doubles()}
    together = in_time(fragments_of(drawn, forward=Forward(max_batch=12), **options))
    assert_alike(together, in_time(fragments_of(drawn, **options)))
    for fragment in together:
        for module_id in fragment.module_ids:
            columns = fragment.of_module(module_id)
            assert columns.gather("vf_preds").tolist() == (2 * columns.gather("seen")[:, 4]).tolist()


@pytest.mark.slow
def test_stateful_modules_keep_every_agents_own_state() -> None:
    def states(**options: Any) -> list[Any]:
        makers = [partial(NumberedAgents, slot, agents=3, nested=0, length=7) for slot in range(3)]
        config, kept = DefaultModelConfig(use_lstm=True, lstm_cell_size=4, max_seq_len=4, fcnet_hiddens=(8,)), []
        rollout = MultiAgentRollout(
            makers, lanes=3, module=None, model_config=config, fragment_length=9, num_fragments=2, seed=3, **options
        )
        with rollout:
            for fragment in in_time(list(rollout.fragments())):
                columns = fragment.of_module("default_policy")
                kept.append((columns.gather("actions"), columns.gather("action_dist_inputs")))
        return kept

    for (actions, logits), (same, alike) in zip(states(**GATHERING["ready"]), states(), strict=True):
        assert actions.tolist() == same.tolist()
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(alike))


@pytest.mark.parametrize("how", ["ready", "waiting"])
def test_a_module_that_raises_is_named_with_its_lanes_and_its_batch(how: str) -> None:
    join_loop_workers()
    before = set(threading.enumerate())
    drawn = Drawn(2, 2, 4, 0, 9, True, 8, 1, False, 1)
    modules = {"plain 0": SerialModule(), "plain 1": BreakingModule(1)}
    envs, rollout = made(drawn, module=modules, **GATHERING[how])
    with pytest.raises(ZeroDivisionError, match="no more") as caught, rollout:
        list(rollout.fragments())
    notes = "\n".join(caught.value.__notes__)
    assert "module 'plain 1', lanes 0, 1, batch: 'obs' [4, 5]" in notes
    assert "in node 'module'" in notes
    join_loop_workers()
    assert set(threading.enumerate()) <= before
    assert all(env.closed for env in envs)


def test_lanes_whose_batches_differ_are_refused() -> None:
    odd = LambdaConnector(lambda batch, shared_data: batch | ({"odd": batch["obs"]} if shared_data["lane"] else {}))
    drawn = Drawn(2, 2, 2, 0, 9, True, 8, 1, False, 1)
    _, rollout = made(drawn, forward=Forward(max_batch=4), env_to_module_connector=lambda part: [Late(), odd])
    expected = r"lanes that go into one forward pass have batches of \['obs', 'odd'\]; \['obs'\], expected the same"
    with pytest.raises(ModuleError, match=expected), rollout:
        next(iter(rollout.fragments()))


class Late(ConnectorV2):
    """Puts observations into the batch itself."""

    def __call__(self, *, batch: dict[str, Any], episodes: Any, **kwargs: Any) -> dict[str, Any]:
        for episode in self.single_agent_episode_iterator(episodes):
            self.add_batch_item(batch, "obs", episode.get_observations(-1), episode)
        return batch


def test_explain_shows_the_bounds_of_a_pass() -> None:
    drawn = Drawn(2, 2, 2, 0, 9, True, 8, 1, False, 1)
    for options, text in (
        ({"forward": Forward(max_batch=4)}, "up to 4 slots a pass"),
        ({"forward": Forward(max_batch=4, max_wait=0.002)}, "up to 4 slots a pass, waits 2 ms"),
    ):
        rollout = made(drawn, **options)[1]  # type: ignore[arg-type]
        assert text in rollout.explain()
        rollout.close()
