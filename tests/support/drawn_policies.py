"""Random environments that keep what they gave, and rollouts over them, for tests of policies."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollflow import ConnectorV2, FrameStacking, MeanStdFilter, Policy, Rollout
from rollflow.nodes import (
    DefaultModule,
    FlattenObservations,
    LambdaConnector,
    OneHotObservations,
    PrevActionsPrevRewards,
    RandomModule,
)
from rollflow.stream.data.tree import leaves_of, stack_trees

BOX = spaces.Box(-2.0, 2.0, (3,), np.float32)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(4), "place": spaces.Box(-1.0, 1.0, (2,), np.float32)})
NESTED = spaces.Dict({"kind": spaces.Discrete(3, start=1), "pair": spaces.Tuple([BOX, spaces.MultiDiscrete([2, 3])])})
IMAGE = spaces.Box(0, 255, (12, 12, 2), np.uint8)
OBSERVATIONS = {"box": BOX, "masked": MASKED, "nested": NESTED, "discrete": spaces.Discrete(5), "image": IMAGE}
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "several": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict({"fire": spaces.Discrete(2), "turn": spaces.Box(-1.0, 1.0, (1,), np.float32)}),
}

SPACES: dict[str, Any] = {"observation_space": BOX, "action_space": ACTIONS["discrete"]}


def shifted(batch: dict[str, Any], episodes: Any) -> None:
    """Connector piece in list form: write observations that depend on the episode's own time and data."""
    for episode in ConnectorV2.single_agent_episode_iterator(episodes):
        count = episode.custom_data["count"] = episode.custom_data.get("count", 0) + 1
        latest = episode.get_observations(-1)
        episode.set_observations(new_data=(latest + np.float32(0.1) * (count + episode.t % 2)), at_indices=-1)


PIECES: dict[str, Any] = {
    "none": lambda: [],
    "filter": lambda: [MeanStdFilter(update_stats=False)],
    "frames": lambda: [FrameStacking(num_frames=4)],
    "previous": lambda: [PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=3), FlattenObservations()],
    "flat": lambda: [FlattenObservations()],
    "one_hot": lambda: [OneHotObservations()],
    "all": lambda: [FlattenObservations(), MeanStdFilter(update_stats=False), FrameStacking(num_frames=2)],
    "listed": lambda: [LambdaConnector(shifted)],
}
FITTING = {
    "box": ["none", "filter", "frames", "previous", "flat", "all", "listed"],
    "masked": ["none", "filter"],
    "nested": ["none", "filter", "previous", "flat", "all"],
    "discrete": ["none", "one_hot", "previous", "flat"],
    "image": ["none", "frames"],
}


class Repeats(RandomModule):
    """Module whose action is what it sees."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": batch["obs"]}


class LoggedEnv(gym.Env[Any, Any]):
    """Environment with random observations, rewards and ends, all of which it keeps in `log`.

    log     (observation, reward, whether an episode begins) of what a policy sees, step by step
    ends    how likely it is that a step ends the episode
    """

    def __init__(
        self, observations: spaces.Space[Any], actions: spaces.Space[Any], seed: int, ends: float = 0.15
    ) -> None:
        self.observation_space, self.action_space, self.ends = observations, actions, ends
        self.log: list[tuple[Any, float, bool]] = []
        self._rng = np.random.default_rng(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation = drawn_item(self.observation_space, self._rng)
        self.log.append((observation, 0.0, True))
        return observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward = drawn_item(self.observation_space, self._rng), float(self._rng.normal())
        ends = bool(self._rng.random() < self.ends)
        if not ends:
            self.log.append((observation, reward, False))
        return observation, reward, ends, False, {}


def drawn_item(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """An item of a space; a mask always allows an action."""
    space.seed(int(rng.integers(2**31)))
    item = space.sample()
    if isinstance(item, dict) and "action_mask" in item:
        item["action_mask"][rng.integers(len(item["action_mask"]))] = 1
    return item


def logged_rollout(
    observations: str, actions: str, pieces: str, *, slots: int, seed: int, **kwargs: Any
) -> tuple[list[LoggedEnv], Rollout]:
    """Environments, and a rollout over them whose filters have a state that does not change any more."""
    envs = [LoggedEnv(OBSERVATIONS[observations], ACTIONS[actions], seed + slot) for slot in range(slots)]
    unused = iter(envs)
    kwargs |= {"seed": seed, "env_to_module_connector": lambda env: PIECES[pieces]()}
    rollout = Rollout(lambda: next(unused), num_envs=slots, fragment_length=5, num_fragments=8, **kwargs)
    for piece in rollout.env_to_module:
        if isinstance(piece, MeanStdFilter):
            teach(piece, seed)
    return envs, rollout


def teach(piece: MeanStdFilter, seed: int) -> None:
    """Give a filter the state of another one that has counted random observations."""
    rng = np.random.default_rng(seed)
    other = MeanStdFilter(piece.input_observation_space, piece.input_action_space)
    items = [drawn_item(piece.input_observation_space, rng) for _ in range(10)]
    other._filter(stack_trees(items))
    piece.set_state(other.get_state())


def drawn_policy(
    space: str = "box",
    pieces: str = "none",
    actions: str = "discrete",
    *,
    lstm: bool = False,
    kind: Any = DefaultModule,
    explore: bool = False,
    seed: int = 1,
    **config: Any,
) -> Policy:
    """Policy taken from a rollout over random environments, with a module of a kind that has a small network."""
    small = {"fcnet_hiddens": (8,), "lstm_cell_size": 6, "use_lstm": lstm, **config}
    made: Any = lambda *spaces: kind(*spaces, model_config=small)  # noqa: E731
    options: Any = {"model_config": small} if kind is DefaultModule else {"module": made}
    _, rollout = logged_rollout(space, actions, pieces, slots=1, seed=seed, **options)
    return Policy(rollout.module, rollout.env_to_module, rollout.module_to_env, explore=explore)


def assert_plays_the_same(policy: Policy, other: Any, space: str) -> None:
    """Act with both in sessions that come, end and change their company, and compare what comes out."""
    rng = np.random.default_rng(4)
    compared, apart = 0, 0
    for _ in range(25):
        ids = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        for session in ids:
            if rng.random() < 0.2:
                policy.reset(session)
                other.reset(session)
        observations = stack_trees([drawn_item(OBSERVATIONS[space], rng) for _ in ids])
        rewards = rng.normal(size=len(ids)).astype(np.float32)
        expected = policy.act_batch(observations, rewards, ids)
        actions = other.act_batch(observations, rewards, ids)
        logits = policy.outputs["action_dist_inputs"]
        np.testing.assert_allclose(other.outputs["action_dist_inputs"], logits, 1e-5, 1e-5)
        for mine, theirs in zip(leaves_of(actions), leaves_of(expected), strict=True):
            assert mine.dtype == theirs.dtype
            if mine.dtype.kind == "f":
                np.testing.assert_allclose(mine, theirs, 1e-5, 1e-5)
            else:
                compared, apart = compared + mine.size, apart + int((mine != theirs).sum())
    assert apart <= compared // 50  # two actions that are as likely but for rounding
