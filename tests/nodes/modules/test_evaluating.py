"""Views of modules in evaluation mode, and the pieces of train batches that see them."""

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from replayed import write_dataset
from small_env import SmallEnv
from together import Together
from torch import nn

from rollflow import (
    ConnectorV2,
    DatasetSource,
    GeneralAdvantageEstimation,
    MultiAgentRollout,
    RLModule,
    Rollout,
    VTrace,
)
from rollflow.nodes import DefaultModule, LearnerConnectorPipeline
from rollflow.nodes.modules.rl_module import evaluating
from rollflow.sinks import LearnerPipeline, MultiAgentLearnerPipeline

SEEN, CHOSEN = gym.spaces.Box(-9, 9, (4,)), gym.spaces.Discrete(2)


class Noise(SmallEnv):
    observation_space, action_space = SEEN, CHOSEN

    def look(self) -> Any:
        return (3 + self.np_random.normal(size=4)).astype(np.float32)

    def pay(self, action: Any) -> float:
        return 1.0


class Net(RLModule):
    """Batch norm, dropout, a counter in a buffer and one that is an attribute; values are not recorded."""

    def setup(self) -> None:
        self.norm, self.drop, self.out = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)
        self.register_buffer("passes", torch.zeros(1))
        self.modes: list[bool] = []
        self.unregistered = [self.norm]  # no child, but the same layer

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        self.modes.append(self.training)
        x = self.out(self.drop(self.unregistered[0](batch["obs"])))
        return {"action_dist_inputs": x[:, :2], "vf_preds": x[:, 2]}

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = self._forward(batch)
        del output["vf_preds"]
        return output


class Asks(ConnectorV2):
    """A user's piece that runs the module and keeps its mode."""

    changes_episodes = False

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def __call__(self, *, rl_module: Any, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        rl_module.forward_train({"obs": torch.zeros(3, 4)})
        self.modes.append(rl_module.training or rl_module.norm.training)
        return batch


def trace_of(module: Any) -> Any:
    """What passes in training mode change."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    grads = [parameter.grad for parameter in module.parameters()]
    flags = [each.training for each in module.modules()], [each.requires_grad for each in module.parameters()]
    return state, grads, flags, list(module.modes), torch.get_rng_state()


def assert_same_trace(before: Any, after: Any, *, with_generator: bool = True) -> None:
    assert before[1:4] == after[1:4]
    assert not with_generator or torch.equal(before[4], after[4])
    for name, value in before[0].items():
        assert torch.equal(value, after[0][name]), name


PIECES: Any = [GeneralAdvantageEstimation, VTrace, Asks]
WAYS = ["batches", "pipeline", "learner", "dataset", "by itself", "agents", "agents published"]
MODULES: Any = {
    "module": {"one": Net, "two": Net},
    "agent_to_module_mapping_fn": lambda agent, episode, **kwargs: {"a": "one", "b": "two"}[agent],
}


def pair() -> Together:
    """Two agents, which have a module each."""
    return Together({"a": Noise(), "b": Noise()})


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("place", WAYS)
def test_train_batches_leave_no_trace_in_the_module(piece: Any, place: str, tmp_path: Any) -> None:
    connector = lambda obs_space, act_space: piece()  # noqa: E731
    options: Any = {"num_envs": 4, "fragment_length": 8, "num_fragments": 2, "seed": 0, "learner_connector": connector}
    several = place.startswith("agents")
    made: Any = MultiAgentRollout(pair, **MODULES, **options) if several else Rollout(Noise, module=Net, **options)
    with made as rollout:
        module: Any = rollout.module
        modules = list(module.values()) if several else [module]
        if place == "batches":
            before = trace_of(module)
            assert len(list(rollout.batches())) == 2
            assert_same_trace(before, trace_of(module), with_generator=False)  # acting draws from it
            return
        fragments = list(rollout.fragments())
        if place == "dataset":
            write_dataset(fragments, tmp_path / "set", rollout=rollout)
        before = list(map(trace_of, modules))
        if place == "agents":
            assert set(rollout.learner.batch_of(fragments)) == {"one", "two"}
        elif place == "agents published":
            batches = MultiAgentLearnerPipeline(rollout.learner)(fragments[0]).batches
            assert batches is not None
            assert set(batches) == {"one", "two"}
        elif place == "pipeline":
            rollout.learner_pipeline.of_fragments(fragments, module)
        elif place == "by itself" and piece is not Asks:  # which runs what it is given
            piece()(rl_module=module, batch={}, episodes=fragments[0].episodes())
        elif place == "learner":
            node = LearnerPipeline(rollout.learner_pipeline, module)
            assert all(node(fragment).batches for fragment in fragments)
        elif place == "dataset":
            source = DatasetSource(tmp_path / "set", module=module, learner_connector=connector, batch_size=16)
            assert len(list(source.batches())) == 4
        for each, own in zip(before, modules, strict=True):
            assert_same_trace(each, trace_of(own))


@pytest.mark.parametrize("piece", [GeneralAdvantageEstimation(normalize_advantages=False), VTrace()])
def test_values_are_those_of_the_function_that_acted(piece: Any) -> None:
    with Rollout(Noise, module=Net, num_envs=4, fragment_length=8, num_fragments=1, seed=0) as rollout:
        [fragment] = rollout.fragments()
        module: Any = rollout.module
        nn.init.constant_(module.norm.running_mean, 3.0)
        pipeline = LearnerConnectorPipeline.default(SEEN, CHOSEN, [piece])
        first, second = (pipeline.of_fragments([fragment], module)["advantages"] for _ in range(2))
        module.eval()
        expected = pipeline.of_fragments([fragment], module)["advantages"]
        assert torch.equal(first, second)
        assert torch.equal(first, expected)


def test_another_thread_may_train_the_module_during_a_pass() -> None:
    """The trained module is in training mode while a pass of the view is under way, and the view is not."""
    module, modes = Net(SEEN, CHOSEN), []
    inside, trained = threading.Event(), threading.Event()

    def wait(layer: Any, args: Any) -> None:
        if threading.current_thread() is worker:
            inside.set()
            assert trained.wait(10)
            modes.append(layer.training)

    module.norm.register_forward_pre_hook(wait)
    worker = threading.Thread(target=lambda: evaluating(module).forward_train({"obs": torch.ones(2, 4)}))
    worker.start()
    assert inside.wait(10)
    module.forward_train({"obs": torch.ones(2, 4)})["vf_preds"].sum().backward()
    trained.set()
    worker.join()
    assert modes == [False]
    assert module.training
    assert module.norm.training
    assert int(module.norm.num_batches_tracked) == 1
    assert float(module.passes) == 1


def test_a_view_has_the_parameters_as_they_are_now() -> None:
    module = Net(SEEN, CHOSEN)
    view = evaluating(module)
    assert isinstance(view, Net)
    assert evaluating(view) is view
    with torch.no_grad():
        module.out.weight.fill_(2.0)
    assert torch.equal(view.out.weight, module.out.weight)
    assert view.unregistered[0] is view.norm
    assert view.norm is not module.norm
    assert list(view.state_dict()) == list(module.state_dict())


class Outer(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.run = inner.forward  # bound to the child

    def forward(self, x: Any) -> Any:
        return self.run(x)


class Plain:
    """No torch module, but with one inside, and a mode."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
        self.is_evaluated = False

    def eval(self) -> None:
        self.is_evaluated = True
        self.net.eval()

    def __call__(self, x: Any) -> Any:
        return self.net(x)


MADE: dict[str, Any] = {
    "bound method": lambda: Outer(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))),
    "tied layers": lambda: nn.Sequential(*[nn.BatchNorm1d(3)] * 2),
    "scripted": lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)))),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)), backend="eager"),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "plain object": Plain,
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_every_way_to_hold_layers_is_seen(kind: str) -> None:
    module, x = MADE[kind](), torch.randn(5, 3)
    net = module.net if isinstance(module, Plain) else module
    before = {name: value.clone() for name, value in net.state_dict().items()}
    generator = torch.get_rng_state()
    with torch.no_grad():
        first, second = evaluating(module)(x), evaluating(module)(x)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(each.training for each in net.modules())


def test_the_default_module_is_the_same_function() -> None:
    module, x = DefaultModule(SEEN, CHOSEN), {"obs": torch.randn(5, 4)}
    assert torch.equal(evaluating(module).compute_values(x), module.compute_values(x))


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_modules_act_in_evaluation_mode_everywhere(where: Any) -> None:
    with Rollout(Noise, module=Net, num_envs=2, fragment_length=8, num_fragments=1, seed=0, where=where) as rollout:
        fragments, module = list(rollout.fragments()), rollout.module
        for fragment in fragments:
            with torch.no_grad():
                expected = evaluating(module).forward_train({"obs": torch.from_numpy(fragment.gather("obs"))})
            acted = torch.from_numpy(fragment.gather("action_dist_inputs"))
            assert torch.allclose(acted, expected["action_dist_inputs"], atol=1e-6)
