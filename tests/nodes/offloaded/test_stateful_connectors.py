"""State of connector pieces in worker processes: none is lost without a word."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from numbered_module import NumberedEnv, NumberedModule
from places import rollout_at

from rollflow import ConnectorV2, Rollout
from rollflow.stream import StateError


class Counts(ConnectorV2):
    """Keeps count of its calls, and makes noise, without declaring any state."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.scratch = 0, np.random.default_rng(0)

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.count += 1
        return batch


class Noises(Counts):
    """Has nothing to lose."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.scratch.normal()
        return batch


class Saves(Counts):
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"count": self.count}


class Restores(Saves):
    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Merges(Restores):
    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"count": max(state["count"] for state in states)}


def run(piece: type[ConnectorV2], lanes: int, *, after: bool, place: str = "rollouts") -> Rollout:
    makers = [partial(NumberedEnv, slot) for slot in range(lanes)]
    connector: Any = {"module_to_env_connector" if after else "env_to_module_connector": lambda env: piece()}
    acts: Any = {"module": NumberedModule(), **connector}
    options: Any = {"workers": lanes} if place == "rollouts" else {}
    options |= {"envs": {"lanes": lanes}, "fragment_length": 4, "num_fragments": 4, "seed": 0}
    with rollout_at(place, makers, acts=acts, **options) as made, made as rollout:
        assert len(list(rollout.fragments())) == 4 * lanes
    return rollout


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("piece", "told"),
    [
        (
            Counts,
            "Counts changes 'count' while it runs but declares no state, .*; expected get_state and set_state, and",
        ),
        (Saves, "Saves has a state but no set_state of its own, .*; expected a set_state"),
    ],
)
def test_state_that_a_worker_could_not_send_ends_the_run(piece: Any, told: str, after: bool) -> None:
    with pytest.raises(StateError, match=told):
        run(piece, 1, after=after)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("place", ["rollouts", "hosted rollouts"])
def test_states_of_two_places_are_not_lost_for_want_of_merging(place: str, after: bool) -> None:
    told = "Restores is given 2 different states to merge, but it has no merge_states of its own"
    with pytest.raises(StateError, match=told):
        run(Restores, 2, after=after, place=place)


def test_one_workers_state_needs_no_merging() -> None:
    assert run(Restores, 1, after=True).module_to_env.get_state() == {"Restores": {"count": 16}}


@pytest.mark.slow
@pytest.mark.parametrize("piece", [Noises, Merges])
def test_pieces_with_nothing_to_lose_or_all_declared_run_in_two_workers(piece: Any) -> None:
    rollout = run(piece, 2, after=False)
    assert (rollout.env_to_module.get_state() == {}) == (piece is Noises)


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
def test_a_state_that_workers_would_overwrite_is_refused_while_they_run(after: bool) -> None:
    connector: Any = {"module_to_env_connector" if after else "env_to_module_connector": lambda env: Merges()}
    rollout = Rollout(
        partial(NumberedEnv, 0), where="rollouts", workers=1, module=NumberedModule(), fragment_length=4, **connector
    )
    pipeline = rollout.module_to_env if after else rollout.env_to_module
    pipeline.set_state({"Merges": {"count": 100}})
    with rollout:
        next(iter(rollout.fragments()))
        told = f"{pipeline.name} is given a state, but the workers or hosts of a rollout"
        with pytest.raises(StateError, match=told):
            pipeline.set_state({"Merges": {"count": 0}})
        next(iter(rollout.fragments()))
        assert pipeline.get_state()["Merges"]["count"] > 100
    pipeline.set_state({"Merges": {"count": 0}})
    assert pipeline.get_state() == {"Merges": {"count": 0}}


@pytest.mark.parametrize("where", ["inline", "processes"])
def test_a_state_that_is_in_use_here_is_set_while_it_runs(where: Any) -> None:
    rollout = Rollout(
        partial(NumberedEnv, 0), where=where, module=NumberedModule(), env_to_module_connector=lambda env: Merges()
    )
    with rollout:
        next(iter(rollout.fragments()))
        rollout.env_to_module.set_state({"Merges": {"count": 1000}})
        next(iter(rollout.fragments()))
    assert rollout.env_to_module.get_state()["Merges"]["count"] > 1000
