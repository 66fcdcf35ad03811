"""Numbers that a type does not hold are refused, and actions are in the types of their spaces; see `test_values`."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from fragment_equality import chunks_of
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, MeanStdFilter, MultiAgentRollout, Policy, RLModule, Rollout
from rollflow.nodes import LambdaConnector, RandomModule
from rollflow.stream import ColumnError
from rollflow.stream.data.tree import leaves_of, map_tree, stack_trees, tree_at

SIZE = 2  # numbers of an observation


def box(dtype: Any, size: int = SIZE) -> spaces.Box:
    """All numbers of a dtype."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, (size,), kind.type)
    if kind.kind == "b":
        return spaces.Box(np.zeros(size, kind), np.ones(size, kind), dtype=kind.type)
    return spaces.Box(np.iinfo(kind).min, np.iinfo(kind).max, (size,), kind.type)


def made(env: Any, *, several: bool, **options: Any) -> Any:
    """A rollout of one agent in each environment, or of two with an environment each."""
    if several:
        return MultiAgentRollout(lambda: Together({agent: env() for agent in ("one", "other")}), **options)
    return Rollout(env, **options)


def run(env: Any, *, several: bool = False, **options: Any) -> list[Any]:
    """The fragments of a rollout, of one agent in each environment or several; `test_values` has all places."""
    given: dict[str, Any] = {"fragment_length": 5, "num_fragments": 3, "seed": 0, **options}
    with made(env, several=several, num_envs=2, **given) as rollout:
        return list(rollout.fragments())


class Grows(SmallEnv):
    """Shows thousands, from 0 on."""

    observation_space = box("uint16")

    def look(self) -> Any:
        return np.full(SIZE, 3000 * self.t, np.uint16)


class FirstAsBytes(ConnectorV2):
    """Gives the first observation of an episode in one byte, as its space says, and leaves others as they are."""

    columnar = True

    def recompute_output_observation_space(self, seen: Any, done: Any) -> Any:
        return box("uint8")

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        if episodes.just_begun().any():
            episodes.set_observations(episodes.observations().astype(np.uint8))
        return batch


def test_numbers_that_the_recorded_type_does_not_hold_are_refused_and_never_wrapped() -> None:
    with (
        pytest.raises(ColumnError, match="column 'obs': got 3000, expected whole numbers from 0 to 255, as uint8 has"),
        Rollout(Grows, module=RandomModule, env_to_module_connector=lambda env: FirstAsBytes(), seed=0) as rollout,
    ):
        next(rollout.fragments())


class Wide(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment that gives i64 for observations in a Box of i8; the third one has a number too large."""

    num_envs, metadata = 1, {"autoreset_mode": AutoresetMode.NEXT_STEP}
    single_observation_space, single_action_space = box("int8"), spaces.Discrete(2)
    observation_space, action_space = spaces.Box(-128, 127, (1, SIZE), np.int8), spaces.MultiDiscrete([2])

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.t = 0
        return np.full((1, SIZE), 127), {}

    def step(self, actions: Any) -> Any:
        self.t += 1
        seen, flags = np.full((1, SIZE), 127 if self.t < 3 else 300), np.zeros(1, np.bool_)
        return seen, np.zeros(1), flags, flags, {}


def test_an_environments_numbers_that_its_space_does_not_hold_are_refused_at_any_step() -> None:
    rollout = Rollout(Wide(), module=RandomModule, fragment_length=2, seed=0)
    with rollout:
        fragments = rollout.fragments()
        assert next(fragments).column("obs").tolist() == [[[127, 127]]] * 2
        with pytest.raises(ColumnError, match="column 'obs': got 300, expected whole numbers from -128 to 127"):
            next(fragments)


class Clock(SmallEnv):
    """Shows seconds since 1970 as f64, with a deviation of 20."""

    observation_space = box("float64", 1)

    def look(self) -> Any:
        return np.array([1.7e9 + 20.0 * self.np_random.normal()])


@pytest.mark.parametrize("where", ["inline", "threads"])
def test_a_filter_counts_all_digits_of_floats_of_64_bits(where: Any) -> None:
    options: Any = {"where": where, "env_to_module_connector": lambda env: MeanStdFilter(), "seed": 0}
    with Rollout(Clock, module=RandomModule, fragment_length=400, num_fragments=1, **options) as rollout:
        [batch] = rollout.batches()
        [counted] = [piece for piece in rollout.env_to_module if piece.name == "MeanStdFilter"]
    assert 18.0 < float(counted.deviation[0]) < 22.0  # of 20
    assert 0.9 < float(batch["obs"][10:].std()) < 1.1


# Actions


ACTION_SPACES: dict[str, spaces.Space[Any]] = {
    "float16": box("float16"),
    "float32": box("float32"),
    "bounded": spaces.Box(-1, 1, (2,), np.float32),
    "float64": box("float64"),
    "bytes": box("uint8"),
    "int32": box("int32"),
    "int64": box("int64"),
    "number": spaces.Discrete(5, dtype=np.int32),
    "numbers": spaces.MultiDiscrete([3, 5], dtype=np.uint8),
    "bits": spaces.MultiBinary(3),
    "nested": spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Tuple([spaces.Discrete(3), box("int16", 1)])}),
}
WIDTH = 24  # most bytes of an action, and the number of its dtype's characters before


def told(action: Any) -> np.ndarray[Any, Any]:
    """The types and the bytes of an action, u8[]."""
    text = b"".join(str(np.asarray(leaf).dtype).encode() + np.asarray(leaf).tobytes() for leaf in leaves_of(action))
    return np.frombuffer(text.ljust(3 * WIDTH, b"."), np.uint8)


class Echo(SmallEnv):
    """Its observation says which action it got, of which types."""

    observation_space = spaces.Box(0, 255, (3 * WIDTH,), np.uint8)

    def __init__(self, kind: str) -> None:
        self.action_space = ACTION_SPACES[kind]

    def look(self) -> Any:
        return told(self.action) if self.t else super().look()

    def pay(self, action: Any) -> float:
        assert self.action_space.contains(action)
        return 0.0


def widened(leaf: np.ndarray[Any, Any]) -> torch.Tensor:
    """Numbers in the widest type of their kind; those of floats have more digits than a narrower type holds."""
    if leaf.dtype.kind == "f":
        return torch.from_numpy(leaf.astype(np.float64) * 0.0 + 0.1)
    return torch.from_numpy(leaf.astype(np.uint16 if leaf.dtype.kind == "u" else np.int64))


class GivesWider(RLModule):
    """Chooses in the action space's widest types, always the same."""

    def setup(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.action_space.seed(3)
        self.sample = self.action_space.sample()

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        rows = stack_trees([map_tree(np.asarray, self.sample)] * len(batch["obs"]))
        return {"actions": map_tree(widened, rows)}


def check_echo(chunk: Any) -> int:
    """Check that the environment got what is recorded, in its space's types."""
    actions, seen = chunk.get_actions(), chunk.get_observations()
    for t in range(len(chunk)):
        action = tree_at(actions, t)
        if "actions_for_env" in chunk.extra_model_outputs:
            action = tree_at(chunk.get_extra_model_outputs("actions_for_env"), t)
            np.testing.assert_allclose(leaves_of(action)[0], leaves_of(tree_at(actions, t))[0])
        assert seen[t + 1].tobytes() == told(action).tobytes()
    return len(chunk)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_the_environment_gets_what_is_recorded_in_its_spaces_types(kind: str, several: bool) -> None:
    fragments = run(partial(Echo, kind), module=GivesWider, several=several)
    chunks = chunks_of(fragments)
    assert sum(map(check_echo, chunks)) == 30 * (1 + several)


WHOLE: dict[str, spaces.Space[Any]] = {
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "i8": spaces.Box(-100, 100, (2,), np.int8),
    "i64": box("int64"),
    "nested bytes": spaces.Dict({"a": spaces.Box(0, 255, (1,), np.uint8), "b": spaces.Tuple([box("int16", 1)])}),
}
ACTION_SPACES |= WHOLE


@pytest.mark.parametrize("several", [False, True])
def test_what_a_piece_makes_for_environments_is_brought_into_their_space(several: bool) -> None:
    def give_floats(batch: Any) -> None:
        batch["actions_for_env"] = np.array([[-3.5, 300.0]] * len(batch["actions"]))

    piece = LambdaConnector(give_floats, columnar=True, changes_episodes=False)
    bytes_ = partial(Echo, "bytes")
    fragments = run(bytes_, several=several, module=GivesWider, module_to_env_connector=lambda env: piece)
    [first, *_] = fragments
    column = first.parts[0].column("actions_for_env") if several else first.column("actions_for_env")
    assert column.dtype == np.uint8
    assert column[0, 0].tolist() == [0, 255]


@pytest.mark.parametrize("kind", ACTION_SPACES)
def test_a_policy_gives_actions_in_the_types_of_its_space(kind: str) -> None:
    space = ACTION_SPACES[kind]
    policy = Policy(GivesWider, observation_space=Echo.observation_space, action_space=space)
    expected = [leaf.dtype for leaf in leaves_of(map_tree(np.asarray, space.sample()))]
    for _ in range(3):  # the second pass has another way than the first
        action = policy.act(np.zeros(3 * WIDTH, np.uint8))
        assert [np.asarray(leaf).dtype for leaf in leaves_of(action)] == expected
