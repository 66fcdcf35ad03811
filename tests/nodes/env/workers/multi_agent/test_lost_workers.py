"""Workers of several agents' environments that are killed, hang, or raise: nothing that came out of them is lost."""

import logging
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from agent_logs import steps_of
from ending_agent_envs import DoomedAgents, logs_of
from fragment_equality import in_time
from held_envs import await_file
from hypothesis import given, settings, strategies as st
from lost_agents import check_laws, not_emitted
from numbered_agents import NumberedAgents
from places import rollout_at
from property_examples import examples, strategies
from serial_module import SerialModule

from rollflow import ConnectorV2, Forward, MultiAgentRollout, Timeouts
from rollflow.stream import EnvError

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)

PLACES: list[Any] = ["processes", pytest.param("rollouts", marks=pytest.mark.slow)]  # which starts with torch each time


def rollout_of(makers: list[Any], **options: Any) -> MultiAgentRollout:
    defaults: dict[str, Any] = {"where": "processes", "module": SerialModule(), "fragment_length": 8, "seed": 0}
    return MultiAgentRollout(makers, **(defaults | options))


DRAWN = strategies(fate=["kill", "raise"], step=(0, 20), lives=(1, 3), fragment_length=(1, 9), length=[3, 50])
DRAWN |= strategies(envs=(1, 2), workers=(1, 2), prefetch=(0, 1), at_once=bool, seed=(0, 1000))
DRAWN |= strategies(forward=[Forward(), Forward(max_batch=8), Forward(max_batch=64)])


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@given(**DRAWN)
@settings(max_examples=examples(8))
def test_every_agent_step_of_a_lost_worker_is_in_a_chunk_or_counted(
    tmp_path_factory: pytest.TempPathFactory, where: str, fate: str, step: int, lives: int, envs: int, **drawn: Any
) -> None:
    if where == "rollouts":
        del drawn["forward"]
    folder = tmp_path_factory.mktemp("log")
    kinds = {"length": drawn.pop("length"), "at_once": drawn.pop("at_once"), "nested": 0}
    doomed = [partial(DoomedAgents, 0, folder, fate=fate, step=step, lives=lives, **kinds)]
    makers = doomed + [partial(DoomedAgents, slot, folder, **kinds) for slot in range(1, 2 * envs)]
    with rollout_of(makers, where=where, lanes=2, num_fragments=30, **drawn) as rollout:
        fragments = list(rollout.fragments())
        check_laws(rollout, fragments, folder, 2 * envs)
    assert sorted({fragment.lane for fragment in fragments}) == [0, 1]
    if where == "rollouts":  # a life that comes to nothing is told of with the next one
        losses = sum(len(fragment.losses) for fragment in fragments if fragment.lane == 1)
        assert losses <= lives * (drawn["workers"] == 1)
        assert (step + 1) * lives > 29 * drawn["fragment_length"] or any(fragment.losses for fragment in fragments)
    elif (step + 1) * lives < 29 * drawn["fragment_length"]:
        assert sum(len(fragment.losses) for fragment in fragments if fragment.lane == 0) == lives


class Kills(ConnectorV2):
    """Kills the worker of an environment in some of the calls of all its copies, while lanes are wherever they are."""

    def __init__(self, folder: Path, calls: set[int]) -> None:
        super().__init__()
        self.folder, self.calls = folder, calls

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        with (self.folder / "calls").open("ab") as file:  # which outlasts the process that it may kill
            called = file.tell()
            file.write(b".")
        if called in self.calls:
            with suppress(ProcessLookupError):  # it is being made again
                os.kill(int((self.folder / "pid 0").read_text()), signal.SIGKILL)
        return batch


DRAWN_KILLS = strategies(calls=st.sets(st.integers(0, 60), min_size=1, max_size=4), lanes=(1, 3), workers=(1, 2))
DRAWN_KILLS |= strategies(fragment_length=(1, 9), seed=(0, 1000))


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@given(**DRAWN_KILLS)
@settings(max_examples=examples(6))
def test_a_worker_may_be_killed_at_any_moment(
    tmp_path_factory: pytest.TempPathFactory, where: str, calls: set[int], **drawn: Any
) -> None:
    folder = tmp_path_factory.mktemp("log")
    makers = [partial(DoomedAgents, slot, folder, nested=0, length=20) for slot in range(3)]
    with rollout_of(
        makers, where=where, env_to_module_connector=lambda part: Kills(folder, calls), num_fragments=12, **drawn
    ) as rollout:
        fragments = list(rollout.fragments())
        check_laws(rollout, fragments, folder, 3)


FATES = {
    ("processes", "kill"): "was killed by SIGKILL",
    ("processes", "raise"): "RuntimeError: it broke",
    ("processes", "stop"): "no answer to a step within 1.0 s",
    ("hosts", "raise"): "RuntimeError: it broke (environment 1, env step 5)",
    ("hosts", "wrong"): "EnvError: environment 1, env step 5, agent 'nobody': observations has it, but it is not in",
}


@pytest.mark.parametrize(("place", "fate"), FATES)
def test_what_is_open_ends_as_truncated_and_says_why(
    tmp_path: Path, place: str, fate: str, caplog: pytest.LogCaptureFixture, stopped_clock: None
) -> None:
    kinds: Any = {"agents": 2, "nested": 0, "at_once": True}
    doomed = partial(DoomedAgents, 1, tmp_path, fate=fate, step=5, lives=1, **kinds)
    makers = [partial(DoomedAgents, 0, tmp_path, **kinds), doomed]
    options: Any = {"fragment_length": 8, "num_fragments": 2, "timeouts": Timeouts(step=1.0), "seed": 4}
    options |= {"kind": MultiAgentRollout, "acts": {"module": SerialModule()}, "hosts": {"name": "sim"}}
    with rollout_at(place, makers, envs={"lanes": 1}, **options) as made, made as rollout:
        fragments = list(rollout.fragments())
        assert rollout.lost == {"workers": 4}
        check_laws(rollout, fragments, tmp_path, 2)
    told = [*logs_of(tmp_path, 0), *logs_of(tmp_path, 1)]
    assert not_emitted(fragments, told) == 2  # of environment 0, which had stepped before
    [loss] = [loss for fragment in fragments for loss in fragment.losses]
    lost = [episode for fragment in fragments for episode in fragment.episodes() if "lost" in episode.custom_data]
    assert (loss[0], FATES[place, fate] in loss[1]) == (5, True)
    assert [episode.custom_data["lost"] for episode in lost] == [loss[1]] * 2
    for episode in lost:
        assert all(each.custom_data["lost"] == loss[1] for each in episode.agent_episodes.values())
        assert [each.is_truncated for each in episode.agent_episodes.values()] == [True, True]
    if place == "hosts":
        assert loss[1].startswith("host sim (tcp://127.0.0.1:")
    else:
        [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "lane 0 is lost and made again in 0.0 s" in record.getMessage()


def test_a_worker_that_is_killed_while_its_lane_waits_for_a_step(tmp_path: Path) -> None:
    held = partial(DoomedAgents, 0, tmp_path, fate="hold", step=10, lives=1, nested=0)
    makers = [held, partial(DoomedAgents, 1, tmp_path, nested=0)]
    with rollout_of(makers, lanes=2, workers=2, num_fragments=4, prefetch=3) as rollout:
        stream = iter(rollout.fragments())
        fragments = [next(stream)]
        await_file(tmp_path / "held 0")  # either lane may begin all of its fragments
        waiting = steps_of(logs_of(tmp_path, 0)[0])[1]
        os.kill(int((tmp_path / "held 0").read_text()), signal.SIGKILL)
        fragments += stream
        check_laws(rollout, fragments, tmp_path, 2)
        assert rollout.lost["workers"] > len(waiting)  # those that acted are lost as well
    held = [fragment for fragment in fragments if fragment.lane == 0]
    assert not_emitted(held, logs_of(tmp_path, 0)) == 0  # the step that was held is in no log
    assert len(logs_of(tmp_path, 0)) == 2
    assert len(logs_of(tmp_path, 1)) == 1
    assert [fragment.losses for fragment in in_time(fragments) if fragment.lane == 1] == [[]] * 4


@pytest.mark.parametrize("where", PLACES)
def test_what_breaks_the_conventions_is_refused_by_environment_step_and_agent(tmp_path: Path, where: str) -> None:
    doomed = partial(DoomedAgents, 1, tmp_path, fate="wrong", step=2, lives=1, nested=0)
    makers = [partial(NumberedAgents, 0, nested=0), doomed]
    told = r"environment 1, env step \d, agent 'nobody': observations has it, but it is not in 'possible_agents'"
    with rollout_of(makers, where=where, lanes=2, workers=1) as rollout, pytest.raises(EnvError, match=told) as raised:
        next(iter(rollout.fragments()))
    assert any("lane 1, in a worker process" in note for note in raised.value.__notes__)


class Enumerated(NumberedAgents):
    """Its agents are no numbers or strings."""

    def __init__(self, slot: int) -> None:
        super().__init__(slot)
        self.possible_agents = [object(), *self.possible_agents]  # type: ignore[list-item]
        for spaces in (self.observation_spaces, self.action_spaces):
            spaces[self.possible_agents[0]] = spaces["agent 1"]


@pytest.mark.parametrize("where", PLACES)
def test_agents_that_can_not_be_handed_over_are_refused(where: Any) -> None:
    with pytest.raises(EnvError, match=r"the environments\['agents'\]\[0\]: <object object .* can't be handed"):
        MultiAgentRollout(partial(Enumerated, 0), where=where)
