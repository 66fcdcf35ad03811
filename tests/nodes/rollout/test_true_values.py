"""What a piece, a module and an environment are given is what was given, bit for bit, in the type of its space."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, MeanStdFilter, MultiAgentRollout, Policy, RLModule, Rollout
from rollflow.nodes import RandomModule
from rollflow.nodes.connectors.common.episode_columns import AddObservationsFromEpisodesToBatch
from rollflow.nodes.connectors.env_to_module.observation_pieces import WriteObservationsToEpisodes
from rollflow.stream import ColumnError, LaneEpisodes
from rollflow.stream.data.tree import leaves_of, map_tree, stack_trees, tree_at

SIZE, LENGTH = 2, 3  # numbers of an observation, and steps of an episode
# Ends of each type, and numbers that a narrower type, or a float of fewer digits, would change.
NUMBERS: dict[str, list[Any]] = {
    "bool": [True, False, True, True],
    "uint8": [0, 255, 7, 128],
    "int8": [-128, 127, -1, 0],
    "uint16": [65535, 3000, 256, 0],
    "int32": [-(2**31), 2**31 - 1, -3, 2**24 + 1],
    "int64": [-(2**63), 2**63 - 1, 2**53 + 1, -300],
    "float16": [-65504.0, 65504.0, 6e-8, 1 / 3],
    "float32": [-3.4e38, 3.4e38, 1e-45, 16777216.0],
    "float64": [-1.7e308, 1.7e308, 1.7e9 + 1 / 3, 5e-324],
}


def box(dtype: Any, size: int = SIZE) -> spaces.Box:
    """All numbers of a dtype."""
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return spaces.Box(-np.inf, np.inf, (size,), kind.type)
    if kind.kind == "b":
        return spaces.Box(np.zeros(size, kind), np.ones(size, kind), dtype=kind.type)
    return spaces.Box(np.iinfo(kind).min, np.iinfo(kind).max, (size,), kind.type)


def observation_at(dtype: str, t: int) -> np.ndarray[Any, Any]:
    numbers = NUMBERS[dtype]
    return np.array([numbers[t % len(numbers)], numbers[(t + 1) % len(numbers)]], dtype)


class Ends(SmallEnv):
    """Shows the numbers of a dtype; nested: in a Dict, beside a float."""

    length = LENGTH

    def __init__(self, dtype: str, *, nested: bool) -> None:
        self.dtype, self.nested = dtype, nested
        self.observation_space = spaces.Dict({"a": box(dtype), "b": box("float32", 1)}) if nested else box(dtype)

    def look(self) -> Any:
        seen = observation_at(self.dtype, self.t)
        return {"a": seen, "b": np.full(1, self.t / 3, np.float32)} if self.nested else seen


def wider(dtype: Any) -> np.dtype[Any]:
    """The dtype that has the bits of an item as a number: no cast leads there that keeps them."""
    kind = np.dtype(dtype)
    return np.dtype(f"i{kind.itemsize}") if kind.kind == "u" else np.dtype(f"u{kind.itemsize}")


class _Changes(ConnectorV2):
    """Changes the type of the first leaf of observations, by columns or by episodes."""

    columnar = True

    def recompute_output_observation_space(self, seen: Any, done: Any) -> Any:
        if isinstance(seen, spaces.Dict):
            return spaces.Dict({**seen.spaces, "a": self.space_of(seen["a"])})
        return self.space_of(seen)

    def space_of(self, seen: Any) -> Any:
        raise NotImplementedError

    def changed(self, numbers: Any) -> Any:
        raise NotImplementedError

    def of_items(self, items: Any) -> Any:
        return {**items, "a": self.changed(items["a"])} if isinstance(items, dict) else self.changed(items)

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        if isinstance(episodes, LaneEpisodes):
            episodes.set_observations(self.of_items(episodes.observations()))
            return batch
        for episode in self.single_agent_episode_iterator(episodes):
            episode.set_observations(new_data=self.of_items(episode.get_observations(-1)), at_indices=-1)
        return batch


class AsBits(_Changes):
    """Gives the bits of each number as a whole number of the same size."""

    def space_of(self, seen: Any) -> Any:
        return box(wider(seen.dtype))

    def changed(self, numbers: Any) -> Any:
        return np.ascontiguousarray(numbers).view(wider(numbers.dtype))


class AsBytes(_Changes):
    """Gives the bytes of all numbers."""

    def space_of(self, seen: Any) -> Any:
        return box("uint8", SIZE * seen.dtype.itemsize)

    def changed(self, numbers: Any) -> Any:
        return np.ascontiguousarray(numbers).view(np.uint8)


class EachAsBits(AsBits):
    """`AsBits`, episode by episode."""

    columnar = False


class EachAsBytes(AsBytes):
    """`AsBytes`, episode by episode."""

    columnar = False


class ByTheBatch(AsBytes):
    """`AsBytes` of the batch's observations; `WriteObservationsToEpisodes` behind it has them recorded."""

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        batch["obs"] = self.of_items(batch["obs"])
        return batch


CHAINS: dict[str, list[type[ConnectorV2]]] = {
    "by columns": [AsBits, AsBytes],
    "by episodes": [EachAsBits, EachAsBytes],
    "by episodes first": [EachAsBits, AsBytes],
    "by columns first": [AsBits, EachAsBytes],
    "once": [AsBytes],
    "in the batch": [AsBits, AddObservationsFromEpisodesToBatch, ByTheBatch, WriteObservationsToEpisodes],
}


class Sees(RLModule):
    """Acts at random, and gives what it has seen."""

    def setup(self) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        seen = batch["obs"]["a"] if isinstance(batch["obs"], dict) else batch["obs"]
        return {"actions": torch.zeros(len(seen), dtype=torch.int64), "seen": seen.clone()}


def pieces_of(chain: str, *_: Any) -> list[ConnectorV2]:
    return [make() for make in CHAINS[chain]]


def expected_bytes(dtype: str, t: int) -> list[int]:
    return observation_at(dtype, t).view(np.uint8).tolist()


def check_chunk(chunk: Any, dtype: str, *, nested: bool) -> int:
    """Check that an episode's observations are the environment's, bit for bit, and what the module saw as well."""
    observations = chunk.get_observations()
    bits = observations["a"] if nested else observations
    assert bits.dtype == np.uint8
    steps = range(chunk.t_started, chunk.t + 1)
    assert bits.tolist() == [expected_bytes(dtype, t) for t in steps]
    if nested:
        assert observations["b"][:, 0].tolist() == [np.float32(t / 3) for t in steps]
    assert chunk.get_extra_model_outputs("seen").tolist() == bits[:-1].tolist()
    return len(chunk)


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


def chunks_of(fragments: list[Any], *, several: bool) -> list[Any]:
    return [
        chunk for each in fragments for chunk in (each.agent_episodes("default_policy") if several else each.episodes())
    ]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", ["uint16", "int64", "float64", "bool"])  # `test_values` draws the others
def test_each_piece_is_given_what_its_predecessor_gave(dtype: str, chain: str, nested: bool, several: bool) -> None:
    options: Any = {"module": Sees, "env_to_module_connector": partial(pieces_of, chain)}
    fragments = run(partial(Ends, dtype, nested=nested), several=several, **options)
    chunks = chunks_of(fragments, several=several)
    assert sum(check_chunk(chunk, dtype, nested=nested) for chunk in chunks) == 30 * (1 + several)
    assert any(chunk.is_terminated for chunk in chunks)  # whose last observations are the environment's as well


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_so_it_is_in_a_policys_sessions(dtype: str, chain: str, nested: bool) -> None:
    env = Ends(dtype, nested=nested)
    policy = Policy(
        Sees, pieces_of(chain), observation_space=env.observation_space, action_space=env.action_space, seed=0
    )
    for t in range(40):  # over the end of a lane's columns
        env.t = t
        policy.act_batch(stack_trees([env.look(), env.look()]), sessions=["a", "b"] if t % 2 else ["b", "a"])
        assert policy.outputs["seen"].tolist() == [expected_bytes(dtype, t)] * 2


class JointlyAsBits(ConnectorV2):
    """`AsBits` for all agents of an environment together."""

    def recompute_output_observation_space(self, seen: Any, done: Any) -> Any:
        return spaces.Dict({agent: box(wider(part.dtype)) for agent, part in seen.spaces.items()})

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            seen = episode.get_observations(-1)
            made = {agent: np.ascontiguousarray(each).view(wider(each.dtype)) for agent, each in seen.items()}
            episode.set_observations(new_data=made, at_indices=-1)
        return batch


@pytest.mark.parametrize("dtype", ["uint16", "int64", "float64"])
def test_so_it_is_behind_pieces_that_see_all_agents(dtype: str) -> None:
    options: Any = {"module": Sees, "env_to_module_connector": partial(pieces_of, "once")}
    options |= {"joint_connector": lambda env: [JointlyAsBits(), JointlyAgain()]}
    fragments = run(partial(Ends, dtype, nested=False), several=True, **options)
    chunks = chunks_of(fragments, several=True)
    assert sum(check_chunk(chunk, dtype, nested=False) for chunk in chunks) == 60


class JointlyAgain(JointlyAsBits):
    """The same once more, which gives other types again."""


class Leaves(_Changes):
    """Gives floats of 64 bits, though its space has 32."""

    def space_of(self, seen: Any) -> Any:
        return box("float32")

    def changed(self, numbers: Any) -> Any:
        return numbers.astype(np.float64) / 3.0


class Notes(ConnectorV2):
    """Notes the dtypes of what it is given."""

    columnar = True

    def __init__(self, *args: Any, dtypes: set[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dtypes = dtypes

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for leaf in leaves_of(episodes.newest()):
            self.dtypes.add(leaf.dtype.name)
        return batch


@pytest.mark.parametrize("several", [False, True])
def test_what_a_piece_leaves_is_given_on_in_the_type_that_its_space_says(several: bool) -> None:
    given: set[str] = set()
    connector: Any = lambda env: [Leaves(), Notes(dtypes=given)]  # noqa: E731
    run(partial(Ends, "uint8", nested=False), several=several, module=Sees, env_to_module_connector=connector)
    assert given == {"float32"}


class SometimesNot(AsBytes):
    """`AsBytes` of the first observation alone, which leaves others as they are."""

    columnar = True

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        return super().__call__(batch=batch, episodes=episodes) if episodes.just_begun().any() else batch

    def space_of(self, seen: Any) -> Any:
        return box("uint8")

    def changed(self, numbers: Any) -> Any:
        return (numbers % 256).astype(np.uint8)


def test_numbers_that_the_recorded_type_does_not_hold_are_refused_and_never_wrapped() -> None:
    env = partial(Ends, "uint16", nested=False)
    text = "column 'obs': got 3000, expected whole numbers from 0 to 255, as uint8 has"
    with (
        pytest.raises(ColumnError, match=text),
        Rollout(env, module=Sees, env_to_module_connector=lambda env: SometimesNot(), seed=0) as rollout,
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
    rollout = Rollout(Wide(), module=Sees, fragment_length=2, seed=0)
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
    chunks = chunks_of(fragments, several=several)
    assert sum(map(check_echo, chunks)) == 30 * (1 + several)


class Draws(RLModule):
    """Draws from normal distributions far outside of a Box of whole numbers, or inside."""

    def setup(self) -> None:
        width = self.get_train_action_dist_cls().required_input_dim
        self.weight = torch.nn.Parameter(torch.tensor([-300.0, 300.0, 7.2, 0.5] * 9)[:width])

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {"action_dist_inputs": self.weight.expand(len(batch["obs"]), -1)}


WHOLE: dict[str, spaces.Space[Any]] = {
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "i8": spaces.Box(-100, 100, (2,), np.int8),
    "i64": box("int64"),
    "nested bytes": spaces.Dict({"a": spaces.Box(0, 255, (1,), np.uint8), "b": spaces.Tuple([box("int16", 1)])}),
}
ACTION_SPACES |= WHOLE


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_drawn_whole_numbers_lie_in_their_box_and_a_learner_finds_their_probability(
    kind: str, explore: bool, several: bool
) -> None:
    options: Any = {"module": Draws, "explore": explore, "fragment_length": 20, "num_fragments": 1, "seed": 0}
    with made(partial(Echo, kind), several=several, **options) as rollout:
        fragments = list(rollout.fragments())
        [module] = rollout.module.values() if several else [rollout.module]
    for chunk in chunks_of(fragments, several=several):
        assert check_echo(chunk) == 20
        actions = map_tree(torch.from_numpy, map_tree(np.array, chunk.get_actions()))
        inputs = torch.from_numpy(chunk.get_extra_model_outputs("action_dist_inputs").copy())
        again = module.get_train_action_dist_cls().from_logits(inputs).logp(actions)
        recorded = torch.from_numpy(chunk.get_extra_model_outputs("action_logp").copy())
        torch.testing.assert_close(recorded, again.detach() if explore else torch.zeros(20))


class GivesFloats(ConnectorV2):
    """Makes `actions_for_env` in f64 of whole numbers."""

    columnar = True
    changes_episodes = False

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        batch["actions_for_env"] = np.array([[-3.5, 300.0]] * len(batch["actions"]))
        return batch


@pytest.mark.parametrize("several", [False, True])
def test_what_a_piece_makes_for_environments_is_brought_into_their_space(several: bool) -> None:
    fragments = run(
        partial(Echo, "bytes"), several=several, module=GivesWider, module_to_env_connector=lambda env: GivesFloats()
    )
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
