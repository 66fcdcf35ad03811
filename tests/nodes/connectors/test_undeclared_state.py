"""State that a connector piece does not declare: refused when it is saved, sent or merged, and caches are not."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from numbered_agents import numbered_agents
from numbered_module import NumberedEnv, NumberedModule

from rollflow import ConnectorV2, MultiAgentRollout, Rollout
from rollflow.nodes import ConnectorPipelineV2, EnvToModulePipeline, LambdaConnector, ObservationPreprocessor
from rollflow.nodes.connectors.state_watch import fingerprint
from rollflow.stream import ConnectorError

SPACE = gym.spaces.Box(-1, 1, (2,), np.float32)
UNDECLARED = (
    r"changes 'count', 'mean' while it runs but declares no state, .*expected get_state and set_state, and merge"
)


class Normalizer(ConnectorV2):
    """Counts its calls, and has a mean that is there from the first call on."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__(*spaces)
        self.count = 0
        self.mean: Any = None

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.count += 1
        self.mean = np.full(3, self.count / 2)
        return batch


class Saves(Normalizer):
    """Has a state that nobody can take over."""

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean}


class Restores(Saves):
    """Has a state that can't be merged with another's."""

    def set_state(self, state: dict[str, Any]) -> None:
        self.count, self.mean = state["count"], state["mean"]


class Merges(Restores):
    """Has a state, whole."""

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return max(states, key=lambda state: state["count"])


class Forgets(Normalizer):
    """Says that nothing of it has to last."""

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}


class Held:
    """A running count within another object."""

    def __init__(self) -> None:
        self.count = {"of": [0]}

    def __call__(self, batch: Any) -> None:
        self.count["of"][0] += 1


class Preprocesses(ObservationPreprocessor):
    seen = 0

    def preprocess(self, observation: Any, episode: Any) -> Any:
        self.seen += 1
        return observation


class Caches(ConnectorV2):
    """Fills at its first call what stays as it is from then on, makes noise, and looks at an environment and itself."""

    def __init__(self, env: Any = None) -> None:
        super().__init__()
        self.made: Any = None
        self.by_key: dict[str, Any] = {}
        self.random = np.random.default_rng(0)
        self.env, self.me = env, [self]

    @functools.cached_property  # noqa: TID251
    def once(self) -> Any:
        return np.ones(2)

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.made = np.ones(3) if self.made is None else self.made
        self.by_key.setdefault("a", self.random.normal() and 1)
        if self.random.random() < 0.5:
            self.once.sum()
        return batch


def called(piece: Any, times: int = 3) -> ConnectorPipelineV2:
    pipeline = ConnectorPipelineV2(SPACE, SPACE, connectors=[piece])
    for _ in range(times):
        pipeline(rl_module=None, batch={}, episodes=[])
    return pipeline


@pytest.mark.parametrize(
    ("piece", "told"),
    [
        (Normalizer(), "Normalizer changes 'count'.* while it runs but declares no state"),
        (ConnectorPipelineV2(connectors=[Normalizer()]), "Normalizer changes 'count'.* while it runs"),
        (LambdaConnector(Held()), "Held changes 'function' while it runs"),
        (Saves(), r"Saves has a state but no set_state of its own, .*; expected a set_state\(state\) beside its get_s"),
    ],
)
def test_state_that_could_not_be_taken_over_again_is_refused(piece: Any, told: str) -> None:
    for times in (1, 3):
        with pytest.raises(ConnectorError, match=told):
            called(piece, times).get_state()


@pytest.mark.parametrize("piece", [Restores, Merges])
def test_declared_state_is_saved(piece: Any) -> None:
    state = called(piece()).get_state()
    assert state[piece.__name__]["count"] == 3
    again = ConnectorPipelineV2(connectors=[piece()])
    again.set_state(state)
    assert again[0].count == 3


@pytest.mark.parametrize("piece", [Forgets(), Caches(NumberedEnv(0)), ConnectorPipelineV2(connectors=[Caches()])])
def test_caches_and_what_is_said_not_to_last_are_no_state(piece: Any) -> None:
    assert called(piece, 20).get_state() == {}


def test_what_others_set_before_the_first_call_and_spaces_do_is_no_state() -> None:
    class Sized(Caches):
        def recompute_output_observation_space(self, in_obs: Any, in_act: Any) -> Any:
            self.size = in_obs.shape[0]
            return in_obs

    pipeline = ConnectorPipelineV2(SPACE, SPACE, connectors=[Sized()])
    pipeline[0].made = 7
    for size in (2, 3, 4):
        pipeline.input_observation_space = gym.spaces.Box(-1, 1, (size,), np.float32)
        pipeline(rl_module=None, batch={}, episodes=[])
        pipeline.append(Caches())
        pipeline(rl_module=None, batch={}, episodes=[])
    assert pipeline.get_state() == {}


def test_what_has_changed_before_the_spaces_do_is_not_forgotten() -> None:
    pipeline = called(Normalizer())
    pipeline.input_observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    with pytest.raises(ConnectorError, match="changes 'count'"):
        pipeline.get_state()


def test_different_states_are_merged_by_a_piece_that_says_how_alone() -> None:
    states = [called(Restores(), times).get_state() for times in (1, 2)]
    told = "Restores is given 2 different states to merge, but it has no merge_states of its own, .*expected a merge_st"
    with pytest.raises(ConnectorError, match=told):
        called(Restores()).merge_states(states)
    assert called(Restores()).merge_states([states[0], states[0]]) == states[0]
    merged = called(Merges()).merge_states([{"Merges": state["Restores"]} for state in states])
    assert merged["Merges"]["count"] == 2


def test_a_state_without_its_set_state_is_not_taken_over() -> None:
    told = r"Saves is given a state with .*, and has a get_state but no set_state; expected both"
    with pytest.raises(ConnectorError, match=told):
        Saves().set_state({"count": 1})


def test_a_path_that_is_asked_for_does_not_change(tmp_path: Path) -> None:
    path = tmp_path / "flag"
    before = fingerprint(path)
    assert not path.exists()
    assert hash(path) == hash(tmp_path / "flag")
    assert fingerprint(path) == before != fingerprint(tmp_path)


@pytest.mark.parametrize("method", ["get_state", "merge_states"])
def test_a_method_that_gives_no_state_is_refused(method: str) -> None:
    pipeline = called(Merges())
    states = [pipeline.get_state()]
    setattr(pipeline["Merges"], method, lambda *args, **kwargs: None)
    with pytest.raises(ConnectorError, match=rf"Merges\.{method} returned NoneType, expected a dict"):
        pipeline.merge_states(states) if method == "merge_states" else pipeline.get_state()


def test_a_rollout_runs_with_undeclared_state_and_does_not_save_it() -> None:
    pieces: dict[str, Any] = {
        "env_to_module_connector": lambda env: [Normalizer(), Preprocesses()],
        "module_to_env_connector": lambda env: Normalizer(),
        "learner_connector": lambda seen, done: ConnectorPipelineV2(connectors=[Normalizer()]),
    }
    with Rollout(partial(NumberedEnv, 0), module=NumberedModule(), fragment_length=4, num_fragments=3, **pieces) as run:
        assert len(list(run.batches())) == 3
    for pipeline in (run.env_to_module, run.module_to_env, run.learner_pipeline):
        with pytest.raises(ConnectorError, match=UNDECLARED):
            pipeline.get_state()
    with pytest.raises(ConnectorError, match="Preprocesses changes 'seen'"):
        run.env_to_module["Preprocesses"].get_state()
    assert EnvToModulePipeline.default(SPACE, SPACE).get_state() == {}


@pytest.mark.parametrize("kind", ["joint_connector", "env_to_module_connector", "module_to_env_connector"])
def test_a_rollout_of_several_agents_does_not_save_undeclared_state(kind: str) -> None:
    _, envs = numbered_agents(1, agents=2, nested=0)
    connector: dict[str, Any] = {kind: lambda part: Normalizer()}
    with MultiAgentRollout(envs, fragment_length=4, num_fragments=3, **connector) as rollout:
        assert len(list(rollout.fragments())) == 3
    joint = [] if rollout.joint is None else [rollout.joint.pipeline]
    pipelines = {"joint": joint, "env_to": rollout.env_to_module, "module": rollout.module_to_env}
    [refusing] = [each for name, each in pipelines.items() if kind.startswith(name)]
    for pipeline in refusing:
        with pytest.raises(ConnectorError, match=UNDECLARED):
            pipeline.get_state()


@pytest.mark.slow
def test_auto_does_not_go_where_state_would_be_lost() -> None:
    makers = [partial(NumberedEnv, slot) for slot in range(2)]
    for piece, told in ((Normalizer, "changes 'count'"), (Restores, "given 2 different states")):
        acts: Any = {"module": NumberedModule(), "env_to_module_connector": lambda env, p=piece: p()}
        rollout = Rollout(makers, where="auto", **acts)
        rollout.environments.close()
        assert f"not where='rollouts': it raised StateError: {piece.__name__}" in rollout.placement
        assert told in rollout.placement


def test_an_array_counts_as_one_of_the_values_that_are_looked_at() -> None:
    arrays = [np.zeros(1) for _ in range(19_000)]
    before = fingerprint(arrays)
    arrays[-1][0] = 1.0
    assert fingerprint(arrays) != before
