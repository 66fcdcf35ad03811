"""A user's pieces and modules in a saved policy: named, allowed, upgraded, or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_policies import sign
from drawn_policies import ACTIONS, BOX, SPACES
from own_policy_parts import Bare, Doubled, Forgetful, OwnModule

from rollflow import ConnectorV2, Policy
from rollflow.nodes import LambdaConnector
from rollflow.policy import register_connector, register_function, register_module
from rollflow.stream import ConnectorError, PolicyError
from rollflow.stream.data.errors import StateError, refused
from rollflow.stream.data.stored_files import checksums


def own_policy(*pieces: ConnectorV2) -> Policy:
    """Policy of a user's module and pieces."""
    return Policy(OwnModule(BOX, ACTIONS["discrete"], model_config={"outputs": 4}), pieces, **SPACES)


def test_a_users_classes_are_imported_where_they_are_allowed_alone(tmp_path: Path) -> None:
    policy = own_policy(Doubled(2.0, offsets=(1, np.float32(2.5))))
    policy.act(np.ones(3, np.float32))
    policy.save(tmp_path / "p")
    with pytest.raises(PolicyError, match=r"'own_policy_parts:Doubled' is not allowed .* allow=\['own_policy_parts'\]"):
        Policy.load(tmp_path / "p")
    loaded = Policy.load(tmp_path / "p", allow=["own_policy_parts"])
    assert isinstance(loaded.module, OwnModule)
    piece = loaded.env_to_module["Doubled"]
    assert (piece.factor, piece.offsets, piece.seen) == (2.0, (1, np.float32(2.5)), 1)


def test_what_is_registered_needs_no_allowance(tmp_path: Path) -> None:
    class Local(Doubled):
        pass

    with pytest.raises(PolicyError, match=r"<locals>.Local can't be imported .* register_connector"):
        own_policy(Local(2.0)).save(tmp_path / "p")
    register_connector("local doubled", Local)
    register_module("own module", OwnModule)
    own_policy(Local(2.0)).save(tmp_path / "p")
    assert type(Policy.load(tmp_path / "p").env_to_module[0]) is Local
    with pytest.raises(PolicyError, match=r"'local doubled' is .* already"):
        register_connector("local doubled", Doubled)


def test_a_lambda_is_refused_unless_it_has_a_name(tmp_path: Path) -> None:
    noop = lambda batch: None  # noqa: E731
    with pytest.raises(PolicyError, match=r"env_to_module/.*register_function"):
        own_policy(LambdaConnector(noop)).save(tmp_path / "p")
    assert not (tmp_path / "p").exists()
    register_function("no operation", noop)
    own_policy(LambdaConnector(noop)).save(tmp_path / "p")
    assert Policy.load(tmp_path / "p", allow=["own_policy_parts"]).env_to_module[0].function is noop


def test_a_piece_whose_state_would_be_lost_is_refused(tmp_path: Path) -> None:
    policy = own_policy(Forgetful())
    policy.act(np.ones(3, np.float32))
    policy.act(np.ones(3, np.float32))
    with pytest.raises(StateError, match="Forgetful changes 'count'"):
        policy.save(tmp_path / "p")


def test_a_module_that_does_not_say_how_it_is_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"Bare does not say how it is made; expected .* get_config"):
        Policy(Bare(), **SPACES).save(tmp_path / "p")


def test_programs_of_older_versions_are_left_alone_and_the_class_acts(tmp_path: Path) -> None:
    policy = own_policy()
    policy.save(tmp_path / "p")
    names = ("programs.json", "programs.safetensors")
    for name in names:
        (tmp_path / "p" / name).write_bytes(b"{}")
    sign(tmp_path / "p", lambda manifest: manifest["files"].update(checksums(dict.fromkeys(names, b"{}"))))
    loaded = Policy.load(tmp_path / "p", allow=["own_policy_parts"])
    assert loaded.act(np.ones(3, np.float32)) == policy.act(np.ones(3, np.float32))
    loaded.save(tmp_path / "q")
    assert not set(names) & {each.name for each in (tmp_path / "q").iterdir()}


MISSING = [
    (("name", "own_policy_parts:Gone"), r"has no attribute 'Gone'; it was looked for in .*own_policy_parts.py; .* or "),
    (
        ("name", "gone_module:Gone"),
        r"No module named 'gone_module'; it was looked for in .*support.*; expected it there, ",
    ),
    (("name", "gone"), r"no module of the name 'gone'; expected register_module\('gone', …\) before"),
    (("config", None), r"own module was saved without the arguments of its constructor, as a program"),
]


@pytest.mark.parametrize(("change", "text"), MISSING)
def test_a_class_that_is_not_there_is_named_with_what_helps(change: Any, text: str, tmp_path: Path) -> None:
    register_module("own module", OwnModule)
    own_policy().save(tmp_path / "p")
    sign(tmp_path / "p", lambda manifest: manifest["module"].update([change]))
    with pytest.raises(PolicyError, match=f"{text}.*saved with onnx=True acts without the class: OnnxPolicy.load"):
        Policy.load(tmp_path / "p", allow=["own_policy_parts", "gone_module"])


def test_a_piece_that_does_not_come_back_is_found_when_it_is_saved(tmp_path: Path) -> None:
    policy = own_policy(Doubled(2.0))
    policy.env_to_module[0].factor = 3.0  # which its constructor's arguments do not say
    with pytest.raises(PolicyError, match="Doubled is the first part that differs"):
        policy.save(tmp_path / "p")


def test_a_refusal_of_several_lines_is_told_in_full() -> None:
    faults = "n is 1, expected one of these:\n  observation['speed'] is missing\n  observation['x'] has shape [2]"
    for error in (ConnectorError(faults), ValueError(faults)):
        with pytest.raises(PolicyError) as refusal, refused("the piece"):
            raise error
        assert str(refusal.value).startswith(f"the piece: {type(error).__name__}: {faults}")
    with pytest.raises(PolicyError) as refusal, refused("the piece"):
        raise RuntimeError("torch's own\nDeclaration: …")
    assert "Declaration" not in str(refusal.value)
