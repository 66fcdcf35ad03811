"""Going on with an earlier run: steps, rounds, policy versions and the log's x axis count on from where it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from extras import needs
from graph_rows import Collect, ended, row
from small_env import SmallEnv
from together import Together

from rollflow import MultiAgentRollout, Rollout, Watch
from rollflow.nodes import RandomModule
from rollflow.stream import ModuleError, RunError


class Walk(SmallEnv):
    """Episodes of five steps."""

    length = 5


def two() -> Together:
    return Together({agent: Walk() for agent in "ab"})


SAVED = {"steps": 1000, "vector_steps": 500, "rounds": 30, "versions": {"": 7}}


def walk(**options: Any) -> Rollout:
    given: dict[str, Any] = {"num_envs": 2, "fragment_length": 4, "num_fragments": 3, "autoreset_mode": "SameStep"}
    return Rollout(Walk, **(given | {"seed": 0} | options))


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_counts_versions_and_card_go_on(where: str, tmp_path: Path) -> None:
    rollout = walk(where=where, lanes=1)
    rollout.load_state_dict(SAVED)
    assert (rollout.num_steps, rollout.policy_version) == (1000, 7)
    versions = []
    with rollout:
        for fragment in rollout.fragments():
            versions.append(set(fragment.gather("policy_version").tolist()))
            rollout.publish(rollout.module.state_dict())
        rollout.save_policy(tmp_path / "policy")
    assert versions[0] == {7}
    assert set().union(*versions) <= {7, 8, 9}
    assert (rollout.num_steps, rollout.policy_version) == (1024, 10)
    card = json.loads((tmp_path / "policy" / "policy.json").read_text())["trained_on"]
    assert {name: card[name] for name in ("steps", "policy_version")} == {"steps": 1024, "policy_version": 10}
    state = rollout.state_dict()
    assert state == {"steps": 1024, "vector_steps": 512, "rounds": 33, "versions": {"": 10}}
    assert json.loads(json.dumps(state)) == state
    assert rollout.lost == {}


def test_the_parts_of_a_run_count_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    counted = []
    for parts in ([6], [2, 3, 1]):
        state: Any = None
        for count in parts:
            rollout = walk(num_fragments=count)
            if state is not None:
                torch.save(state, tmp_path / "state.pt")
                rollout.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
            with rollout:
                for _ in rollout.batches():
                    rollout.publish(rollout.module.state_dict())
            state = rollout.state_dict()
        counted.append(state)
    assert counted[0] == counted[1] == {"steps": 48, "vector_steps": 24, "rounds": 6, "versions": {"": 6}}


def test_pace_holds_with_versions_that_go_on() -> None:
    rollout = walk(num_fragments=5, prefetch=2, max_lag=2, on_excess="pace")
    rollout.load_state_dict(SAVED)
    with rollout:
        for _ in rollout.batches():
            rollout.publish(rollout.module.state_dict())
    assert (rollout.policy_version, rollout.lost) == (12, {})


def test_several_modules_go_on_each_with_its_version() -> None:
    options: dict[str, Any] = {"fragment_length": 4, "num_fragments": 2, "seed": 0}
    rollout = MultiAgentRollout(two, module={"a": None, "b": RandomModule}, **options)
    rollout.load_state_dict({"steps": 100, "vector_steps": 50, "rounds": 5, "versions": {"a": 4, "b": 0}})
    with rollout:
        for fragment in rollout.fragments():
            seen = fragment.policy_versions()
            rollout.publish({"a": rollout.module["a"].state_dict()})
    assert seen == {"a": 5, "b": 0}
    assert rollout.state_dict() == {"steps": 116, "vector_steps": 58, "rounds": 7, "versions": {"a": 6, "b": 0}}
    other = MultiAgentRollout(two, module={"a": None, "b": RandomModule}, **options)
    with pytest.raises(ModuleError, match=r"versions of the modules \['past'\], which are not there"):
        other.load_state_dict({"steps": 1, "vector_steps": 1, "rounds": 1, "versions": {"a": 1, "past": 2}})
    assert (other.num_steps, other.policy_versions) == (0, {"a": 0, "b": 0})
    other.close()


@pytest.mark.anyio
async def test_a_node_of_a_graph_goes_on() -> None:
    rollout = walk(log=None)
    rollout.load_state_dict(SAVED)
    await ended(row(rollout=rollout, collect=Collect()))
    assert rollout.state_dict() == {"steps": 1024, "vector_steps": 512, "rounds": 33, "versions": {"": 7}}


def rows_of(kind: str, path: Path, axis: str) -> list[int]:
    if kind == "jsonl":
        return [json.loads(line)[axis] for line in path.read_text().splitlines()]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(path))
    found.Reload()
    return [event.step for event in found.Scalars("time/total_timesteps")]


@pytest.mark.parametrize("axis", ["steps", "updates"])
@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_the_x_axis_goes_on(kind: str, axis: Any, tmp_path: Path) -> None:
    if kind == "tensorboard":
        needs("tensorboard")
    path = tmp_path / "log"
    with walk(log=f"{kind}:{path}", watch=Watch(log_x=axis)) as rollout:
        list(rollout.batches())
    last = {"steps": 24, "updates": 3}[axis]
    assert rows_of(kind, path, axis)[-1] == last
    going_on = walk(log=f"{kind}:{path}", watch=Watch(log_x=axis))
    going_on.load_state_dict(rollout.state_dict())
    with going_on:
        list(going_on.batches())
    rows = rows_of(kind, path, axis)
    assert rows == sorted(rows)
    assert rows[-1] == 2 * last


def test_speed_is_that_of_this_run_alone() -> None:
    rollout = walk()
    rollout.load_state_dict({**SAVED, "steps": 10**12})
    with rollout:
        list(rollout.batches())
        figures = rollout.log.figures()
    assert figures["time/total_timesteps"] == 10**12 + 24
    assert figures["time/fps"] * figures["time/time_elapsed"] == pytest.approx(24)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (None, "state is None, expected what state_dict"),
        ({"weight": torch.zeros(1)}, r"state is \{'weight': Tensor float32\[1\]\}, expected what state_dict"),
        ({**SAVED, "steps": -1}, "state has -1 under 'steps', expected whole numbers"),
        ({**SAVED, "rounds": 1.5}, "state has 1.5 under 'rounds'"),
        ({"rounds": 1, "versions": {"": 1}}, "state has None under 'steps'"),
        ({**SAVED, "versions": {"": True}}, "state has True under ''"),
        ({**SAVED, "versions": {"a": 1}}, r"state has versions of \['a'\], expected that of one module"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state: Any, text: str) -> None:
    rollout = walk()
    with pytest.raises(ValueError, match=text):
        rollout.load_state_dict(state)
    assert rollout.state_dict() == {"steps": 0, "vector_steps": 0, "rounds": 0, "versions": {"": 0}}
    rollout.close()


def test_a_state_comes_before_the_run_and_before_weights() -> None:
    rollout = walk()
    rollout.publish(rollout.module.state_dict())
    with pytest.raises(RunError, match="weights have been published, expected load_state_dict of the run before"):
        rollout.load_state_dict(SAVED)
    assert rollout.state_dict() == {"steps": 0, "vector_steps": 0, "rounds": 0, "versions": {"": 1}}
    with rollout, pytest.raises(RunError, match="the rollout has begun, expected load_state_dict before it runs"):
        rollout.load_state_dict(SAVED)
