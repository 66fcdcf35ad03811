"""Runs that are stopped at any moment and go on, beside the same run that never stopped.

    PYTHONPATH=tests/support python -m kill_runs cartpole/threads atari/inline --kills 200 --rounds 60

Every life of a run is a process forked off this one. It notes each round with digests of the batch and of the weights:
a round that is told twice, or that the whole run had too, has to have the same. Lives end by a call of `save`, by
SIGTERM, by SIGKILL after any time, or by SIGKILL between two operations on files, or within a write, of a checkpoint.
"""

import argparse
import copy
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import psutil
import torch
from mpe2 import simple_adversary_v3
from numbered_agents import NumberedTeam, SilentTeam
from pettingzoo.classic.tictactoe import tictactoe
from replayed import write_dataset

from rollflow import (
    Checkpoints,
    DatasetSource,
    EpsilonGreedy,
    FrameStacking,
    MeanStdFilter,
    MultiAgentRollout,
    Replay,
    Rollout,
    minibatches,
)
from rollflow.nodes import Linear, PrevActionsPrevRewards
from rollflow.nodes.connectors.common.batches import as_array
from rollflow.sinks import Prioritized, SampledNStepReturns, SamplesPerInsert
from rollflow.sinks.replay import row_index
from rollflow.stream.data.tree import leaves_of

LONGEST_S = 120.0  # of the end of a life that is told to end
OPERATIONS_OF_SAVES = 70  # of the first ones of a run, with the reading of those before
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


# Environments and pieces, for worker processes as well


def atari(**options: Any) -> Any:
    import ale_py

    gym.register_envs(ale_py)
    env = gym.make("ALE/Breakout-v5", frameskip=1, **options)
    env = gym.wrappers.AtariPreprocessing(env, noop_max=10, screen_size=42)
    return gym.wrappers.FrameStackObservation(env, 2)


def minatar() -> Any:
    from minatar.gym import BaseEnv

    return gym.wrappers.TimeLimit(BaseEnv("breakout"), 50)


def controlled() -> Any:
    from dm_control import suite
    from shimmy.dm_control_compatibility import DmControlCompatibilityV0

    env = DmControlCompatibilityV0(suite.load("cartpole", "swingup", task_kwargs={"random": 3}))
    return gym.wrappers.FlattenObservation(gym.wrappers.TimeLimit(env, 50))


def cooperating() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=11)


def short(id_: str, steps: int) -> Any:
    return gym.make(id_, max_episode_steps=steps)


def filtered(env: Any) -> Any:
    return MeanStdFilter()


def remembering(env: Any) -> Any:
    return PrevActionsPrevRewards()


def stacked(env: Any) -> Any:
    return [MeanStdFilter(), FrameStacking(num_frames=3)]


def stacks(*spaces: Any) -> Any:
    return FrameStacking(num_frames=3, as_learner_connector=True)


def greedy(env: Any) -> Any:
    return EpsilonGreedy(schedule=Linear(0.9, 0.1, 2000))


# What is learnt


def digest(values: Mapping[str, Any]) -> str:
    """A digest of tensors and arrays, with their names."""
    found = sha256()
    for name, value in sorted(values.items()):
        found.update(name.encode())
        for leaf in leaves_of(value):
            found.update(np.ascontiguousarray(as_array(leaf)).tobytes())
    return found.hexdigest()


def modules_of(rollout: Any) -> dict[str, Any]:
    """The modules that are trained, by id; "" stands for the only one."""
    if isinstance(rollout, Rollout):
        return {"": rollout.module}
    return {name: rollout.module[name] for name in rollout.learner.to_train or rollout.module}


def weights_of(rollout: Any) -> Any:
    """The weights of the modules that are trained, as `publish` takes them."""
    weights = {name: module.state_dict() for name, module in modules_of(rollout).items()}
    return weights.get("", weights)


def update(module: Any, optimizer: Any, batch: Any) -> None:
    """Something to learn, from minibatches that torch's own generator has shuffled."""
    parts = [batch] if module.is_stateful() else minibatches(batch, max(2, len(batch["rewards"]) // 2))
    for part in parts:
        outputs = module.forward_train(dict(part))
        loss = outputs["action_dist_inputs"].square().mean() + (outputs["vf_preds"] - part["rewards"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def learnt_from_batches(
    rollout: Any, optimizer: Any, folder: Path | None = None, completes: bool = False
) -> Iterator[Mapping[str, Any]]:
    modules = modules_of(rollout)
    for batch in rollout.batches(complete_episodes=completes):
        for name, part in ({"": batch} if "" in modules else batch).items():
            update(modules[name], optimizer, part)
        yield batch


def learn(rollout: Rollout, optimizer: Any, batch: Mapping[str, Any], target: torch.Tensor) -> torch.Tensor:
    """Have the outputs of the actions come near a target f32[B]; the errors f32[B]."""
    values = rollout.module.forward_train({"obs": batch["obs"]})["action_dist_inputs"]
    errors = target - values.gather(1, batch["actions"][:, None]).squeeze(1)
    optimizer.zero_grad()
    (batch.get("weights", 1.0) * errors.square()).mean().backward()
    optimizer.step()
    return errors.detach()


def learnt_from_replay(rollout: Rollout, optimizer: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """The digests of all batches sampled in a round, of a prioritized replay whose blocks and capacity are small."""
    row_index._BLOCK_BYTES = 4096
    replay = Replay(
        600,
        sampler=Prioritized(),
        rate=SamplesPerInsert(2.0, min_size=100),
        batch_size=32,
        pieces=[SampledNStepReturns(n_step=3, gamma=0.99)],
        seed=0,
    )
    slow, generator = copy.deepcopy(rollout.module), torch.Generator().manual_seed(5)
    rollout.attach(replay=replay, slow=slow, generator=generator)
    optimizer.step()  # of nothing: a schedule warns if it steps before one
    sampled, last = "", len(rollout.environments.lanes) - 1
    for fragment in rollout.fragments():
        replay.insert(fragment)
        for batch in replay.batches():
            with torch.no_grad():
                best = slow.forward_train({"obs": batch["new_obs"]})["action_dist_inputs"].amax(1)
            noise = torch.rand(len(best), generator=generator)
            target = batch["rewards"] + 0.99 ** batch["n_step"] * ~batch["terminateds"] * best + noise
            replay.update_priorities(batch["ids"], learn(rollout, optimizer, batch, target.float()))
            sampled += digest(batch)
        slow.load_state_dict(rollout.module.state_dict())
        if fragment.lane == last:
            yield {"rewards": fragment.gather("rewards"), "sampled": np.frombuffer(sampled.encode(), np.uint8)}
            sampled = ""


def learnt_from_dataset(rollout: Rollout, optimizer: Any, folder: Path) -> Iterator[dict[str, Any]]:
    """Each round a batch of a dataset, which was written beside the run, and which is read in a shuffled order."""
    path = folder.parent / "episodes"
    if not path.exists():
        with Rollout("CartPole-v1", num_envs=4, fragment_length=50, num_fragments=6, seed=1) as expert:
            write_dataset(expert.fragments(), made := path.with_name("being-made"))
        made.rename(path)
    source = DatasetSource(path, batch_size=48, shuffle_seed=3, window_steps=300, passes=None)
    rollout.attach(source=source)
    for _, batch in zip(rollout.batches(), source, strict=False):
        learn(rollout, optimizer, batch, torch.ones(len(batch["actions"])))
        yield batch


class Way(NamedTuple):
    """A kind of run."""

    env: Any
    options: Mapping[str, Any] = {}
    completes: bool = False
    several: bool = False  # agents
    learnt: Callable[..., Iterator[Mapping[str, Any]]] | None = None  # rounds that have been learnt from; None: batches


def by_side(agent: str, episode: Any) -> str:
    """The module of an agent: of one that stands against others, or begins."""
    return "first" if agent in ("adversary_0", "player_1", "agent 0") else "others"


TWO = {"module": {"first": None, "others": None}, "agent_to_module_mapping_fn": by_side}
ENVS: dict[str, Way] = {
    "cartpole": Way("CartPole-v1", {"env_to_module_connector": filtered}),
    "plain": Way(partial(short, "CartPole-v1", 60), {"env_to_module_connector": filtered, "lookback": 3}),
    "pendulum": Way("Pendulum-v1", {"lookback": 2, "env_to_module_connector": filtered}),
    "lstm": Way("CartPole-v1", {"model_config": {"use_lstm": True}, "env_to_module_connector": filtered}),
    "pieces": Way("CartPole-v1", {"env_to_module_connector": remembering, "module_to_env_connector": greedy}),
    "stacked": Way("CartPole-v1", {"env_to_module_connector": stacked, "learner_connector": stacks}),
    "whole": Way("CartPole-v1", {"env_to_module_connector": filtered}, completes=True),
    "cheetah": Way(partial(short, "HalfCheetah-v5", 40), {"env_to_module_connector": filtered}),
    "hopper": Way("Hopper-v5", {"env_to_module_connector": filtered}),
    "atari": Way(partial(atari, repeat_action_probability=0.0), {"num_envs": 2}),
    "sticky": Way(partial(atari, repeat_action_probability=0.25), {"num_envs": 2}),
    "minatar": Way(minatar),
    "lander": Way("LunarLander-v3", {"env_to_module_connector": filtered}),
    "replay": Way("CartPole-v1", {"module_to_env_connector": greedy}, learnt=learnt_from_replay),
    "minatar replay": Way(minatar, {"module_to_env_connector": greedy}, learnt=learnt_from_replay),
    "cloning": Way("CartPole-v1", {"num_envs": 1}, learnt=learnt_from_dataset),
    "adversary": Way(simple_adversary_v3.parallel_env, {**TWO, "env_to_module_connector": filtered}, several=True),
    "adversary turns": Way(simple_adversary_v3.env, {**TWO, "model_config": {"use_lstm": True}}, several=True),
    "tictactoe": Way(tictactoe.env, TWO, several=True),
    "whole tictactoe": Way(tictactoe.env, TWO, several=True, completes=True),
    "team": Way(partial(NumberedTeam, 0), TWO, several=True),
    "silent team": Way(partial(SilentTeam, 0), TWO, several=True),
    "control": Way(controlled, {"env_to_module_connector": filtered}),
    "agents": Way(cooperating, {"env_to_module_connector": filtered}, several=True),
}
PLACES: dict[str, Mapping[str, Any]] = {
    "inline": {},
    "lanes": {"lanes": 2},
    "ahead": {"lanes": 2, "prefetch": 2, "deterministic": True},
    "threads": {"lanes": 2, "where": "threads", "deterministic": True},
    "threads ahead": {"lanes": 2, "where": "threads", "prefetch": 1, "deterministic": True},
    "processes": {"lanes": 2, "where": "processes", "workers": 2, "deterministic": True},
    "processes ahead": {"lanes": 2, "where": "processes", "workers": 2, "prefetch": 2, "deterministic": True},
    "rollouts": {"lanes": 2, "where": "rollouts", "workers": 2, "deterministic": True},
    "rollouts ahead": {"lanes": 3, "where": "rollouts", "workers": 2, "prefetch": 2, "deterministic": True},
}


# One life


def live(way: Way, folder: Path, rounds: int, told: Path, *, every_s: float, saves_at: int = 0) -> None:
    """Begin a run, or go on with it, and note its rounds; its last ones once it is over.

    saves_at    rounds of this life after which it saves by a call, and leaves the loop; 0: it goes on
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = {name: each for name, each in way.options.items() if callable(each) or name == "module"}
    kind: Any = MultiAgentRollout if way.several else Rollout
    if any(folder.glob("checkpoint-*")):
        rollout = kind.resume(folder, way.env if callable(way.env) else None, **given)
    else:
        options = {"num_envs": 4, "fragment_length": 16, "seed": 3, **way.options}
        rollout = kind(way.env, checkpoints=Checkpoints(folder, every_s, keep=2, most_share=1.0), **options)
    parameters = [each for module in modules_of(rollout).values() for each in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    rollout.attach(optimizer=optimizer, schedule=schedule)
    with rollout, told.open("a", buffering=1) as lines:
        learnt = way.learnt or partial(learnt_from_batches, completes=way.completes)
        for count, batch in enumerate(learnt(rollout, optimizer, folder), 1):
            schedule.step()
            number, weights = rollout.log.rounds, weights_of(rollout)
            rollout.publish(weights)
            largest = max(float(part["rewards"].max()) for part in (batch.values() if way.several else [batch]))
            rollout.metrics.log_value("largest", largest, window=7)
            returns = f"{rollout.returns.count} {rollout.returns.mean} {rollout.metrics.peek('largest')}"
            returns = "" if way.options.get("prefetch") else returns  # how far it is ahead depends on the machine
            lines.write(f"{number} {digest(batch)} {digest(weights)} {returns}\n")
            if number >= rounds:
                lines.write(f"end {digest(weights)}\n")
                break
            if count == saves_at:
                rollout.save(folder, keep=2)
                break
        assert not rollout.lost or way.completes, rollout.lost


def killing(folder: Path, number: int) -> None:
    """Have this process be killed at so many operations on files in a folder, of which one is the middle of a write."""
    left, sync = number, os.fsync

    def counts() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def look(event: str, arguments: Any) -> None:
        if event in OPERATIONS and str(folder) in str(arguments[0]) and counts():
            os.kill(os.getpid(), signal.SIGKILL)

    def half(descriptor: int) -> None:
        if counts():
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = half
    sys.addaudithook(look)


def forked(function: Callable[[], None]) -> int:
    """Call a function in a fork of this process, which ends then; its id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        function()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    os._exit(status)


# Many lives


class Found(NamedTuple):
    """What lives of a run have told."""

    lives: Counter[str]  # by how they ended
    lines: int
    twice: int  # of these, told more than once
    differ: list[str]  # rounds that are not those of the run that never stopped, and errors
    left: list[str]  # in the folder, and processes


def whole(way: Way, rounds: int, folder: Path) -> dict[str, str]:
    """What a run that never stops tells of each round."""
    told = folder / "told"
    pid = forked(partial(live, way, folder / "run", rounds, told, every_s=1e9))
    assert os.waitpid(pid, 0)[1] == 0
    return dict(line.split(" ", 1) for line in told.read_text().splitlines())


def stopped(
    way: Way, rounds: int, kills: int, folder: Path, expected: Mapping[str, str], draw: random.Random, longest_s: float
) -> Found:
    """Runs of so many kills in all, begun anew whenever one has come to its end, held against the whole run.

    longest_s    until a signal comes, at most
    """
    lives: Counter[str] = Counter()
    differ: list[str] = []
    left: list[str] = []
    lines = twice = run = 0
    while sum(lives.values()) - lives["end"] < kills:
        run += 1
        place, told = folder / f"run{run}", folder / f"told{run}"
        ends = False
        while not ends:
            is_enough = sum(lives.values()) - lives["end"] >= kills
            how = "end" if is_enough else draw.choice(["call", "term", "kill", "kill", "write", "write"])
            number = lives["write"] % OPERATIONS_OF_SAVES + 1  # each is the moment of a kill
            ends, is_killed, wrong = _life(way, place, rounds, told, how, number, draw, longest_s)
            lives["end" if ends else how] += 1
            differ += wrong
            if wrong:
                break
        seen: dict[str, str] = {}
        text = told.read_text() if told.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():
            number, _, rest = line.partition(" ")
            lines += 1
            twice += number in seen
            if seen.setdefault(number, rest) != rest or expected.get(number) != rest:
                differ.append(f"run {run}, round {line}: expected {expected.get(number)}")
        if missing := expected.keys() - seen:
            differ.append(f"run {run} lacks rounds {sorted(missing)[:5]}")
        there = [each.name for each in place.iterdir() if not each.name.startswith(("checkpoint-", ".lock"))]
        left += [] if is_killed else there  # else it was killed in the save behind its last round
    return Found(lives, lines, twice, differ, left + processes_left())


def _life(
    way: Way, folder: Path, rounds: int, told: Path, how: str, number: int, draw: random.Random, longest_s: float
) -> tuple[bool, bool, list[str]]:
    """One life: whether the run came to its end, whether it was killed, and what went wrong."""
    saves_at = draw.randint(1, max(1, rounds // 4)) if how == "call" else 0

    def run() -> None:
        if how == "write":
            killing(folder, number)
        live(way, folder, rounds, told, every_s=draw.choice([1e-9, 0.02, 0.1]), saves_at=saves_at)

    pid = forked(run)
    if how in ("kill", "term"):
        time.sleep(draw.uniform(0, longest_s))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGTERM)
    process = psutil.Process(pid)
    try:
        process.wait(LONGEST_S)
    except psutil.TimeoutExpired:
        os.kill(pid, signal.SIGKILL)
        return False, True, [f"a life that was to end by {how} did not end within {LONGEST_S:g} s"]
    code = process.wait()
    allowed = {"kill": {-9}, "write": {-9}, "term": {-15, 143}}.get(how, set())
    is_done = "\nend " in (told.read_text() if told.exists() else "")
    wrong = [] if code in {0, *allowed} else [f"a life that was to end by {how} ended with {code}"]
    return is_done, code == -9, wrong


def processes_left() -> list[str]:
    """Processes that lives have left behind: with a parent that has gone. Those are waited for, some seconds."""
    until = time.monotonic() + 20
    while True:
        left = [f"{each.pid} {' '.join(each.cmdline())[:60]}" for each in psutil.process_iter() if _is_left(each)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _is_left(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(_MARK) == _OURS and process.pid != os.getpid()
    return False


_MARK, _OURS = "ROLLFLOW_KILL_RUNS", str(os.getpid())


def main(names: Sequence[str], kills: int, rounds: int, seed: int) -> int:
    """Kill runs of these kinds, print a line for each; how many of them differ."""
    wrong = 0
    for each in ("torch._dynamo", "gymnasium.envs.mujoco", "ale_py", "minatar.gym", "shimmy", "dm_control.suite"):
        with suppress(ImportError):  # once, and not in every life
            importlib.import_module(each)
    for name in names:
        env, _, place = name.partition("/")
        way = ENVS[env]._replace(options={**ENVS[env].options, **PLACES[place or "inline"]})
        with tempfile.TemporaryDirectory(prefix="kill-runs-") as text:
            folder, began, memory = Path(text), time.monotonic(), set(os.listdir("/dev/shm"))
            expected = whole(way, rounds, folder)
            longest_s = 1.2 * (time.monotonic() - began)
            found = stopped(way, rounds, kills, folder, expected, random.Random(f"{seed} {name}"), longest_s)
            left = found.left + sorted(set(os.listdir("/dev/shm")) - memory)
        ends = ", ".join(f"{count} {how}" for how, count in sorted(found.lives.items()))
        lines = [
            f"{name:22} lives: {ends}; {found.lines} rounds told, {found.twice} twice, {len(found.differ)} differ, "
            f"{len(left)} left ({time.monotonic() - began:.0f} s)",
            *found.differ[:5],
            *left[:5],
        ]
        sys.stdout.write("\n    ".join(lines) + "\n")
        sys.stdout.flush()
        wrong += bool(found.differ or left)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stop runs at random moments, and compare them with whole ones")
    parser.add_argument("names", nargs="*", help=f"ENVIRONMENT/PLACE of {', '.join(ENVS)} and {', '.join(PLACES)}")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ[_MARK] = _OURS
    every = [f"{env}/{place}" for env in ENVS for place in PLACES]
    sys.exit(main(given.names or every, given.kills, given.rounds, given.seed))
