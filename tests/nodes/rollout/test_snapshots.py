"""Snapshots of rollouts: what another process sees of them, also while a step hangs, and that nothing is left."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio import to_thread
from graph_rows import drawn
from held_envs import await_that
from leftovers import held_here
from numbered_agents import NumberedAgents
from numbered_module import NumberedEnv, NumberedModule
from places import PLACES

from rollflow import Fragment, MultiAgentRollout, Rollout, Watch
from rollflow.nodes import RandomModule
from rollflow.stream.observe.run_socket import snapshots

STAGES = ["env", "env_to_module", "module", "module_to_env"]


pytestmark = pytest.mark.usefixtures("folder")


def rollout_of(**options: Any) -> Rollout:
    options = {"num_fragments": 2, "fragment_length": 8, "seed": 0, **options}
    return Rollout([partial(NumberedEnv, 0), partial(NumberedEnv, 1)], module=NumberedModule(), **options)


@pytest.mark.parametrize("place", PLACES)
def test_a_snapshot_has_what_the_rollout_says_of_itself(place: str, folder: Path) -> None:
    with rollout_of(num_fragments=None, **PLACES[place]) as rollout:
        next(rollout.batches())
        rollout.publish(rollout.module.state_dict())
        [found] = snapshots()
        assert found["kind"] == "Rollout"
        assert found["name"] == rollout.environments.describe()
        assert found["figures"]["time/iterations"] == 1
        assert found["figures"]["policy/version"] == 1
        assert found["figures"]["time/total_timesteps"] >= (
            15 if "apart" in place else 16
        )  # it may end before its last turn
        assert set(STAGES) - {"env"} <= found["nodes"].keys()
        assert found["nodes"]["caller"]["items"] > 0
        assert found["bottleneck"] is None or found["bottleneck"] in found["nodes"]
        assert found["diagnosis"]["state"] == "caller works"
        assert found["parties"][0]["name"] == "caller"
        inside = {name for task in found["tasks"] for name in task}
        assert {edge["source"] for edge in found["edges"]} <= inside
        assert {edge["target"] for edge in found["edges"]} <= inside | {"fragments"}
    assert snapshots() == []
    assert not folder.exists()


@pytest.mark.anyio
async def test_a_rollout_of_an_event_loop_has_a_snapshot() -> None:
    async with rollout_of() as rollout:
        async for _ in rollout.batches():
            [found] = await to_thread.run_sync(snapshots)
            rollout.drain()
        assert found["nodes"].keys() >= {*STAGES, "caller"}
    assert await to_thread.run_sync(snapshots) == []


@pytest.mark.anyio
async def test_a_graph_has_one_snapshot_with_its_rollouts_as_parts() -> None:
    def sink(fragments: Fragment) -> None:
        pass

    both = {name: rollout_of(num_fragments=None) for name in ("left", "right")}
    graph = drawn("left >2 sink", "right >drop_oldest3 sink", name="two", **both, sink=sink)
    assert [whole.snapshot()["figures"]["time/time_elapsed"] for whole in graph.wholes.values()] == [0.0, 0.0]
    began = time.monotonic()
    async with graph.run():
        found = await to_thread.run_sync(with_returns)
        past_s = time.monotonic() - began
    assert (found["kind"], found["name"]) == ("graph", "two")
    assert found["parts"].keys() == {"left", "right"}
    for name, part in found["parts"].items():
        assert part["kind"] == "Rollout"
        figures = part["figures"]
        assert figures["time/iterations"] > 0, name
        assert figures["time/total_timesteps"] > 0
        assert figures["rollout/episodes"] > 0
        assert figures["policy/lag"] == 0
        assert 0.0 < figures["time/time_elapsed"] <= past_s
    edges = {(edge["source"], edge["target"]): edge for edge in found["edges"] if edge["target"] == "sink"}
    assert edges["left/env_to_module", "sink"]["capacity"] == 2
    assert edges["right/env_to_module", "sink"]["capacity"] == 3
    assert found["nodes"]["sink"]["items"] > 0
    assert await to_thread.run_sync(snapshots) == []


def with_returns() -> dict[str, Any]:
    """The only run's snapshot, once its sink has a fragment, and each rollout a round, a mean return, and a lag."""
    taken: list[dict[str, Any]] = []

    def is_there() -> bool:
        [found] = snapshots()
        taken.append(found)
        of_parts = [part["figures"] for part in found["parts"].values()]
        have_returns = all({"rollout/ep_rew_mean", "policy/lag"} <= each.keys() for each in of_parts)
        counted = all(each["time/iterations"] for each in of_parts)
        return bool(have_returns and found["nodes"]["sink"]["items"] and counted)

    await_that(is_there, lambda: taken[-1])
    return taken[-1]


def test_several_agents_have_a_snapshot() -> None:
    env = partial(NumberedAgents, 0, agents=2, nested=0, at_once=True)
    with MultiAgentRollout(env, module=RandomModule, fragment_length=8, seed=0) as rollout:
        next(rollout.batches())
        [found] = snapshots()
    assert found["kind"] == "MultiAgentRollout"
    assert found["nodes"].keys() >= {*STAGES, "caller"}


def test_nothing_is_left_of_it(folder: Path) -> None:
    before = held_here()
    with rollout_of(watch=Watch(stall_after=None)) as rollout:
        next(rollout.batches())
        assert len(snapshots()) == 1
    assert held_here() == before


def test_a_folder_of_others_does_not_keep_a_rollout_from_running(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with rollout_of() as rollout:
        assert len(list(rollout.batches())) == 2
    assert list(folder.iterdir()) == []
