"""Checkpoints: a run that was saved and goes on gives what it would have given, and loses and doubles nothing."""

import contextlib
import errno
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
import walk_env
from counted_agents import Counted
from extras import needs
from hypothesis import given, settings, strategies as st
from kill_runs import TWO, by_side, digest, filtered, learnt_from_batches, modules_of, weights_of
from lost_agents import check_continuity, check_multi_agent_chunks, emitted_steps
from mpe2 import simple_adversary_v3
from numbered_agents import NumberedTeam, SilentTeam
from numbered_env import NumberedEnv
from pettingzoo.classic.tictactoe import tictactoe
from remote_hosts import BrokenWire, hosting, listening
from remote_rollouts import await_that, cut_off
from stand_in_pool import StandInPool
from tensor_envs import of_arrays
from tensor_walk import SilentTensorWalk, TensorWalk
from together import Together
from walk_env import Stuck, Walk

from rollflow import (
    Checkpoints,
    ConnectorV2,
    EnvHost,
    Forward,
    GeneralAdvantageEstimation,
    JaxEnvs,
    MultiAgentRollout,
    RemoteEnvs,
    RemoteRollouts,
    RLModule,
    Rollout,
    RolloutHost,
    Timeouts,
    TorchEnvs,
    Watch,
)
from rollflow.nodes import RandomModule
from rollflow.nodes.env.workers.ready_slots import ReadySlots
from rollflow.nodes.rollout import checkpoint
from rollflow.nodes.rollout.checkpoint import RUN, read
from rollflow.stream import GraphError, RunError
from rollflow.stream.data.errors import CheckpointError
from rollflow.stream.data.infos import copied

ROUNDS, STOP = 8, 3
ELSEWHERE = {"prefetch": [0, 1, 2], "where": ["inline", "threads"]}
SUPPORT = Path(walk_env.__file__).parent


class Numbers(NumberedEnv):
    """Numbered transitions, of an environment that says where it stands."""

    NAMES = "slot", "episode", "step_number", "life", "length", "truncates"

    def get_state(self) -> dict[str, Any]:
        drawn = self.np_random.bit_generator.state["state"]
        return {**{name: getattr(self, name) for name in self.NAMES}, "drawn": drawn}

    def set_state(self, state: dict[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self, name, state[name])
        bits = self.np_random.bit_generator
        bits.state = {**bits.state, "state": state["drawn"]}


class CountedTeams(Counted):
    """Environments in arrays that say where they stand."""

    def get_state(self) -> Any:
        return {"steps": self.steps}

    def set_state(self, state: Any) -> None:
        self.steps = np.array(state["steps"])


class Scaled(ConnectorV2):
    """Scales what agents see by what it has counted of all and of an episode: it sees all agents, and learns."""

    count = 0

    def recompute_output_observation_space(self, seen: Any, done: Any) -> Any:
        return gym.spaces.Dict(dict.fromkeys(seen.spaces, gym.spaces.Box(0, 1e9, (5,), np.float32)))

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            self.count += 1
            number = episode.custom_data["asked"] = episode.custom_data.get("asked", 0) + 1
            scale = 1 + self.count % 7 + number
            made = {agent: (seen / scale).astype(np.float32) for agent, seen in episode.get_observations(-1).items()}
            episode.set_observations(new_data=made, at_indices=-1)
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def by_episode(agent: str, episode: Any) -> str:
    return ("first", "others")[int(episode.id_, 16) % 2]


def learnt(rollout: Any, rounds: int) -> Iterator[str]:
    """Digests of the batches, and at last of the weights."""
    parameters = [each for module in modules_of(rollout).values() for each in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    rollout.attach(optimizer=optimizer)
    with rollout:
        for number, batch in enumerate(learnt_from_batches(rollout, optimizer), 1):
            rollout.publish(weights_of(rollout))
            yield digest(batch)
            if number == rounds:
                break
        yield digest(weights_of(rollout))
        yield f"{rollout.num_steps} {rollout.returns.count} {rollout.returns.mean}"


def begun(env: Any = "CartPole-v1", *, several: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    if "made" in options:
        return Rollout(options.pop("made")(), **({"fragment_length": 16, "seed": 3} | options))
    kind = MultiAgentRollout if several else Rollout
    return kind(env, **({"num_envs": 4, "fragment_length": 16, "seed": 3} | options))


def resumed_from(folder: Path, options: dict[str, Any]) -> Any:
    """A run with these options that goes on: what no file can have is given again."""
    kind = MultiAgentRollout if options.get("several") else Rollout
    functions = {name: each for name, each in options.items() if callable(each) and name != "made"}
    if "made" in options:
        functions["env"] = options["made"]()
    return kind.resume(folder, **functions)


def pair() -> Any:
    return Together({agent: Walk() for agent in "ab"})


def scaled(envs: Any) -> Any:
    return Scaled()


def saved(folder: Path, run: Any = None) -> Path:
    """The folder of a checkpoint of a run, behind its first round."""
    with (run := run or begun()):
        next(run.batches())
        path: Path = run.save(folder)
    return path


def told_of_environments(folder: Path) -> Any:
    """What the manifest of a folder's checkpoint says of the environments of each lane."""
    return json.loads(next(folder.glob("*/checkpoint.json")).read_text())["environments"]


APART: dict[str, Any] = {"forward": Forward(max_batch=4)}


def with_answers_in_order(rollout: Rollout) -> Rollout:
    """Slots of this rollout that step apart answer one at a time, in their order."""
    node: Any = rollout.environments
    if not isinstance(node, ReadySlots):
        return rollout
    usual, order, early = node._heard_within, deque(range(node.num_envs)), dict[int, Any]()
    order.rotate(-int(node.lanes[0].episodes.slots[0]))  # a run that goes on has had the answers of those before

    def heard(wait_s: float) -> list[Any]:
        came = usual(wait_s)
        if node._resets is not None:
            return came
        early.update((each if isinstance(each, int) else each[0], each) for each in came)
        if order[0] not in early:
            return []
        order.rotate(-1)
        return [early.pop(order[-1])]

    node._heard_within = heard
    return rollout


def tensors() -> TorchEnvs:
    return TorchEnvs(TensorWalk(), allow_host_copies=True)


def lanes_of_tensors() -> list[TorchEnvs]:
    return [TorchEnvs(TensorWalk(gives_final=gives_final)) for gives_final in (True, False)]


def in_jax() -> JaxEnvs:
    needs("jax")
    from jax_forms import Gymnax1

    return JaxEnvs(Gymnax1(), num_envs=3)


def gae(observation_space: Any, action_space: Any) -> Any:
    return GeneralAdvantageEstimation(gamma=0.9, lambda_=0.8)


WAYS: dict[str, dict[str, Any]] = {
    "vector form": {},
    "one by one": {"env": lambda: gym.make("CartPole-v1")},
    "next step": {"env": lambda: gym.make("CartPole-v1"), "autoreset_mode": "NextStep"},
    "lookback": {"env": "Pendulum-v1", "lookback": 3},
    "filter": {"env_to_module_connector": filtered},
    "lstm": {"model_config": {"use_lstm": True}},
    "lanes": {"lanes": 2, "env_to_module_connector": filtered},
    "threads": {"lanes": 2, "where": "threads"},
    "processes": {"lanes": 3, "where": "processes", "workers": 2, "deterministic": True},
    "ahead in processes": {"prefetch": 1, "lanes": 2, "deterministic": True, "where": "processes", "env": Walk},
    "rollouts": {"where": "rollouts", "workers": 1, "env_to_module_connector": filtered},
    "rollouts in order": {"lanes": 3, "where": "rollouts", "workers": 2, "deterministic": True, "lookback": 2}
    | {"env_to_module_connector": filtered},
    "ahead in rollouts": {"prefetch": 1, "lanes": 2, "deterministic": True, "where": "rollouts", "workers": 2}
    | {"env": Walk, "env_to_module_connector": filtered},
    "replayed": {"env": Walk},
    "replayed in the next step": {"env": Walk, "autoreset_mode": "NextStep"},
    "ahead": {"prefetch": 2, "lanes": 2, "deterministic": True, "env_to_module_connector": filtered},
    "ahead in threads": {"prefetch": 1, "lanes": 2, "deterministic": True, "where": "threads"},
    "apart in threads": {"where": "threads", **APART, "env_to_module_connector": filtered},
    "apart in processes": {"where": "processes", **APART, "workers": 2, "model_config": {"use_lstm": True}},
    "apart in the next step": {"where": "processes", **APART, "workers": 1, "env": Walk, "autoreset_mode": "NextStep"},
    "apart and replayed": {"where": "threads", **APART, "env": Walk},
    "tensors": {"made": tensors, "env_to_module_connector": filtered},
    "tensors and lstm": {"made": tensors, "model_config": {"use_lstm": True}, "lookback": 3},
    "lanes of tensors": {"made": lanes_of_tensors, "prefetch": 1, "deterministic": True, "learner_connector": gae},
    "tensors as arrays": {"made": tensors, "learner_connector": gae, "env_to_module_connector": of_arrays},
    "jax": {"made": in_jax, "learner_connector": gae},
}
TEAM = {"several": True, "env": partial(NumberedTeam, 0), **TWO}
ONE_PART = {**TEAM, "env": partial(NumberedTeam, 0, nested=0), "num_envs": 3}
WAYS |= {
    "agents": TEAM,
    "agents by episode": {**ONE_PART, "agent_to_module_mapping_fn": by_episode},
    "agents with memory": {**ONE_PART, "model_config": {"use_lstm": True}, "lookback": 2},
    "agents ahead in rollouts": TEAM
    | {"where": "rollouts", "workers": 2, "lanes": 2, "deterministic": True, "prefetch": 1},
    "agents in arrays": {"several": True, "env": partial(CountedTeams, 0), "num_envs": None, "module": None},
    "agents in turns": {**TEAM, "env": tictactoe.env, "explore": {"others": False}},
    "agents at once": {**TEAM, "env": simple_adversary_v3.parallel_env, "env_to_module_connector": filtered},
    "agents replayed": {**ONE_PART, "env": partial(SilentTeam, 0, nested=0), "modules_to_train": ["others"]},
    "agents jointly": {**ONE_PART, "joint_connector": scaled, "lookback": 0},
    "agents in lanes": {**TEAM, "lanes": 2, "where": "threads", "deterministic": True, "prefetch": 1},
    "agents in processes": {**TEAM, "lanes": 3, "where": "processes", "workers": 2, "deterministic": True},
    "agents in rollouts": {**ONE_PART, "where": "rollouts", "workers": 1, "deterministic": True},
    "agents ahead in processes": {**ONE_PART, "env": partial(SilentTeam, 0, nested=0), "prefetch": 1}
    | {"where": "processes", "workers": 1, "deterministic": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(way: str, tmp_path: Path) -> None:
    whole = list(learnt(with_answers_in_order(begun(**WAYS[way])), ROUNDS))
    assert len(set(whole)) == ROUNDS + 2
    options = WAYS[way] | {"checkpoints": Checkpoints(tmp_path, every_s=1e9)}
    first, run = [], with_answers_in_order(begun(**options))
    for number, text in enumerate(learnt(run, ROUNDS), 1):
        first.append(text)
        if number == STOP:
            run.save(tmp_path)
            break
    run.close()
    torch.manual_seed(99)  # of another process
    resumed = with_answers_in_order(resumed_from(tmp_path, options))
    rest = list(learnt(resumed, ROUNDS - STOP))
    assert first + rest[:-1] == whole[:-1]
    if not options.get("prefetch"):  # how far it is ahead in the end depends on the machine
        assert rest[-1] == whole[-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"lanes": 2, "where": "threads", "model_config": {"use_lstm": True}}, {"where": "rollouts", "workers": 1}],
)
def test_a_run_that_is_saved_before_its_first_step_goes_on(options: Any, tmp_path: Path) -> None:
    expected = list(learnt(begun(**options), 2))
    with (run := begun(**options)):
        run.save(tmp_path)
    assert list(learnt(Rollout.resume(tmp_path), 2)) == expected


class Half(RLModule):
    """It has weights of a type that numpy lacks, in its optimizer as well."""

    def setup(self) -> None:
        self.layers = torch.nn.Linear(4, 3, dtype=torch.bfloat16)

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        found = self.layers(batch["obs"].bfloat16()).float()
        return {"action_dist_inputs": found[:, :2], "vf_preds": found[:, 2]}


def test_weights_of_half_precision_and_gpus_generators_go_on(tmp_path: Path, monkeypatch: Any) -> None:
    expected = list(learnt(begun(module=Half), 3))
    of_gpus = [torch.tensor([7, number], dtype=torch.uint8) for number in range(3)]
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: of_gpus)
    first = list(learnt(begun(module=Half, checkpoints=Checkpoints(tmp_path)), 1))[:1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: found.append((state.tolist(), device)))
    assert first + list(learnt(Rollout.resume(tmp_path, module=Half), 2)) == expected
    assert found == [([7, 0], 0), ([7, 1], 1)]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_run_goes_on_to_the_bit_wherever_its_lanes_step_next(prefetch: int, tmp_path: Path) -> None:
    options = {"lanes": 2, "deterministic": True, "prefetch": prefetch, "env_to_module_connector": filtered}
    expected = list(learnt(begun(**options), 8))[:8]
    run, found = begun(**options, checkpoints=Checkpoints(tmp_path, every_s=1e9)), []
    places: Any = ("threads", None), ("processes", 2), ("processes", 1), ("inline", None)
    for where, workers in places:
        found += list(learnt(run, 2))[:2]
        run = Rollout.resume(tmp_path, where=where, workers=workers, env_to_module_connector=filtered)
    run.close()
    assert found == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"env": "Acrobot-v1"}, r"size mismatch for encoder.layers.0.weight.*; expected the modules and pieces of the"),
        ({"module": RandomModule}, "Unexpected key"),
        ({"env_to_module_connector": lambda env: []}, r"a state for \['MeanStdFilter'\]"),
    ],
)
def test_other_modules_and_pieces_than_the_runs_are_refused(given: Any, text: str, tmp_path: Path) -> None:
    saved(tmp_path, begun(env_to_module_connector=filtered))
    given = {"env_to_module_connector": filtered} | given
    with pytest.raises(CheckpointError, match=rf"checkpoint-\d+ can't be gone on from: .*{text}"):
        Rollout.resume(tmp_path, **given)


@pytest.mark.parametrize(
    "given", [{"deterministic": True}, {"autoreset_mode": "NextStep"}, {"where": "threads", **APART}], ids=str
)
def test_lanes_that_go_on_in_another_way_begin_anew(given: Any, tmp_path: Path, caplog: Any) -> None:
    one_by_one = partial(gym.make, "CartPole-v1")
    saved(tmp_path, begun(one_by_one))
    with (run := Rollout.resume(tmp_path, one_by_one, **given)):
        assert "environments begin anew, and what was under way is left out" in caplog.text
        next(run.batches())
    assert run.num_steps > 64


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("apart")])
def test_slots_that_step_apart_go_on_from_any_of_their_steps(way: str, tmp_path: Path) -> None:
    options = WAYS[way] | {"prefetch": 2, "num_fragments": 12}

    def digests(rollout: Rollout, folder: Path | None = None) -> Iterator[str]:
        with with_answers_in_order(rollout):
            for number, batch in enumerate(rollout.batches()):
                yield digest(batch)
                if folder is not None and number < 8:
                    rollout.save(folder / f"{number}")

    whole = list(digests(begun(**options)))
    saved = list(digests(begun(**options, checkpoints=Checkpoints(tmp_path / "own", every_s=1e9)), folder=tmp_path))
    assert saved == whole
    for number in (0, 4, 7):
        resumed = resumed_from(tmp_path / f"{number}", options)
        lane: Any = resumed.environments.lanes[0]
        assert lane.held
        assert list(digests(resumed)) == whole[number + 1 :]


def numbers(fragments: Any) -> Iterator[tuple[int, ...]]:
    for chunk in itertools.chain.from_iterable(fragment.episodes() for fragment in fragments):
        for observation, action in zip(chunk.get_observations()[:-1], chunk.get_actions(), strict=True):
            yield (*map(int, observation), int(action))


def of_a_life(rollout: Any, stop: int | None = None, folder: Any = None) -> Iterator[Any]:
    """The fragments of a run, which is saved behind so many; None: all that come."""
    with rollout:
        yield from itertools.islice(rollout.fragments(), stop)
        if stop is not None:
            rollout.save(folder)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_transition_is_handed_out_once(data: Any, tmp_path_factory: Any) -> None:
    options: dict[str, Any] = {
        "num_envs": data.draw(st.integers(1, 3)),
        "fragment_length": data.draw(st.integers(1, 7)),
        "autoreset_mode": data.draw(st.sampled_from(["SameStep", "NextStep"])),
    }
    elsewhere_in = ELSEWHERE
    if data.draw(st.booleans()):
        options |= {"lanes": 1, "deterministic": data.draw(st.booleans())}
    else:
        elsewhere_in = ELSEWHERE | {"where": ["threads"]}
        options["forward"] = Forward(max_batch=4, max_wait=data.draw(st.sampled_from([0.0, 1e-3])))
    options |= {name: data.draw(st.sampled_from(of)) for name, of in elsewhere_in.items()}
    folder = tmp_path_factory.mktemp("run")
    slots = iter(range(100))
    lengths = 3, 9

    def make() -> Numbers:
        return Numbers(next(slots) % options["num_envs"], lengths=lengths)

    found: list[tuple[int, ...]] = []
    stops = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    rollout = Rollout(make, module=RandomModule, seed=1, num_fragments=16, **options)
    for stop in stops:
        found += numbers(of_a_life(rollout, stop, folder))
        elsewhere = {name: data.draw(st.sampled_from(of)) for name, of in elsewhere_in.items()}
        rollout = Rollout.resume(folder, make, module=RandomModule, **elsewhere)
    found += numbers(of_a_life(rollout))
    assert rollout.lost == {}
    assert len(found) == len(set(found)) == rollout.num_steps
    for slot in range(options["num_envs"]):
        places = sorted(each[1:3] for each in found if each[0] == slot)
        assert all(then in ((a, b + 1), (a + 1, 0)) for (a, b), then in pairwise(places))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_step_of_every_agent_is_handed_out_once(data: Any, tmp_path_factory: Any) -> None:
    options: dict[str, Any] = {
        "fragment_length": data.draw(st.integers(1, 7)),
        "prefetch": data.draw(st.integers(0, 2)),
        "where": data.draw(st.sampled_from(["inline", "threads"])),
        "lanes": data.draw(st.integers(1, 2)),
        "num_envs": 2,
        "lookback": data.draw(st.integers(0, 2)),
        "module": {"first": RandomModule, "others": RandomModule},
        "agent_to_module_mapping_fn": by_side,
    }
    folder = tmp_path_factory.mktemp("run")
    slots = iter(range(100))

    def make() -> NumberedTeam:
        return NumberedTeam(next(slots) % 2)

    fragments: list[Any] = []
    rollout = MultiAgentRollout(make, seed=1, num_fragments=16, **options)
    functions = {name: options[name] for name in ("module", "agent_to_module_mapping_fn")}
    for stop in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        fragments += of_a_life(rollout, stop, folder)
        rollout = MultiAgentRollout.resume(folder, make, **functions)
    fragments += of_a_life(rollout)
    assert rollout.lost == {}
    steps = emitted_steps(fragments)
    assert len(steps) == len(set(steps)) == rollout.num_steps
    check_continuity(fragments)
    check_multi_agent_chunks(fragments)


def test_infos_of_ended_episodes_go_on_in_fragments_that_were_ready(tmp_path: Path) -> None:
    def infos(fragment: Any) -> list[Any]:
        return [chunk.get_infos() for chunk in fragment.episodes()]

    options: dict[str, Any] = {"deterministic": True, "prefetch": 2, "num_fragments": 6, "module": RandomModule}
    with begun(Walk, **options) as run:
        whole = [infos(each) for each in run.fragments()]
    with (run := begun(Walk, **options, checkpoints=Checkpoints(tmp_path))):
        first = [infos(next(run.fragments()))]
        while len(run._drive._fragments) < 2:  # those that are ready
            run._drive._arrived.wait()
        run.save(tmp_path)
        first_end = sorted(tmp_path.glob("checkpoint-*"))[-1]
        copied_to = shutil.copytree(first_end, tmp_path / "at" / first_end.name)
    with Rollout.resume(copied_to, Walk, module=RandomModule) as resumed:
        assert first + [infos(each) for each in resumed.fragments()] == whole


SILENT: dict[str, tuple[dict[str, Any], str]] = {
    "inline": ({"env": Walk, "lanes": 1}, "Walk: the state of a Walk can't be read"),
    "processes": ({"env": Walk, "lanes": 1, "where": "processes"}, "Walk: the state of a Walk can't be read"),
    "rollouts": ({"env": Walk, "lanes": 1, "where": "rollouts"}, "Walk: the state of a Walk can't be read"),
    "apart in threads": ({"env": Walk, "where": "threads", **APART}, "Walk: the state of a Walk can't be read"),
    "apart in processes": ({"env": Walk, "where": "processes", **APART, "workers": 2}, "Walk: the state of a Walk"),
    "pool": (
        {"made": lambda: StandInPool([NumberedEnv(slot, lengths=(3, 9)) for slot in range(4)], 2)},
        "StandInPool does not say the states of",
    ),
    "tensors": ({"made": lambda: TorchEnvs(SilentTensorWalk(4))}, "TorchEnvs(SilentTensorWalk): the state of"),
}


@pytest.mark.parametrize("way", SILENT)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_environments_that_cannot_be_read_begin_anew_and_say_so(
    way: str, prefetch: int, tmp_path: Path, caplog: Any
) -> None:
    options, reason = SILENT[way]
    with (run := begun(**options, prefetch=prefetch)):
        batches = run.batches()
        for _ in range(2):
            next(batches)
        run.save(tmp_path)
        handed = run._rounds.handed_steps
    assert f"begins lane 0's episodes anew: {reason}" in caplog.text
    assert told_of_environments(tmp_path) == [["restart"]]
    run = resumed_from(tmp_path, options)
    waiting, found = len(run._waiting), 0
    with run:
        for number, fragment in enumerate(run.fragments()):
            found += fragment.num_steps
            chunks = list(fragment.episodes())
            lost = [chunk for chunk in chunks if "lost" in chunk.custom_data]
            assert bool(fragment.host.losses) == (number == waiting)
            assert all(chunk.is_truncated and reason in chunk.custom_data["lost"] for chunk in lost)
            if number == waiting:
                assert len(lost) == sum(len(loss.cut) for loss in fragment.host.losses)
                begun_anew = [chunk for chunk in chunks if chunk.t_started == 0 and "lost" not in chunk.custom_data]
                assert {chunk.slot for chunk in begun_anew} == set(range(4))
            if number > waiting + 1:
                break
    assert "lane 0: its environments begin anew, and its open episodes end" in caplog.text
    assert set(run.lost) <= {"closed"}
    assert found == run.num_steps - run.lost.get("closed", 0) - handed


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(("kind", "host"), [(RemoteEnvs, EnvHost), (RemoteRollouts, RolloutHost)])
def test_on_hosts_environments_begin_anew_and_all_else_is_kept(
    kind: Any, host: Any, prefetch: int, tmp_path: Path, caplog: Any
) -> None:
    def begun_over(make: Any) -> Any:
        hosts = kind.listen("tcp://127.0.0.1:0")
        with hosting(hosts.addresses[0], "CartPole-v1", kind=host, num_envs=4):
            run = make(hosts)
            yield run
            with run:
                for number, fragment in enumerate(run.fragments(), 1):
                    run.publish(run.module.state_dict())
                    yield fragment
                    if number == 3:
                        break

    saved = begun_over(lambda hosts: begun(hosts, num_envs=None, prefetch=prefetch))
    run, *first = [next(saved), *itertools.islice(saved, 3)]
    run.save(tmp_path)
    steps, version, count = run.num_steps, run.policy_version, run.returns.count
    assert list(saved) == []
    assert "begins lane 0's episodes anew: environments on hosts do not say their state" in caplog.text
    assert told_of_environments(tmp_path) == [["restart"]]

    rest = begun_over(lambda hosts: Rollout.resume(tmp_path, hosts))
    resumed = next(rest)
    assert (resumed.policy_version, resumed.returns.count) == (version, count)
    assert digest(resumed.module.state_dict()) == digest(run.module.state_dict())
    then = list(rest)
    assert "lane 0: its environments begin anew, and its open episodes end: environments on hosts" in caplog.text
    assert [each.sequence for each in [*first, *then]] == list(range(6))
    anew = next(each for each in then if each.losses)  # behind those that were ready
    assert anew.losses[0].reason == "the run was resumed: environments on hosts do not say their state"
    assert anew.losses[0].row == anew.first_row or (prefetch and kind is RemoteEnvs)
    ids = [{episode.id_ for episode in each.episodes()} for each in (first[0], anew)]
    assert not ids[0] & ids[1] or kind is RemoteEnvs
    assert not np.array_equal(first[0].column("obs")[0], anew.column("obs")[0])
    assert resumed.num_steps >= steps
    assert resumed.lost.keys() <= {"closed"}


@pytest.mark.parametrize("env", ["CartPole-v1", pair])
@pytest.mark.parametrize(("kind", "host"), [(RemoteEnvs, EnvHost), (RemoteRollouts, RolloutHost)])
def test_a_save_does_not_wait_for_a_host_that_is_away(kind: Any, host: Any, env: Any, tmp_path: Path) -> None:
    remote = listening(kind)
    with (
        contextlib.closing(BrokenWire(remote.addresses[0], lambda: None)) as wire,
        hosting(wire.address, env, kind=host, num_envs=4),
        begun(remote, num_envs=None, prefetch=1, several=env is pair) as run,
    ):
        fragments = run.fragments()
        next(fragments)
        cut_off(wire, run)
        run.save(tmp_path)
        wire.is_down = False
        assert [next(fragments).sequence for _ in range(3)] == [1, 2, 3]
        assert run.lost == {}
    hosts = listening(kind)
    with hosting(hosts.addresses[0], env, kind=host, num_envs=4), type(run).resume(tmp_path, hosts) as resumed:
        assert [fragment.sequence for fragment in itertools.islice(resumed.fragments(), 3)] == [1, 2, 3]


def test_a_run_goes_on_with_other_lanes_and_says_what_is_kept(tmp_path: Path, caplog: Any) -> None:
    with (run := begun()):
        for _ in run.batches():
            run.publish(run.module.state_dict())
            run.save(tmp_path)
            break
    resumed = Rollout.resume(tmp_path, num_envs=2, fragment_length=8)
    assert "goes on with {'slots': [2], 'fragment_length': 8} where it had {'slots': [4], 'fragment_length': 16}" in (
        caplog.text
    )
    with resumed:
        next(resumed.batches())
    assert (resumed.num_steps, resumed.policy_version) == (64 + 16, 1)
    assert digest(resumed.module.state_dict()) == digest(run.module.state_dict())


def test_what_another_layout_leaves_out_is_counted_as_lost(tmp_path: Path) -> None:
    handed = 0
    with (run := begun(prefetch=2, lanes=2, module=RandomModule)):
        for fragment in run.fragments():
            handed += fragment.num_steps
            if run.num_steps > handed + 8:
                run.environments.lost_steps = 5
                run.save(tmp_path)
                break
    run = Rollout.resume(tmp_path, lanes=1, module=RandomModule, num_fragments=2)
    assert run.lost["closed"] == run.num_steps - handed > 0  # before its thread makes more
    assert run.lost["workers"] == 5
    with run:
        handed += sum(fragment.num_steps for fragment in run.fragments())
    assert run.num_steps == handed + run.lost["closed"]


def test_rounds_save_by_themselves_and_keep_the_newest(tmp_path: Path) -> None:
    with (run := begun(checkpoints=Checkpoints(tmp_path, every_s=1e-9, keep=2, most_share=1.0))):
        seen: set[str] = set()
        for _ in run.batches():
            seen |= {each.name for each in tmp_path.glob("checkpoint-*")}
            if len(seen) > 2:
                break
    there = sorted(each.name for each in tmp_path.glob("checkpoint-*"))
    assert len(there) == 2
    assert min(seen) < there[0] < there[1] <= f"checkpoint-{run.num_steps:012d}"
    with (resumed := Rollout.resume(tmp_path)):
        next(resumed.batches())


def test_checkpoints_that_cost_much_are_written_less_often(tmp_path: Path, caplog: Any) -> None:
    with (run := begun(checkpoints=Checkpoints(tmp_path, every_s=1e-9, keep=9, most_share=1e-9))):
        for number, _ in enumerate(run.batches()):
            if number == 9:
                break
            if run._checkpoints._written is not None:
                run._checkpoints._written.result()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2  # the first, and that of the end
    text = (
        r"a checkpoint takes 0\.\d\d s: there is one every \d+ s, so that they take 0.0 % of the time; expected that,"
    )
    assert len(re.findall(text, caplog.text)) == 1


PROGRAM = """
import sys
from rollflow import Checkpoints, Rollout
with Rollout("CartPole-v1", num_envs=2, seed=0, checkpoints=Checkpoints(sys.argv[1], every_s=1e9)) as rollout:
    for batch in rollout.batches():
        print(rollout.num_steps, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_told_to_end_saves_first(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        told = [first, *map(int, process.stdout.read().split())]
        assert process.wait() == 128 + signal.SIGTERM
    assert [each.name for each in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{told[-1]:012d}"]
    with (resumed := Rollout.resume(tmp_path)):
        next(resumed.batches())
    assert resumed.num_steps > told[-1]


def test_what_is_no_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        Rollout.resume(tmp_path)
    path = saved(tmp_path)
    (tmp_path / ".checkpoint-000000000999.new").mkdir()  # of a process that was killed as it wrote
    Rollout.resume(tmp_path).close()
    manifest, arrays = path / "checkpoint.json", path / "checkpoint.safetensors"
    whole = manifest.read_bytes(), arrays.read_bytes()
    for name, data, text in (
        (manifest, whole[0][:-9], "can't be gone on from: .*checkpoint.json can't be read"),
        (manifest, whole[0].replace(b'"files"', b'"filez"'), "another digest than it says"),
        (
            manifest,
            RUN.manifest_bytes({"format": 1}),
            "has format 1, .* from 2 on; expected the rollflow that",
        ),
        (manifest, RUN.manifest_bytes({"kind": "rollflow replay"}), "of kind 'rollflow replay', expected"),
        (arrays, whole[1][:-9], "it was truncated"),
        (arrays, whole[1][:-9] + b"otherwise", "another checksum .*: it was altered"),
        (arrays, b"", "it was truncated"),
        (manifest, b"{}", "no digest"),
    ):
        manifest.write_bytes(whole[0])
        arrays.write_bytes(whole[1])
        name.write_bytes(data)
        with pytest.raises(CheckpointError, match=text):
            Rollout.resume(tmp_path)


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> tuple[Path, Path]:
    """Two checkpoints in a folder."""
    folder = tmp_path_factory.mktemp("run")
    with (run := begun(lanes=2, env_to_module_connector=filtered)):
        next(run.batches())
        run.attach(live=Live())
        return run.save(folder, keep=2), run.save(folder, keep=2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_altered_or_missing_in_a_checkpoint_is_refused_in_words(data: Any, two: tuple[Path, Path]) -> None:
    before, newest = two
    file = data.draw(st.sampled_from(sorted(newest.iterdir())))
    whole = file.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    altered = data.draw(
        st.sampled_from(
            [
                None,
                whole[:place],
                whole + b"\n",
                whole[:place] + bytes([whole[place] ^ 1 << data.draw(st.integers(0, 7))]) + whole[place + 1 :],
                whole[:place] + whole[place + 1 :],
                data.draw(st.binary(max_size=99)),
            ]
        )
    )
    file.unlink() if altered is None else file.write_bytes(altered)
    try:
        text = rf"{newest.name} can't be gone on from: .*{file.name}.*Rollout.resume\('{before}'\) is the one before"
        with pytest.raises(CheckpointError, match=text):
            Rollout.resume(newest.parent, env_to_module_connector=filtered)
    finally:
        file.write_bytes(whole)


def test_what_a_kill_has_left_goes_and_the_newest_whole_one_is_named(tmp_path: Path) -> None:
    half = tmp_path / ".checkpoint-000000000007.new"
    half.mkdir()
    (tmp_path / "checkpoint-of-mine").mkdir()
    with (run := begun()):
        next(run.batches())
        paths = [run.save(tmp_path, keep=3) for _ in range(3)]  # of as many steps: no moment is without one
    assert not half.exists()
    assert [each.name for each in paths] == [f"checkpoint-000000000064{end}" for end in ("", ".001", ".002")]
    (paths[1] / "checkpoint.json").unlink()
    (paths[2] / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"064\.002 can't be .* Rollout.resume\('.*064'\) is the one before"):
        Rollout.resume(tmp_path)
    Rollout.resume(paths[0]).close()


def test_what_no_file_can_hold_is_to_be_given_again(tmp_path: Path) -> None:
    saved(tmp_path, begun(Walk, env_to_module_connector=filtered))
    with pytest.raises(CheckpointError, match="can't have env, env_to_module_connector of the run; expected the same"):
        Rollout.resume(tmp_path)


def test_a_run_that_stands_still_or_has_custom_objects_is_refused(tmp_path: Path) -> None:
    run = begun()
    with pytest.raises(RunError, match=r"the rollout is new, expected save\(\) while a loop"):
        run.save(tmp_path)
    with run:
        next(run.batches())
        run.environments.lanes[0].episodes[0].custom_data["what"] = object()
        for keep in (0, -1, 2.5):
            with pytest.raises(ValueError, match=r"keep is .*, expected a whole number from 1 on"):
                run.save(tmp_path, keep=keep)
        with pytest.raises(CheckpointError, match=r"the run can't be saved: state/lanes.*object"):
            run.save(tmp_path)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_lane_whose_worker_is_lost_is_saved_as_one_that_begins_anew(where: str, tmp_path: Path) -> None:
    with (run := begun(Walk, lanes=2, where=where, workers=2)):
        batches = run.batches()
        next(batches)
        environments = run.environments
        os.kill(environments._workers[1].process.pid, signal.SIGKILL)
        select.select([environments.remotes[1].sock], [], [])  # until it has gone
        run.save(tmp_path)
    assert told_of_environments(tmp_path) == [["restart"], ["restart"]]
    with (resumed := Rollout.resume(tmp_path, Walk)):
        next(resumed.batches())
    assert resumed.num_steps == 2 * run.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_a_worker_that_does_not_say_its_state_begins_anew(where: str, tmp_path: Path) -> None:
    with (run := begun(Stuck, lanes=2, where=where, workers=2, timeouts=Timeouts(reset=1.0))):
        batches = run.batches()
        next(batches)
        run.save(tmp_path)
        next(batches)
        assert run.lost == {}
    assert told_of_environments(tmp_path) == [["restart"], ["restart"]]
    assert "the state of its environments was not said for 1 s" in str(read(tmp_path)[1]["environments"])


def test_order_is_for_what_steps_here_or_in_workers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="deterministic=True, but max_batch"):
        begun(deterministic=True, where="threads", lanes=2, forward=Forward(max_batch=4))
    hosts = RemoteEnvs.listen("tcp://127.0.0.1:0")
    refused = pytest.raises(ValueError, match="deterministic=True is for environments that step here")
    with hosting(hosts.addresses[0], "CartPole-v1"), refused:
        Rollout(hosts, deterministic=True)


SWINGING: dict[str, Any] = {"env": "Pendulum-v1", "lanes": 4}
THREADS, INLINE = {"where": "threads"}, dict[str, Any]()


def workers(where: str, *counts: int) -> list[dict[str, Any]]:
    return [{"where": where, "workers": count} for count in counts]


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("options", "places"),
    [
        (
            {"env": pair, "several": True, "num_envs": 3, "lanes": 3, "fragment_length": 8},
            [INLINE, THREADS, *workers("processes", 2), *workers("rollouts", 2)],
        ),
        ({**SWINGING, "env_to_module_connector": filtered}, [INLINE, THREADS, *workers("processes", 1, 3)]),
        pytest.param(SWINGING, [INLINE, *workers("rollouts", 1, 3)], marks=pytest.mark.slow),
        # A piece that learns has a copy in each lane, and other numbers than one that all lanes share.
        pytest.param(
            {**SWINGING, "env_to_module_connector": filtered}, workers("rollouts", 1, 2, 4), marks=pytest.mark.slow
        ),
    ],
    ids=["agents", "processes", "rollouts", "pieces in rollouts"],
)
def test_the_same_batches_wherever_lanes_step(options: Any, places: Any, prefetch: int) -> None:
    def digests(place: dict[str, Any]) -> list[str]:
        return list(learnt(begun(deterministic=True, prefetch=prefetch, **options, **place), 6))[:-1]

    first, *others = map(digests, places)
    assert others == [first] * len(others)


def test_seeds_of_another_beginning_are_others(tmp_path: Path) -> None:
    with (run := begun(Walk)):
        first = next(run.fragments()).column("obs")[0]
        run.save(tmp_path)
    with (resumed := Rollout.resume(tmp_path, Walk)):
        again = next(resumed.fragments()).column("obs")[0]
    assert not np.array_equal(first, again)


def test_whole_episodes_have_what_was_held_back_when_the_run_was_saved(tmp_path: Path) -> None:
    def whole(run: Rollout, number: int) -> list[Any]:
        with run:
            fragments = run.fragments(complete_episodes=True)
            of_each = (
                each for _, fragment in zip(range(number), fragments, strict=False) for each in fragment.episodes()
            )
            found = [
                (each.id_, digest({"": each.get_observations(), "infos": len(each.get_infos())})) for each in of_each
            ]
            run.save(tmp_path)
        return found

    expected = whole(begun(fragment_length=5), 12)
    assert whole(begun(fragment_length=5), 4) + whole(Rollout.resume(tmp_path), 8) == expected


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_lanes_stop_after_as_many_fragments_as_if_the_run_had_gone_on(lanes: int, stop: int, tmp_path: Path) -> None:
    with (run := begun(num_fragments=3, lanes=lanes)):
        for number, _ in enumerate(run.batches(), 1):
            if number == stop:
                run.save(tmp_path)
    with (resumed := Rollout.resume(tmp_path)):
        assert len(list(resumed.batches())) == 3 - stop
    assert resumed.num_steps == run.num_steps


def test_a_save_that_comes_when_environments_have_ended_does_not_end_the_loop(tmp_path: Path, caplog: Any) -> None:
    with (run := begun(prefetch=3, num_fragments=3, checkpoints=Checkpoints(tmp_path, every_s=1e-9, most_share=1.0))):
        batches = run.batches()
        next(batches)
        assert run._drive is not None
        run._drive._has_stopped.wait()
        run._checkpoints._written.result()  # the first one
        run._checkpoints._cost_s = 0.0  # the next is due
        assert len(list(batches)) == 2
    assert "no checkpoint is saved: the run has ended" in caplog.text


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"where": "threads"}], ids=str)
def test_a_run_whose_last_save_fails_ends_all_the_same(options: Any, tmp_path: Path) -> None:
    folder, before = tmp_path / "run", set(threading.enumerate())
    run = begun(checkpoints=Checkpoints(folder), **options)
    with pytest.raises(CheckpointError, match=r"run: .*; expected a folder"), run:
        next(run.batches())
        shutil.rmtree(folder)
        folder.touch()
    assert "closed" in repr(run)
    assert run.environments.is_closed
    assert set(threading.enumerate()) == before


def test_a_recording_that_cannot_be_ended_leaves_no_thread(tmp_path: Path, monkeypatch: Any) -> None:
    before = set(threading.enumerate())
    run = begun(checkpoints=Checkpoints(tmp_path / "run"), watch=Watch(record=tmp_path / "run.schedule"))
    with pytest.raises(OSError, match="No space left"), run:
        next(run.batches())
        monkeypatch.setattr(run._options.schedule, "_write", Mock(side_effect=OSError(28, "No space left on device")))
    assert set(threading.enumerate()) == before


def test_a_folder_of_a_longer_run_keeps_the_new_one(tmp_path: Path, caplog: Any) -> None:
    longer, path = saved(tmp_path, begun(fragment_length=32)), saved(tmp_path)
    assert f"{longer} is of another run, which was longer: it is moved to other-{longer.name}" in caplog.text
    assert path.is_dir()
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / f"other-{longer.name}"]


def test_a_programs_own_handler_of_sigterm_stays(tmp_path: Path) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        with (run := begun(checkpoints=Checkpoints(tmp_path))):
            next(run.batches())
            os.kill(os.getpid(), signal.SIGTERM)
            assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_runs_that_are_killed_at_any_moment_are_those_that_never_stopped() -> None:
    ways = "cartpole/inline", "pendulum/threads ahead", "cartpole/processes", "replay/threads", "cloning/inline"
    command = [sys.executable, "-m", "kill_runs", *ways, "--kills", "8", "--rounds", "12"]
    done = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


EXAMPLE = """
import sys, cartpole
often = cartpole.Checkpoints  # after nearly every round: so that five lives make fewer than all
cartpole.Checkpoints = lambda folder, every_s: often(folder, every_s=1e-3, most_share=1.0)
cartpole.MAX_UPDATES = 30
cartpole.main(save_to=sys.argv[1], folder=sys.argv[2])
"""


@pytest.mark.slow
def test_the_example_that_is_killed_five_times_ends_with_the_same_weights(tmp_path: Path) -> None:
    def life(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", EXAMPLE, str(tmp_path / name), str(tmp_path / f"{name} run")]
        return subprocess.Popen(command, cwd=SUPPORT.parents[1] / "examples", stdout=subprocess.DEVNULL)

    with life("whole") as process:
        assert process.wait() == 0
    for _ in range(5):
        there = {*tmp_path.glob("killed run/checkpoint-*")}
        with life("killed") as process:
            await_that(lambda seen=there: {*tmp_path.glob("killed run/checkpoint-*")} - seen)
            process.kill()
    assert not (tmp_path / "killed").exists()
    with life("killed") as process:
        assert process.wait() == 0
    whole, killed = ((tmp_path / name / "module.safetensors").read_bytes() for name in ("whole", "killed"))
    assert whole == killed


BEHIND = PROGRAM.replace(
    "print(rollout.num_steps, flush=True)", "break\n    print(0, flush=True)\n    sys.stdin.read()"
)


@pytest.mark.slow
def test_sigterm_behind_the_last_round_ends_the_process_behind_the_block(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEHIND, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.stdin.close()
        assert process.wait() == -signal.SIGTERM
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1  # the run as it was left


class Refusing:
    """Something that takes no state."""

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("it learns nothing")


def test_what_was_attached_is_not_lost_where_nothing_is_attached(tmp_path: Path, caplog: Any) -> None:
    with (run := begun()):
        run.attach(counter=Live())
        next(run.batches())
        run._checkpoints.attached["counter"].state["array"] += 7
        run.save(tmp_path)
    with (run := Rollout.resume(tmp_path)):
        text = "the checkpoint has counter, which nothing was given"
        with pytest.warns(RuntimeWarning, match=text) as warned:
            next(run.batches())
        assert warned[0].filename == __file__
        assert text in caplog.text
        with pytest.raises(
            RunError, match=r"attach\(counter=…\) is called in the loop .*, expected it before the loop"
        ):
            run.attach(counter=Live())
        run.save(tmp_path)
    with pytest.raises(RuntimeError, match="it learns nothing") as raised:
        Rollout.resume(tmp_path).attach(counter=Refusing())
    assert raised.value.__notes__ == ["while attach(counter=…) had it load what was saved"]
    counter = Live()
    Rollout.resume(tmp_path).attach(counter=counter)
    np.testing.assert_array_equal(counter.state["array"], [7, 7, 7])


def test_a_folder_of_another_run_is_refused_and_a_copy_is_a_run_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    first = tmp_path / "first"
    with (run := begun(checkpoints=Checkpoints(first))):
        next(run.batches())
    with pytest.raises(CheckpointError, match=r"first has checkpoints of another run; expected Rollout\.resume\("):
        begun(checkpoints=Checkpoints(first)).start()
    with pytest.raises(CheckpointError, match=r"can't be written to /proc/none: .*; expected a folder"):
        begun(checkpoints=Checkpoints("/proc/none")).start()
    shutil.copytree(first, tmp_path / "copy")
    there = sorted(first.iterdir())
    with (run := Rollout.resume(tmp_path / "copy")):
        next(run.batches())
    assert sorted(first.iterdir()) == there
    assert len(list((tmp_path / "copy").glob("checkpoint-*"))) == 2
    monkeypatch.chdir(tmp_path)
    Rollout.resume(first, checkpoints=Checkpoints("first")).start().close()  # the same folder by another path


def test_one_run_at_a_time_saves_itself_to_a_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(checkpoint, "LOCK_WAIT_S", 0.2)
    with (run := begun(checkpoints=Checkpoints(tmp_path))):
        next(run.batches())
        run.save(tmp_path)
        with pytest.raises(CheckpointError, match=r"another run writes to .*, expected one at a time: close it, or"):
            Rollout.resume(tmp_path).start()
    with (run := Rollout.resume(tmp_path)):
        next(run.batches())


def test_a_disk_that_is_full_is_told_and_nothing_half_written_stays(tmp_path: Path, monkeypatch: Any) -> None:
    def refused(*of_file: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_synced", refused)
    text = rf"the run can't be saved to {tmp_path}/checkpoint-\d+: .*No space left.*; expected a disk that has room"
    run = begun(checkpoints=Checkpoints(tmp_path))
    with pytest.raises(CheckpointError, match=text), run:
        next(run.batches())
        with pytest.raises(CheckpointError, match=text):
            run.save(tmp_path)
    assert not run.is_running
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"folder": 3}, "folder of Checkpoints is 3, expected the path of a folder"),
        ({"folder": ""}, "folder of Checkpoints is '', expected the path of a folder"),
        ({"keep": 0}, "keep of Checkpoints is 0, expected a whole number from 1 on"),
        ({"most_share": 7}, "most_share of Checkpoints is 7, expected a number above 0, up to 1"),
    ],
)
def test_checkpoints_that_can_not_be_are_refused_when_they_are_made(given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Checkpoints(**{"folder": "runs", **given})


def test_a_piece_that_the_run_before_had_not_is_told(tmp_path: Path, caplog: Any) -> None:
    saved(tmp_path)
    with Rollout.resume(tmp_path, env_to_module_connector=filtered) as run:
        next(run.batches())
    assert "the run that was saved had no MeanStdFilter in env_to_module: its state is as it was made" in caplog.text


class Failing(Walk):
    """Something that fails once its class says so."""

    fails = ""

    def step(self, action: Any) -> Any:
        assert self.fails != "step", "no step"
        return super().step(action)


class FailingSelf(Failing):
    def get_state(self) -> Any:
        assert self.fails != "get", "nothing to say"
        return {}

    def set_state(self, state: Any) -> None:
        assert self.fails != "set", "nothing to take"


@pytest.mark.parametrize(
    ("kind", "fails", "text"),
    [
        (FailingSelf, "get", "slot 0, while its state was read"),
        (FailingSelf, "set", "slot 0, while it was given its state"),
        (Failing, "step", "slot 0, while its recorded actions were stepped again"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"where": "threads"}], ids=str)
def test_an_environment_that_fails_as_it_is_saved_or_goes_on_is_named(
    kind: Any, fails: str, text: str, options: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    def run() -> None:
        resumed = Rollout.resume(tmp_path, kind)
        monkeypatch.setattr(kind, "fails", fails if fails != "get" else "")
        with resumed:
            next(resumed.batches())
            monkeypatch.setattr(kind, "fails", fails)
            resumed.save(tmp_path)

    saved(tmp_path, begun(kind, checkpoints=Checkpoints(tmp_path), lanes=1, **options))
    with pytest.raises(AssertionError) as raised:
        run()
    lane = (
        "lane 0, of which a checkpoint was to be saved" if fails == "get" else "lane 0, which goes on from a checkpoint"
    )
    assert {text, lane} <= set(raised.value.__notes__)


class Locked(Walk):
    """It says what no file can have, another thing in each slot."""

    def get_state(self) -> Any:
        return {"lock": threading.Lock()}

    def set_state(self, state: Any) -> None:
        raise NotImplementedError


def test_a_reason_to_begin_anew_is_told_once_for_each_lane(tmp_path: Path, caplog: Any) -> None:
    with (run := begun(Locked, lanes=2)):
        next(run.batches())
        run.save(tmp_path)
        run.save(tmp_path)
    told = [each.getMessage() for each in caplog.records if "episodes anew" in each.getMessage()]
    reason = "Locked.get_state()['lock'] is lock <unlocked _thread.lock object>, which can't be saved"
    assert [reason in each for each in told] == [True, True]
    assert ["lane 0" in each for each in told] == [True, False]


def test_a_save_in_another_thread_is_refused(tmp_path: Path) -> None:
    with (run := begun()):
        next(run.batches())
        with ThreadPoolExecutor(1) as pool, pytest.raises(RunError, match=r"save\(\) was called in another thread"):
            pool.submit(run.save, tmp_path).result()


class Drawing(Walk):
    """It says where it stands, but not what it draws, and has nothing to say before its first reset."""

    def get_state(self) -> Any:
        return {"at": self.at, "count": self.count, "large": 1 << 100}

    def set_state(self, state: Any) -> None:
        assert state["large"] == 1 << 100
        self.at, self.count = state["at"], state["count"]
        self.steps = iter(range(self.count + 1, 100))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, *rest = super().step(action)
        self.count = rest[-1]["step"]
        return observation, *rest


def test_what_an_environment_draws_goes_on_with_what_it_says(tmp_path: Path) -> None:
    whole = list(learnt(begun(Drawing), 4))
    run = begun(Drawing, checkpoints=Checkpoints(tmp_path))
    rounds = learnt(run, 1)
    first = next(rounds)
    run.close()
    assert told_of_environments(tmp_path) == [["state"]]
    assert [first, *learnt(Rollout.resume(tmp_path, Drawing), 3)] == whole


class Live:
    """Something that learns in arrays of its own, and shows them as they are."""

    def __init__(self) -> None:
        self.state = {"array": np.zeros(3), "pair": (torch.zeros(2), [0])}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_what_is_captured_does_not_change_while_it_is_written(tmp_path: Path) -> None:
    live = Live()
    with (run := begun()):
        run.attach(live=live)
        next(run.batches())
        state = copied(live.state_dict())
        live.state["array"] += 1
        live.state["pair"][0].add_(1)
        live.state["pair"][1][0] = 1
        assert (state["array"].sum(), state["pair"][0].sum(), state["pair"][1]) == (0, 0, [0])
        run.save(tmp_path)
    with Rollout.resume(tmp_path) as resumed:
        resumed.attach(live=(other := Live()))
    assert digest({"": other.state}) == digest({"": live.state})


def test_a_log_has_no_rows_of_what_is_done_again(tmp_path: Path) -> None:
    def rows() -> list[int]:
        return [json.loads(line)["updates"] for line in (tmp_path / "log").read_text().splitlines()]

    with (run := begun(log=f"jsonl:{tmp_path / 'log'}")):
        for number, _ in enumerate(run.batches(), 1):
            run.log.make_row()
            if number == 2:
                run.save(tmp_path / "run")
            if number == 4:
                break
    assert rows()[-1] == 4
    with (run := Rollout.resume(tmp_path / "run")):
        next(run.batches())
    assert rows() == sorted(set(rows()))
    assert rows()[-1] == 3


def test_what_can_not_be_saved_is_refused_before_the_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    run = begun(checkpoints=checkpoints)
    with pytest.raises(ValueError, match=r"attach\(optimizer=…\) is given 3, expected an object with state_dict"):
        run.attach(optimizer=3)
    with pytest.raises(GraphError, match="checkpoints are saved by a loop over the rollout"):
        run.graph()


def test_weights_that_no_round_ends_with_are_not_kept() -> None:
    with (run := begun(deterministic=True)):
        for number, _ in enumerate(run.batches(), 1):
            for _ in range(9):
                run.publish(run.module.state_dict())
            assert len(run._acting.weights.get_state(run._acting.copy)["waiting"]) == 1
            if number == 3:
                break


def test_a_close_from_another_thread_waits_until_the_state_is_read(tmp_path: Path) -> None:
    class Slow(Numbers):
        def get_state(self) -> dict[str, Any]:
            reading.set()
            closing.join(0.1)
            return super().get_state()

    reading = threading.Event()
    with (run := begun(lambda: Slow(0, lengths=(3, 9)), module=RandomModule, num_envs=1)):
        closing = threading.Thread(target=lambda: (reading.wait(), run.close()))
        next(run.batches())
        closing.start()
        with contextlib.suppress(RunError):  # it was closed before the state was written
            run.save(tmp_path)
        closing.join()
    assert not run.is_running
