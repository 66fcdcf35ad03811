"""Formats of saved policies: those of every format there was are still read."""

from pathlib import Path

import numpy as np

from rollflow import Policy
from rollflow.nodes.policies.artifact_files import POLICY

ARTIFACTS = Path(__file__).parent / "artifacts"
FIRST, LAST = [-0.0012431, -0.0013925, -0.0005472, -0.0004551], [1.99e-05, -0.002635, -0.0007812, -0.0014682]  # logits


def test_there_is_an_artifact_of_every_format() -> None:
    assert {each.name for each in ARTIFACTS.iterdir()} == {f"format_{each}" for each in range(1, POLICY.format + 1)}


def test_a_policy_of_format_1_acts_as_it_did() -> None:
    policy = Policy.load(ARTIFACTS / "format_1")
    assert policy.trained_on == {"environment": "drawn", "policy_version": 12}
    pieces = ["PrevActionsPrevRewards", "FlattenObservations", "MeanStdFilter", "FrameStacking"]
    assert policy.env_to_module.names[:4] == pieces
    assert policy.env_to_module["MeanStdFilter"].count == 10
    logits = []
    for step in range(-4, 5):
        policy.act(np.full(2, step / 4, np.float32), reward=step)
        logits.append(policy.outputs["action_dist_inputs"][0])
    np.testing.assert_allclose(logits[0], FIRST, atol=1e-5)
    np.testing.assert_allclose(logits[-1], LAST, atol=1e-5)
