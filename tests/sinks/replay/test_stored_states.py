"""States of a module with memory, as a replay keeps them: the one before each step, whatever the steps come from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from replayed import Played, insert_all

from rollflow import DatasetSink, DatasetSource, Replay, RLModule
from rollflow.sinks import Newest, Sequences
from rollflow.stream import ReplayError


class Counter(RLModule):
    """A module whose state is the number of steps in the episode so far, which observations name as well."""

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {"steps": torch.zeros(1)}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        obs, steps = batch["obs"], batch["state_in"]["steps"]
        made = obs.shape[1] if obs.ndim == 3 else 1
        return {"actions": torch.zeros(obs.shape[:-1], dtype=torch.long), "state_out": {"steps": steps + made}}


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(2, 12, lengths=(1, 12), module=Counter)


def filled(fragments: Any, **options: Any) -> Replay:
    replay = Replay(500, seed=0, **options)
    insert_all(replay, fragments)
    return replay


def test_each_step_has_the_state_before_it(played: Played) -> None:
    batch = filled(played.fragments, sampler=Newest()).sample(80)
    assert batch["state_in"]["steps"][:, 0].tolist() == batch["obs"][:, 2].tolist()
    assert {0.0, 3.0, 5.0} < set(batch["state_in"]["steps"][:, 0].tolist())


def test_a_sequence_has_the_state_before_its_first_step(played: Played) -> None:
    batch = filled(played.fragments, sampler=Sequences(3, burn_in=2)).sample(64)
    assert batch["state_in"]["steps"][:, 0].tolist() == batch["obs"][:, 0, 2].tolist()


def test_steps_of_a_dataset_have_it_with_lookback_and_are_refused_without(played: Played, tmp_path: Path) -> None:
    with DatasetSink(tmp_path) as sink:
        for fragment in played.fragments:
            sink(fragment)
    batch = filled(DatasetSource(tmp_path, batch_size=4).fragments(), sampler=Newest()).sample(80)
    assert batch["state_in"]["steps"][:, 0].tolist() == batch["obs"][:, 2].tolist()
    with pytest.raises(ReplayError, match="expected a lookback of 1 or more"):
        filled(DatasetSource(tmp_path, batch_size=4, lookback=0).fragments())
