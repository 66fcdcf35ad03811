"""Train batches of multi-agent episodes: each module gets what its agents' episodes alone would give."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from drawn_plays import ACTED, ACTIONS, MODULES, OBSERVATIONS, OBSERVED, all_played, alone, modules, played
from drawn_turns import Told, turns
from hypothesis import given, settings, strategies as st
from piece_forms import equal
from property_examples import examples

from rollflow import ConnectorV2, nodes
from rollflow.nodes import LearnerConnectorPipeline
from rollflow.nodes.connectors.common.batches import module_by_module
from rollflow.stream import ConnectorError, ModuleError

plays = st.lists(turns(may_idle=True), min_size=1, max_size=3)

ROWS: dict[str, Callable[[bool], list[ConnectorV2]]] = {
    "columns alone": lambda several: [],
    "next observations and infos": lambda several: [
        nodes.AddNextObservationsFromEpisodesToTrainBatch(),
        nodes.AddInfosFromEpisodesToTrainBatch(),
    ],
    "returns to go of clipped rewards": lambda several: [
        nodes.ClipRewards(high=0.5),
        nodes.ComputeReturnsToGo(gamma=0.5),
    ],
    "advantages": lambda several: [nodes.GeneralAdvantageEstimation(gamma=0.9, lambda_=0.5)],
    "V-trace": lambda several: [nodes.VTrace(gamma=0.9)],
    "several steps": lambda several: [nodes.NStepReturns(n_step=2, gamma=0.5)],
    "stacks and what follows them": lambda several: [
        nodes.FrameStacking(num_frames=3, multi_agent=several, as_learner_connector=True),
        nodes.AddNextObservationsFromEpisodesToTrainBatch(),
        nodes.GeneralAdvantageEstimation(gamma=0.9, lambda_=0.5),
    ],
    "flat observations": lambda several: [
        nodes.FlattenObservations(multi_agent=several, as_learner_connector=True),
        nodes.NStepReturns(n_step=3),
    ],
    "one more step": lambda several: [nodes.AddOneTsToEpisodesAndTruncate()],
}


def train_batch(pieces: list[ConnectorV2], episodes: list[Any], module: Any, several: bool, **given_: Any) -> Any:
    spaces = (OBSERVATIONS, ACTIONS) if several else (OBSERVED, ACTED)
    pipeline = LearnerConnectorPipeline.default(*spaces, pieces, multi_agent=several, **given_)
    return pipeline(rl_module=module, episodes=episodes)


def check_each_module(pieces: Callable[[bool], list[ConnectorV2]], tolds: list[Told], **given_: Any) -> None:
    numpy, states = given_.pop("numpy"), given_.pop("states", {})
    episodes = all_played(tolds, numpy=numpy)
    every = [each for episode in episodes for each in episode.agent_episodes.values()]
    of_module = {
        module: [alone(each) for each in every if each.module_id == module and len(each)] for module in ("m", "n")
    }
    made = train_batch(pieces(True), episodes, modules(**states), several=True, **given_)
    assert set(made) == {module for module, theirs in of_module.items() if theirs}
    for module, batch in made.items():
        stateful = states.get(module, False)
        options = {**given_, "stateful": stateful} if "stateful" in given_ else given_
        rl_module = modules(**states)[module]
        equal(batch, train_batch(pieces(False), of_module[module], rl_module, several=False, **options))


@pytest.mark.parametrize("row", ROWS)
@given(tolds=plays, numpy=st.booleans())
@settings(max_examples=examples(25))
def test_each_module_gets_what_its_agents_episodes_give(row: str, tolds: list[Told], numpy: bool) -> None:
    check_each_module(ROWS[row], tolds, numpy=numpy)


@given(tolds=plays, m=st.booleans(), n=st.booleans())
@settings(max_examples=examples(50))
def test_stateful_modules_get_rows_and_others_steps(tolds: list[Told], m: bool, n: bool) -> None:
    check_each_module(ROWS["next observations and infos"], tolds, numpy=True, states={"m": m, "n": n}, stateful=True)


@given(tolds=plays, data=st.data())
@settings(max_examples=examples(25))
def test_chunks_of_one_episode_stay_apart(tolds: list[Told], data: st.DataObject) -> None:
    """Two chunks of it, whose agents' items have the same keys, with values of each chunk's own end."""
    whole = played(tolds[0])
    at = data.draw(st.integers(0, len(whole)))
    chunks = [whole[:at], whole[at:]]
    every = [each for chunk in chunks for each in chunk.agent_episodes.values()]
    order = list(dict.fromkeys(each.agent_id for each in every))
    made = train_batch(ROWS["advantages"](True), chunks, modules(), several=True)
    for module, batch in made.items():
        theirs = [each for each in every if each.module_id == module and len(each)]
        by_agent = sorted(theirs, key=lambda each: order.index(each.agent_id))
        apart = [alone(each) for each in by_agent]
        for place, each in enumerate(apart):
            each.id_ = f"{place}"
        equal(batch, train_batch(ROWS["advantages"](False), apart, modules()[module], several=False))


TWO = Told()
TWO.reset(["a", "b"])
for _ in range(3):
    TWO.go_on({"a": (True, False, True, ""), "b": (True, False, True, "")})


def test_pieces_behind_the_mapping_take_batches_by_modules() -> None:
    behind = LearnerConnectorPipeline.default(OBSERVATIONS, ACTIONS, multi_agent=True)
    behind.append(nodes.GeneralAdvantageEstimation())
    before = train_batch([nodes.GeneralAdvantageEstimation()], [played(TWO)], modules(), several=True)
    made = behind(rl_module=modules(), episodes=[played(TWO)])
    assert made.keys() == before.keys() == {"m", "n"}
    for module in made:
        equal({column: made[module][column] for column in before[module]}, before[module])


def test_one_step_more_is_each_agents() -> None:
    episode = played(TWO)
    batch = train_batch([nodes.AddOneTsToEpisodesAndTruncate()], [episode], modules(), several=True)
    assert {module: each["loss_mask"].tolist() for module, each in batch.items()} == {
        "m": [True, True, True, False],
        "n": [True, True, True, False],
    }
    assert all(each.is_truncated for each in episode.agent_episodes.values())


def test_a_module_by_itself_serves_all_agents() -> None:
    batch = train_batch([nodes.GeneralAdvantageEstimation()], [played(TWO)], modules()["m"], several=True)
    own = train_batch([nodes.GeneralAdvantageEstimation()], [played(TWO)], modules(), several=True)
    equal(batch["m"], own["m"])
    assert not np.array_equal(batch["n"]["value_targets"], own["n"]["value_targets"])


def test_what_one_module_lacks_is_told_with_its_name() -> None:
    with pytest.raises(ConnectorError, match="mapped to module 'n', expected one of: m"):
        train_batch([nodes.GeneralAdvantageEstimation()], [played(TWO)], {"m": modules()["m"]}, several=True)
    without = {**modules(), "n": object()}
    with pytest.raises(ModuleError, match="module 'object' has no compute_values") as told:
        train_batch([nodes.GeneralAdvantageEstimation()], [played(TWO)], without, several=True)
    assert "for module 'n'" in told.value.__notes__


class Weighing(ConnectorV2):
    """Adds the module's weight, and remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    @module_by_module
    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, shared_data: Any = None, **kwargs: Any) -> Any:
        self.given.append((shared_data.get("for all"), shared_data.get("own")))
        shared_data["own"] = rl_module.weight
        for episode in episodes:
            self.add_n_batch_items(batch, "weights", np.full(len(episode), rl_module.weight), len(episode), episode)
        return batch


def test_a_piece_of_ones_own_is_called_for_each_module() -> None:
    shared: dict[str, Any] = {"for all": 1}
    piece = Weighing()
    pipeline = LearnerConnectorPipeline.default(OBSERVATIONS, ACTIONS, [piece], multi_agent=True)
    call: Any = {"rl_module": modules(), "episodes": [played(TWO)], "shared_data": shared}
    batch = pipeline(**call)
    assert {module: each["weights"].tolist() for module, each in batch.items()} == {"m": [0.25] * 3, "n": [-0.5] * 3}
    pipeline(**call)
    assert piece.given == [(1, None), (1, None), (1, 0.25), (1, -0.5)], "what it leaves is the same module's next time"
    assert "own" not in shared


class Short(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in list(self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False))[:1]:
            self.add_n_batch_items(batch, "weights", [1.0, 2.0], 2, episode)
        return batch


def test_columns_of_a_module_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConnectorError, match="column 'weights' of module 'm' has 2 rows beside 'obs' with 3 of 1"):
        train_batch([Short()], [played(TWO)], modules(), several=True)
    piece = nodes.ComputeReturnsToGo()
    call: Any = {"rl_module": None, "episodes": [played(TWO)]}
    with pytest.raises(ConnectorError, match=r"column 'rewards' is list, expected .* told apart by modules \(m, n\)"):
        piece(batch={"rewards": [1.0] * 6}, **call)
    assert MODULES["c"] == "m"
