"""Policies that act by programs, without the classes of their modules."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from altered_policies import change_arrays, no_change, sign
from drawn_policies import ACTIONS, BOX, SPACES, assert_plays_the_same, drawn_policy, logged_rollout
from own_policy_parts import Bare, Choosy, Frozen, Gated, OwnModule, Unnamed

from rollflow import Policy
from rollflow.nodes.modules.distribution import distribution_for
from rollflow.nodes.policies.artifact_files import array_bytes, arrays_of, read_files
from rollflow.nodes.policies.program import ProgramModule
from rollflow.stream import ModuleError, PolicyError

CASES = [("box", "all", False), ("box", "previous", True), ("masked", "filter", True), ("nested", "none", False)]
CASES += [("image", "frames", False), ("discrete", "one_hot", True)]


def own(cls: Any, outputs: int = 4) -> Policy:
    """Policy with a module of a class that takes a number of outputs."""
    return Policy(cls(BOX, ACTIONS["discrete"], model_config={"outputs": outputs}), **SPACES)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "pieces", "lstm"), CASES)
def test_a_program_acts_as_the_class_did_and_is_saved_again_as_the_same_bytes(
    space: str, pieces: str, lstm: bool, tmp_path: Path
) -> None:
    policy = drawn_policy(space, pieces, lstm=lstm, kind=Gated)
    policy.save(tmp_path / "a.zip", program=True)
    loaded = Policy.load(tmp_path / "a.zip")
    assert isinstance(loaded.module, ProgramModule)
    assert_plays_the_same(policy, loaded, space)
    loaded.save(tmp_path / "b.zip")
    by_class = Policy.load(tmp_path / "b.zip", allow=["own_policy_parts"])
    assert isinstance(by_class.module, Gated)
    by_class.save(tmp_path / "c.zip", program=True)
    assert len({(tmp_path / f"{name}.zip").read_bytes() for name in "abc"}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("actions", ["box", "several", "dict"])
def test_a_program_chooses_in_every_space_of_actions(actions: str, tmp_path: Path) -> None:
    policy = drawn_policy("box", "none", actions, kind=Gated, explore=True)
    policy.save(tmp_path / "p", program=True)
    loaded = Policy.load(tmp_path / "p", explore=False)
    still = Policy(policy.module, policy.env_to_module, policy.module_to_env)
    assert_plays_the_same(still, loaded, "box")


@pytest.mark.slow
def test_weights_are_published_to_a_program(tmp_path: Path) -> None:
    policy = drawn_policy("box", "all", lstm=True, kind=Gated)
    policy.save(tmp_path / "p", program=True)
    loaded = Policy.load(tmp_path / "p")
    weights = {name: value + 0.25 for name, value in policy.module.state_dict().items()}
    policy.publish(weights)
    loaded.publish(weights)
    assert_plays_the_same(policy, loaded, "box")
    loaded.save(tmp_path / "q")
    by_class = Policy.load(tmp_path / "q", allow=["own_policy_parts"])
    assert_plays_the_same(Policy.load(tmp_path / "q"), by_class, "box")


def test_a_program_does_not_train(tmp_path: Path) -> None:
    own(Unnamed).save(tmp_path / "p", program=True)
    with pytest.raises(ModuleError, match=r"own_policy_parts:Unnamed is here as a program that acts"):
        Policy.load(tmp_path / "p").module.forward_train({"obs": torch.zeros(2, 3)})


@pytest.mark.slow
def test_a_rollout_saves_programs(tmp_path: Path) -> None:
    module = Gated(*SPACES.values(), model_config={"fcnet_hiddens": (8,)})
    _, rollout = logged_rollout("box", "discrete", "filter", slots=1, seed=1, module=module)
    with rollout:
        rollout.save_policy(tmp_path / "p", program=True)
    assert isinstance(Policy.load(tmp_path / "p").module, ProgramModule)


@pytest.mark.slow
def test_a_class_that_nobody_can_import_is_saved_with_a_program_alone(tmp_path: Path) -> None:
    class Local(OwnModule):
        """Module of a function."""

    with pytest.raises(PolicyError, match="can't be imported by another program"):
        own(Local).save(tmp_path / "p")
    for cls in (Local, Bare):
        policy = own(cls) if cls is Local else Policy(Bare(), **SPACES)
        policy.save(tmp_path / "p", program=True)
        loaded = Policy.load(tmp_path / "p", allow=["own_policy_parts", "tests"])
        assert isinstance(loaded.module, ProgramModule)
        assert_plays_the_same(policy, loaded, "box")
        loaded.save(tmp_path / "q")
        assert (tmp_path / "p" / "policy.json").read_bytes() == (tmp_path / "q" / "policy.json").read_bytes()


# What has no program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "text"), [(Choosy, "Choosy.forward_exploration has no program"), (Frozen, "does not do what it did")]
)
def test_a_module_that_torch_can_not_follow_is_refused(cls: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=text):
        own(cls).save(tmp_path / "p", program=True)
    assert not (tmp_path / "p").exists()


def test_a_distribution_of_its_own_is_refused(tmp_path: Path) -> None:
    policy = own(Unnamed)
    policy.module._distribution_made = None
    other = distribution_for(ACTIONS["several"])
    policy.module.get_inference_action_dist_cls = lambda: other
    with pytest.raises(PolicyError, match=r"get_inference_action_dist_cls\(\) gives .*expected that of its action"):
        policy.save(tmp_path / "p", program=True)


def test_without_a_program_the_class_is_needed(tmp_path: Path) -> None:
    own(Unnamed).save(tmp_path / "p")
    with pytest.raises(PolicyError, match=r"'own_policy_parts:Unnamed' is not allowed"):
        Policy.load(tmp_path / "p")


# On purpose


FORBIDDEN = ["os.system", "aten.from_file.default", "aten.relu_.default", "aten.__class__.x", "aten.set_.source_Tensor"]
FORBIDDEN += ["__import__", "attrgetter", "prim.device.default", "aten.relu.no", "aten._cholesky_solve_helper.default"]
HUGE = ["aten.full.default", [[1 << 20, 1 << 20], 0.0], {}]
MANY = ["aten.repeat.default", [{"value": 0}, [1 << 18, 1 << 12]], {}]
HOSTILE: list[Any] = [HUGE, MANY, ["aten.linear.default", [{"value": 99}], {}], ["aten.linear.default", [], {}], []]
HOSTILE += [["getitem", [{"value": 0}, "x"], {}], ["aten.relu.default", [{"dtype": "load"}], {}], "x", None]
HOSTILE += [["mul", [1 << 29, 1 << 29], {}], ["aten.relu.default", [{"value": True}], {}]]


def set_operation(name: Any) -> Callable[[dict[str, Any]], None]:
    """Have the first operation be another one."""
    return lambda program: program["operations"][0].__setitem__(0, name)


def insert_operation(operation: Any) -> Callable[[dict[str, Any]], None]:
    """Have an operation come before all others."""
    return lambda program: program["operations"].insert(0, operation)


def double(program: dict[str, Any]) -> None:
    """Give twice the logits."""
    program["operations"].append(["aten.add.Tensor", [{"value": 3}, {"value": 3}], {}])
    program["output"]["action_dist_inputs"] += 1


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    *((set_operation(name), "there is no operation") for name in [*FORBIDDEN, 3, None]),
    *((insert_operation(operation), "programs: ") for operation in HOSTILE),
    (lambda program: program["weights"].reverse(), "programs: forward_inference can't be run"),
    (double, "module is the first part that differs"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy that has programs."""
    folder = tmp_path_factory.mktemp("saved") / "p"
    own(Unnamed).save(folder, program=True)
    return folder


@pytest.mark.parametrize(("change", "text"), CHANGES, ids=range(len(CHANGES)))
def test_a_program_that_was_changed_is_refused(
    change: Callable[[dict[str, Any]], None], text: str, saved: Path, tmp_path: Path
) -> None:
    """The checksums fit, as somebody who means harm would make them."""
    folder = Path(shutil.copytree(saved, tmp_path / "p"))
    programs = json.loads((folder / "programs.json").read_text())
    change(programs["forward_inference"])
    (folder / "programs.json").write_text(json.dumps(programs))
    sign(folder, no_change)
    with pytest.raises(PolicyError, match=text):
        Policy.load(folder)


def test_arrays_that_a_program_does_not_name_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "p"))
    change_arrays(folder, "state.safetensors", lambda arrays: arrays.update({"module/more": np.zeros(2, np.float32)}))
    with pytest.raises(PolicyError, match=r"arrays that nothing uses: \['module/more'\]"):
        Policy.load(folder)


@pytest.mark.slow
def test_nothing_of_a_program_is_pickled_or_says_where_it_was_made(tmp_path: Path) -> None:
    drawn_policy("box", "all", lstm=True, kind=Gated).save(tmp_path / "p", program=True)
    _, files = read_files(tmp_path / "p")
    constants = arrays_of(files["programs.safetensors"], "programs.safetensors")
    assert array_bytes(constants) == files["programs.safetensors"]
    for text in (b"/", b"cpu", b"cuda", b"own_policy_parts"):
        assert text not in files["programs.json"].replace(b"$constant/", b"")
