"""ONNX programs of whole policies: in onnxruntime they do what the policies do, and no torch is needed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered_policies import no_change, sign
from drawn_policies import SPACES, assert_plays_the_same, drawn_policy
from extras import needs
from own_policy_parts import Gated
from piece_forms import OneByOne

from rollflow import EpsilonGreedy, FrameStacking, MeanStdFilter, Policy
from rollflow.nodes import GaussianNoise, Linear, OneHotObservations, RandomModule, Temperature
from rollflow.policy import OnnxPolicy
from rollflow.stream import PolicyError

onnx, onnxruntime = needs("onnx"), needs("onnxruntime", "onnxscript")

Saved = Callable[..., Path]

CASES = [
    ("box", "none", False, "discrete"),
    ("box", "all", True, "box"),
    ("box", "frames", False, "several"),
    ("box", "previous", True, "discrete"),
    ("masked", "filter", True, "discrete"),
    ("nested", "previous", False, "dict"),
    ("nested", "none", False, "dict"),
    ("image", "frames", False, "discrete"),
    ("discrete", "one_hot", True, "box"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Gives the folder of a policy that is saved with an ONNX program, which takes seconds, once for all tests.

    Its pieces would explore if they were told to, and its weights were published last.
    """

    @cache
    def saved(space: str, pieces: str, lstm: bool, actions: str) -> Path:
        parts = drawn_policy(space, pieces, actions, lstm=lstm)
        for piece in (EpsilonGreedy, GaussianNoise, Temperature):
            parts.module_to_env.insert_before("NormalizeAndClipActions", piece(schedule=Linear(1.0, 0.5, 100)))
        policy = Policy(parts.module, parts.env_to_module, parts.module_to_env)
        policy.publish({name: value * 2 + 0.1 for name, value in policy.module.state_dict().items()})
        policy.save(folder := tmp_path_factory.mktemp("saved") / "p", onnx=True)
        return folder

    return saved


@pytest.mark.slow
@pytest.mark.parametrize(("space", "pieces", "lstm", "actions"), CASES)
def test_an_onnx_program_plays_as_its_policy(space: str, pieces: str, lstm: bool, actions: str, saved: Saved) -> None:
    folder = saved(space, pieces, lstm, actions)
    assert_plays_the_same(Policy.load(folder), OnnxPolicy.load(folder), space)


@pytest.mark.slow
def test_a_users_module_is_exported(tmp_path: Path) -> None:
    policy = drawn_policy("box", "all", lstm=True, kind=Gated)
    policy.export_onnx(tmp_path / "p.onnx")
    assert_plays_the_same(policy, OnnxPolicy.load(tmp_path / "p.onnx"), "box")


WITHOUT_TORCH = """
import sys

import numpy as np

from rollflow.policy import OnnxPolicy

policy = OnnxPolicy.load(sys.argv[1])
for step, observation in enumerate(np.load("observations.npy")):
    print(int(policy.act(observation, float(step))))
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "onnx", "onnxscript", "cloudpickle")]
"""


@pytest.mark.slow
def test_it_acts_in_a_process_without_torch(tmp_path: Path, saved: Saved) -> None:
    folder = saved("box", "previous", True, "discrete")
    policy = Policy.load(folder)
    observations = np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    np.save(tmp_path / "observations.npy", observations)
    expected = [int(policy.act(observation, float(step))) for step, observation in enumerate(observations)]
    command = [sys.executable, "-c", WITHOUT_TORCH, str(folder)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert not ran.returncode, ran.stderr
    assert [int(line) for line in ran.stdout.split()] == expected


@pytest.mark.slow
def test_onnxruntime_alone_runs_it_by_the_names_of_its_inputs(saved: Saved) -> None:
    folder = saved("box", "all", True, "box")
    policy = Policy.load(folder)
    session = onnxruntime.InferenceSession(str(folder / "policy.onnx"), providers=["CPUExecutionProvider"])
    inputs = {each.name: each.shape[1:] for each in session.get_inputs()}
    assert inputs == {"obs": [3], "begins": [], "memory.0": [1, 3], "memory.1": [6], "memory.2": [6]}
    memory = {name: np.full((1, *inputs[name]), np.nan, np.float32) for name in inputs if "memory" in name}
    rng = np.random.default_rng(0)
    for step in range(6):
        observation = rng.normal(size=3).astype(np.float32)
        given = {"obs": observation[None], "begins": np.array([step == 0]), **memory}
        names = [each.name for each in session.get_outputs()]
        made = dict(zip(names, session.run(None, given), strict=True))
        memory = {name: made[f"next_{name}"] for name in memory}
        np.testing.assert_allclose(made["actions"][0], policy.act(observation), 1e-5, 1e-5)


@pytest.mark.slow
def test_a_program_is_checked_and_says_nothing_of_where_it_was_made(saved: Saved) -> None:
    program = saved("nested", "previous", False, "dict") / "policy.onnx"
    model = onnx.load(program)
    onnx.checker.check_model(model)
    assert [each.key for each in model.metadata_props] == ["rollflow"]
    assert b".py" not in program.read_bytes()


@pytest.mark.slow
def test_a_program_is_there_where_it_is_asked_for(tmp_path: Path, saved: Saved) -> None:
    Policy.load(saved("box", "none", False, "discrete")).save(tmp_path / "q")
    with pytest.raises(PolicyError, match=r"has no policy.onnx, expected a policy saved with onnx=True"):
        OnnxPolicy.load(tmp_path / "q")


# What has no ONNX program


REFUSED = [
    (
        lambda: Policy(RandomModule, [OneByOne()], **SPACES),
        r"'OneByOne' \(OneByOne\) has no tensor form, .*expected none but Adapt",
    ),
    (lambda: drawn_policy("box", "listed"), "has no tensor form"),
    (lambda: drawn_policy("box", "none", explore=True), "samples its actions.*expected explore=False"),
    (lambda: Policy(RandomModule, [MeanStdFilter()], **SPACES, learns=True), "'MeanStdFilter' learns while it acts"),
    (
        lambda: Policy(RandomModule, [FrameStacking(num_frames=2), OneHotObservations()], **SPACES),
        "'OneHotObservations' rewrites observations behind FrameStacking",
    ),
]


@pytest.mark.parametrize(("make", "text"), REFUSED)
def test_what_has_no_tensor_form_is_named(make: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=text):
        make().export_onnx(tmp_path / "p.onnx")
    assert not (tmp_path / "p.onnx").exists()


# What is not as it should be


ZEROS = np.zeros(3, np.float32)
WRONG = [
    ({"observation": np.zeros(4, np.float32)}, r"'obs' is float32\[1, 4\], expected float32\[1, 3\]"),
    ({"observation": np.zeros(3, np.complex64)}, "'obs' is complex64"),
    ({"observation": {"a": ZEROS}}, "'obs'"),
    ({"observation": np.full(3, np.nan, np.float32)}, "'obs' is not finite"),
    ({"observation": [ZEROS, [1]]}, "'obs' is no array"),
    ({"observation": ZEROS}, "looks back to rewards"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "text"), WRONG)
def test_what_does_not_fit_is_named_and_changes_nothing(arguments: dict[str, Any], text: str, saved: Saved) -> None:
    policy, other = [OnnxPolicy.load(saved("box", "previous", True, "discrete")) for _ in range(2)]
    for each in (policy, other):
        each.act(ZEROS)
    with pytest.raises(PolicyError, match=text):
        policy.act(**arguments)
    for each in (policy, other):
        each.act(ZEROS + 1, 0.5)
    np.testing.assert_array_equal(policy.outputs["action_dist_inputs"], other.outputs["action_dist_inputs"])


@pytest.mark.slow
def test_sessions_come_once_and_are_forgotten(saved: Saved) -> None:
    policy = OnnxPolicy.load(saved("box", "previous", True, "discrete"))
    with pytest.raises(PolicyError, match="each once"):
        policy.act_batch(np.zeros((2, 3), np.float32), sessions=["a", "a"])
    policy.act(ZEROS, session="a")
    assert policy.sessions == ("a",)
    policy.forget("a")
    assert policy.sessions == ()


def with_other_weights(model: Any, folder: Path, saved: Saved) -> None:
    weights = next(each for each in model.graph.initializer if each.dims and each.data_type == onnx.TensorProto.FLOAT)
    weights.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights) + 0.5, weights.name))


def with_weights_elsewhere(model: Any, folder: Path, saved: Saved) -> None:
    (folder / "secret").write_bytes(bytes(4096))
    for tensor in model.graph.initializer:
        if tensor.raw_data:
            onnx.external_data_helper.set_external_data(tensor, "../secret")
            tensor.ClearField("raw_data")


def of_another_policy(model: Any, folder: Path, saved: Saved) -> None:
    model.CopyFrom(onnx.load(saved("discrete", "one_hot", True, "box") / "policy.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alter", "text"),
    [
        (with_other_weights, "the ONNX program does not do what the policy does: in actions"),
        (with_weights_elsewhere, "takes weights from other files"),
        (of_another_policy, "different observation_spaces"),
    ],
)
def test_a_program_that_is_not_the_policys_is_refused(alter: Any, text: str, tmp_path: Path, saved: Saved) -> None:
    shutil.copytree(saved("box", "none", False, "discrete"), tmp_path / "p")
    model = onnx.load(tmp_path / "p" / "policy.onnx")
    alter(model, tmp_path, saved)
    (tmp_path / "p" / "policy.onnx").write_bytes(model.SerializeToString())
    sign(tmp_path / "p", no_change)
    with pytest.raises(PolicyError, match=text):
        OnnxPolicy.load(tmp_path / "p")


@pytest.mark.parametrize("data", [b"", b"\x08", b"a program", bytes(1000)])
def test_what_is_no_program_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.onnx").write_bytes(data)
    with pytest.raises(PolicyError, match="ONNX program"):
        OnnxPolicy.load(tmp_path / "p.onnx")
    with pytest.raises(PolicyError, match="there is no file"):
        OnnxPolicy.load(tmp_path / "q.onnx")


def test_a_program_of_somebody_else_is_refused(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["obs"], ["actions"])],
        "other",
        [onnx.helper.make_tensor_value_info("obs", onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.helper.make_tensor_value_info("actions", onnx.TensorProto.FLOAT, ["batch", 3])],
    )
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 20)])
    with pytest.raises(PolicyError, match="says nothing of its spaces"):
        OnnxPolicy(model.SerializeToString())
    onnx.helper.set_model_props(model, {"rollflow": '{"format": 2}'})
    with pytest.raises(PolicyError, match="expected format 1"):
        OnnxPolicy(model.SerializeToString())
