"""A policy that is saved and loaded again: the same bytes, the same actions, in any program."""

import importlib
import os
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drawn_policies import ACTIONS, BOX, FITTING, OBSERVATIONS, SPACES, assert_plays_the_same, drawn_policy
from gymnasium import spaces

import rollflow.nodes
from rollflow import ConnectorV2, EpsilonGreedy, MeanStdFilter, Policy
from rollflow.aliases import HOMES
from rollflow.nodes import (
    AdaptActions,
    AdaptObservations,
    ClipRewards,
    ConnectorPipelineV2,
    EnvToModulePipeline,
    GaussianNoise,
    LambdaConnector,
    Linear,
    NormalizeAndClipActions,
    NStepReturns,
    RandomModule,
    Temperature,
)
from rollflow.nodes.policies.part_records import piece_of, record_of_piece
from rollflow.nodes.policies.space_text import described, space_of
from rollflow.policy import register_function
from rollflow.stream import PolicyError

ALLOW = ["drawn_policies"]


def policy_of(space: str, actions: str, pieces: str, **options: Any) -> Policy:
    """Policy taken from a rollout, with a card."""
    policy = drawn_policy(space, pieces, actions, **options)
    policy.trained_on = {"policy_version": 7, "env": "drawn", "returns": np.float32(1.5)}
    return policy


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files in a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


CASES = [(space, each, False, "discrete") for space in FITTING for each in FITTING[space]]
CASES += [
    (space, each, True, "discrete") for space, each in (("box", "all"), ("nested", "previous"), ("image", "frames"))
]
CASES += [("nested", "all", False, actions) for actions in ("box", "several", "dict")]


@pytest.mark.parametrize(("space", "pieces", "lstm", "actions"), CASES)
def test_what_is_loaded_is_saved_as_the_same_bytes(
    space: str, pieces: str, lstm: bool, actions: str, tmp_path: Path
) -> None:
    policy = policy_of(space, actions, pieces, lstm=lstm)
    policy.save(tmp_path / "a")
    loaded = Policy.load(tmp_path / "a", allow=ALLOW)
    loaded.save(tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert loaded.trained_on == policy.trained_on


@pytest.mark.parametrize("shares", [False, True])
def test_loading_draws_no_weights_and_leaves_none_out(shares: bool, tmp_path: Path) -> None:
    policy = policy_of("box", "discrete", "filter", vf_share_layers=shares)
    policy.save(tmp_path)
    drawn = torch.get_rng_state()
    loaded = Policy.load(tmp_path, allow=ALLOW).module
    assert torch.equal(torch.get_rng_state(), drawn)
    tensors = [*loaded.parameters(), *loaded.buffers()]
    assert all(tensor.device.type == "cpu" for tensor in tensors)
    assert [each.requires_grad for each in loaded.parameters()] == [True] * len(list(policy.module.parameters()))


@pytest.mark.parametrize("explore", [False, True])
def test_a_loaded_policy_acts_as_the_one_that_was_saved(explore: bool, tmp_path: Path) -> None:
    saved = policy_of("box", "box", "all", lstm=True, explore=explore)
    saved.save(tmp_path / "p")
    loaded = Policy.load(tmp_path / "p")
    assert loaded.explore is explore
    still = Policy(saved.module, saved.env_to_module, saved.module_to_env)
    assert_plays_the_same(still, Policy.load(tmp_path / "p", explore=False), "box")


def test_a_loaded_policy_samples_and_learns_where_it_is_asked_to(tmp_path: Path) -> None:
    policy_of("box", "discrete", "none").save(tmp_path / "p")
    Policy(RandomModule, [MeanStdFilter()], **SPACES).save(tmp_path / "q")
    drawn = [Policy.load(tmp_path / "p", explore=True, seed=seed) for seed in (1, 1, 2)]
    actions = [[int(policy.act(np.zeros(3, np.float32))) for _ in range(40)] for policy in drawn]
    assert actions[0] == actions[1] != actions[2]
    learning, frozen = Policy.load(tmp_path / "q", learns=True), Policy.load(tmp_path / "q")
    for policy in (learning, frozen):
        policy.act(np.ones(3, np.float32))
    assert (learning.env_to_module["MeanStdFilter"].count, frozen.env_to_module["MeanStdFilter"].count) == (1, 0)


def test_a_file_says_nothing_of_a_device(tmp_path: Path) -> None:
    before = EnvToModulePipeline.default(BOX, ACTIONS["discrete"], device="cuda:3")
    Policy(RandomModule, before, **SPACES).save(tmp_path / "p")
    manifest = (tmp_path / "p" / "policy.json").read_text()
    assert "device" not in manifest
    assert "cuda" not in manifest
    piece = Policy.load(tmp_path / "p").env_to_module["NumpyToTensor"]
    assert (piece.device, piece.pin_memory) == (None, False)


def test_saving_again_replaces_a_policy_and_nothing_else(tmp_path: Path) -> None:
    policy = policy_of("box", "discrete", "filter")
    policy.save(tmp_path / "p")
    policy.trained_on["policy_version"] = 8
    policy.save(tmp_path / "p")
    assert Policy.load(tmp_path / "p").trained_on["policy_version"] == 8
    assert [each.name for each in tmp_path.iterdir()] == ["p"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(PolicyError, match="something else at"):
        policy.save(tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"


def test_a_save_that_fails_leaves_the_policy_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("box", "discrete", "filter")
    policy.save(tmp_path / "p")
    before = contents(tmp_path / "p")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        policy.save(tmp_path / "p")
    assert contents(tmp_path / "p") == before
    assert [each.name for each in tmp_path.iterdir()] == ["p"]


# Every piece

RECIPES: dict[str, Any] = {
    "AdaptActions": lambda: AdaptActions(space=spaces.Discrete(3), fields={"action": "action[1]"}),
    "AdaptObservations": lambda: AdaptObservations(
        space=BOX, fields={"observation": ["observation['speed']", 2.0, 1.0]}
    ),
    "ClipRewards": lambda: ClipRewards(sign=True),
    "EpsilonGreedy": lambda: EpsilonGreedy(schedule=Linear(1.0, 0.1, 100)),
    "GaussianNoise": lambda: GaussianNoise(schedule=0.1),
    "NStepReturns": lambda: NStepReturns(n_step=3),
    "NormalizeAndClipActions": lambda: NormalizeAndClipActions(normalize_actions=True, clip_actions=False),
    "Temperature": lambda: Temperature(schedule=Linear(2.0, 0.1, 100)),
    "LambdaConnector": lambda: _named_function(),
}
ABSTRACT = {"ConnectorV2", "ObservationPreprocessor", "SingleAgentObservationPreprocessor"} | {
    "MultiAgentObservationPreprocessor",
    "ActingOrLearning",
    "ActionPiece",
    "LearnerPiece",
    "StepsConnector",
}


def unchanged(batch: dict[str, Any]) -> None:
    """Function of a connector piece."""


def _named_function() -> LambdaConnector:
    register_function("unchanged in test_saving", unchanged)
    return LambdaConnector(unchanged, lookback=2)


PIECES = [
    name
    for name in (
        *rollflow.__all__,
        *rollflow.nodes.__all__,
        *chain(*(vars(importlib.import_module(home)) for home in HOMES)),
    )
    if isinstance(each := getattr(rollflow.nodes, name, None), type) and issubclass(each, ConnectorV2)
]


@pytest.mark.parametrize("name", sorted(set(PIECES) - ABSTRACT))
def test_every_piece_of_rollflow_comes_back_as_it_was(name: str) -> None:
    cls = getattr(rollflow.nodes, name)
    piece = RECIPES.get(name, cls)()
    arrays: dict[str, Any] = {}
    record = record_of_piece(piece, "piece", arrays)
    assert record["name"] == f"rollflow.{cls.__name__}"
    again, _ = piece_of(record, "piece", dict(arrays), ())
    assert type(again) is type(piece)
    assert again.name == piece.name
    second: dict[str, Any] = {}
    assert record_of_piece(again, "piece", second) == record


def test_a_pipeline_within_a_pipeline_is_saved_with_its_pieces(tmp_path: Path) -> None:
    inner = ConnectorPipelineV2(connectors=[MeanStdFilter(), MeanStdFilter(clip_by_value=0.5)])
    policy = Policy(RandomModule, [inner], **SPACES, learns=True)
    policy.act(np.ones(3, np.float32))
    policy.act(np.zeros(3, np.float32))
    policy.save(tmp_path / "p")
    loaded = Policy.load(tmp_path / "p")
    assert loaded.env_to_module["ConnectorPipelineV2"].names == ["MeanStdFilter", "MeanStdFilter_2"]
    assert loaded.env_to_module.get_state() != {}


UNEVEN = spaces.Box(np.array([-np.inf, 0.1], np.float32), np.array([1e30, np.inf], np.float32))


@pytest.mark.parametrize("space", [*OBSERVATIONS.values(), *ACTIONS.values(), UNEVEN], ids=str)
def test_a_space_comes_back_from_its_description(space: spaces.Space[Any]) -> None:
    assert space_of(described(space), "space") == space
    assert str(space_of(described(space), "space")) == str(space)


def test_a_space_of_a_subclass_comes_back_as_its_base() -> None:
    class Bounded(spaces.Box):
        """A user's own."""

    space = spaces.Dict({"a": Bounded(-1, 1, (2,), np.float32)})
    assert type(space_of(described(space), "space")["a"]) is spaces.Box  # type: ignore[index]
