"""Replay: inserts and samples, beside a bare gather with numpy and beside other replay buffers.

Rows are those of CartPole, and of four stacked frames of 84 x 84 bytes as one observation. Each line has rows a second.
`uniform, host` is a ReplayClient, whose host is another process on this machine, beside the same replay in this one.
`uniform, numpy` stands beside `numpy.take` of the same columns by random rows, which any replay has to do at least.
Stable-Baselines3's ReplayBuffer, TorchRL's TensorDictReplayBuffer and cpprb's hold the same transitions, where they
are installed.

    python -m benchmarks.replay [--quick]
"""

import importlib.util
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from benchmarks.command import run
from benchmarks.pairs import Record, Run, Sizes, paired
from rollflow import Fragment, Replay, RLModule, Rollout
from rollflow.sinks import Prioritized, ReplayClient, ReplayHost, Storage

SLOTS, FRAGMENT_LENGTH = 64, 64
CAPACITY = {"CartPole": 262_144, "pixels": 16_384}
BATCHES = (256, 4096)
EXTRA = ("action_logp",)


class Frames(gym.vector.VectorEnv[Any, Any, Any]):
    """Environments that give the last 4 of 84 x 84 bytes each, and end every 200 steps.

    Sprites move over a background, with some noise, so that frames compress as a game's do.
    """

    metadata: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self._film = film(32 * num_envs)
        self._count = 0

    def _seen(self) -> Any:
        """The last four frames, u8[N, 4, 84, 84]; each environment is at another place of the film."""
        firsts = 32 * np.arange(self.num_envs) + self._count
        return self._film[(firsts[:, None] + np.arange(4)) % len(self._film)]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._seen(), {}

    def step(self, actions: Any) -> Any:
        rewards = np.full(self.num_envs, float(self._count % 200 > 0))  # 0 in the step that only resets
        self._count += 1
        ends = np.full(self.num_envs, self._count % 200 == 0)
        return self._seen(), rewards, ends, np.zeros(self.num_envs, bool), {}


def film(count: int) -> NDArray[np.uint8]:
    """Frames of a game, u8[count, 84, 84]."""
    generator = np.random.default_rng(0)
    background = np.kron(generator.integers(0, 6, (12, 12), np.uint8) * 20, np.ones((7, 7), np.uint8))
    frames = np.tile(background, (count, 1, 1))
    sprites = generator.integers(150, 256, (6, 8, 8), np.uint8)
    places, speeds = generator.integers(0, 76, (6, 2)), generator.integers(1, 4, (6, 2))
    for number, frame in enumerate(frames):
        for sprite, (row, column) in zip(sprites, (places + number * speeds) % 76, strict=True):
            frame[row : row + 8, column : column + 8] = sprite
    is_noisy = generator.random(frames.shape, np.float32) < 0.01
    frames[is_noisy] = generator.integers(0, 256, int(is_noisy.sum()), np.uint8)
    return frames


class Coin(RLModule):
    """Any action; costs nothing."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": batch["obs"].new_zeros((len(batch["obs"]), 2), dtype=None).float()}


def measure(sizes: Sizes) -> list[Record]:
    """Lines for each kind of row, batch size and other one."""
    records: list[Record] = []
    for kind in CAPACITY:
        fragments = made(kind, 16 if kind == "CartPole" else 4)
        records += measured(kind, fragments, sizes)
    return records


def made(kind: str, count: int) -> list[Fragment]:
    """So many fragments of a kind."""
    env: Any = "CartPole-v1" if kind == "CartPole" else Frames(SLOTS)
    options: Any = {"num_envs": SLOTS} if kind == "CartPole" else {}
    with Rollout(
        env, module=Coin(), fragment_length=FRAGMENT_LENGTH, num_fragments=count, seed=0, **options
    ) as rollout:
        return list(rollout.fragments())


def measured(kind: str, fragments: list[Fragment], sizes: Sizes) -> list[Record]:
    """Lines for one kind of row."""
    capacity = CAPACITY[kind]
    uniform, prioritized = (
        filled(Replay(capacity, sampler=sampler, storage=Storage(extra=EXTRA), seed=0), fragments)
        for sampler in (None, Prioritized())
    )
    others = peers(kind, fragments, capacity)
    records = []
    inserts = {"numpy copies": copies(fragments, capacity)} | {name: peer[0] for name, peer in others.items()}
    for name, beside in inserts.items():
        aim = None if name == "numpy copies" else 1.0
        ours = inserting(uniform, fragments)
        records.append(paired(f"{kind}, insert, {name}", SLOTS, ours, beside, aim=aim, sizes=sizes, beside_name=name))
    for size in BATCHES:
        # 1.3 times a bare gather's time is 0.77 of its rate.
        bare = gather(uniform, size)
        for name, draw, aim in (
            ("numpy", bare, 1 / 1.3),
            *((name, peer[1](size), 1.0) for name, peer in others.items()),
        ):
            ours = sampling(uniform, size)
            records.append(
                paired(f"{kind}, {size} uniform, {name}", SLOTS, ours, draw, aim=aim, sizes=sizes, beside_name=name)
            )
        with hosted(kind) as client:
            name, beside = f"{kind}, {size} uniform, host", sampling(uniform, size)
            options: dict[str, Any] = {"aim": None, "sizes": sizes, "beside_name": "in this process"}
            records.append(paired(name, SLOTS, sampling(client, size), beside, **options))
        for name, draw, aim in (
            ("numpy", bare, None),
            *((name, peer[2](size), 1.0) for name, peer in others.items() if peer[2] is not None),
        ):
            ours = sampling(prioritized, size, updates=True)
            records.append(
                paired(f"{kind}, {size} prioritized, {name}", SLOTS, ours, draw, aim=aim, sizes=sizes, beside_name=name)
            )
    return records


def filled(replay: Replay, fragments: list[Fragment]) -> Replay:
    """A replay whose ring is full."""
    while replay.report().removed == 0:
        for fragment in fragments:
            replay.insert(fragment)
    return replay


def inserting(replay: Replay, fragments: list[Fragment]) -> Run:
    """Insert all fragments."""

    def insert() -> int:
        for fragment in fragments:
            replay.insert(fragment)
        return sum(fragment.num_steps for fragment in fragments)

    return insert


@contextmanager
def hosted(kind: str) -> Iterator[ReplayClient]:
    """A client of a host in a process of its own, whose replay's ring is full."""
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=host, args=(kind, folder))
        process.start()
        try:
            with ReplayClient(f"unix:{folder}/trainers", timeout=300.0) as client:
                yield client
        finally:
            process.kill()
            process.join()


def host(kind: str, folder: str) -> None:
    """Fill a replay, and serve it until this process is killed."""
    replay = filled(Replay(CAPACITY[kind], storage=Storage(extra=EXTRA), seed=0), made(kind, 4))
    with ReplayHost(replay, rollouts=f"unix:{folder}/rollouts", trainers=f"unix:{folder}/trainers") as served:
        served.wait()


def sampling(replay: Replay | ReplayClient, size: int, *, updates: bool = False) -> Run:
    """Sample a batch, and maybe update its priorities."""
    values = np.random.default_rng(0).random(size)

    def sample() -> int:
        batch = replay.sample(size)
        if updates:
            replay.update_priorities(batch["ids"], values)
        return len(batch["rewards"])

    return sample


def gather(replay: Replay, size: int) -> Run:
    """Take random rows of the same columns, and the observation of the row after each, as arrays alone."""
    columns = replay.sample(8)
    arrays = {
        name: np.zeros((replay.capacity, *column.shape[1:]), column.numpy().dtype)
        for name, column in columns.items()
        if name not in ("ids", "age", "new_obs")
    }
    for array in arrays.values():
        array[:] = 1
    generator = np.random.default_rng(0)

    def take() -> int:
        rows = generator.integers(replay.capacity - 1, size=size)
        batch = {name: array.take(rows, axis=0) for name, array in arrays.items()}
        batch["new_obs"] = arrays["obs"].take(rows + 1, axis=0)
        return len(batch["rewards"])

    return take


def copies(fragments: list[Fragment], capacity: int) -> Run:
    """Copy the fragments' columns whole into a ring, which knows nothing of episodes."""
    names = ("obs", "actions", "rewards", "terminateds", "truncateds", "policy_version", *EXTRA)
    rows = capacity // SLOTS
    arrays = {
        name: np.ones((rows, *fragments[0].column(name).shape[1:]), fragments[0].column(name).dtype) for name in names
    }
    at = 0

    def copy() -> int:
        nonlocal at
        for fragment in fragments:
            for name, array in arrays.items():
                column = fragment.column(name)
                array[at : at + FRAGMENT_LENGTH] = column[:FRAGMENT_LENGTH]
            at = (at + FRAGMENT_LENGTH) % (rows - FRAGMENT_LENGTH + 1)
        return sum(fragment.num_steps for fragment in fragments)

    return copy


Sampler = Callable[[int], Run]
Peer = tuple[Run, Sampler, Sampler | None]  # insert; uniform and prioritized samples by size


def peers(kind: str, fragments: list[Fragment], capacity: int) -> dict[str, Peer]:
    """Other replay buffers that are installed here, filled."""
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("stable_baselines3") is not None:
        from benchmarks.peers.stable_baselines3_replay import peer as sb3

        found["Stable-Baselines3"] = sb3(transitions(fragments), capacity, SLOTS)
    if importlib.util.find_spec("torchrl") is not None:
        from torchrl.data import LazyMemmapStorage, LazyTensorStorage

        from benchmarks.peers.torch_rl_replay import peer as torch_rl

        found["TorchRL"] = torch_rl(transitions(fragments), capacity, LazyTensorStorage)
        found["TorchRL, memory-mapped"] = torch_rl(transitions(fragments), capacity, LazyMemmapStorage)
    if importlib.util.find_spec("cpprb") is not None:
        from benchmarks.peers.cpprb_replay import peer as cpprb

        found["cpprb"] = cpprb(transitions(fragments), capacity)
    if not found:
        print(f"replay of {kind}: no other replay buffer is installed here", file=sys.stderr)
    return found


def transitions(fragments: list[Fragment]) -> list[dict[str, Any]]:
    """Each fragment's transitions as the others take them, made before anything is measured: any[T, N, ...]."""
    names = ("actions", "rewards", "terminateds", "truncateds", "policy_version", *EXTRA)
    return [
        {
            "obs": fragment.column("obs")[:FRAGMENT_LENGTH],
            "new_obs": fragment.columns["obs"].rows(fragment.first_row + 1, fragment.last_row + 1),
            **{name: fragment.column(name) for name in names},
        }
        for fragment in fragments
    ]


if __name__ == "__main__":
    run(measure)
