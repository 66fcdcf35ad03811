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
from held_envs import await_file
from hypothesis import given, settings, strategies as st
from lane_clock import StoppedClock
from leftovers import processes_of
from lost_agents import check_laws, in_time, not_emitted
from numbered_agents import NumberedAgents
from property_examples import examples
from serial_module import SerialModule

from rollflow import ConnectorV2, MultiAgentRollout
from rollflow.stream import EnvError

WHOLE: Any = pytest.param({"where": "rollouts"}, marks=pytest.mark.slow)
PLACES: list[Any] = ["processes", pytest.param("rollouts", marks=pytest.mark.slow)]  # which starts with torch each time


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.stream.net.backoff.FIRST_S", 0.01)


def rollout_of(makers: list[Any], **options: Any) -> MultiAgentRollout:
    defaults: dict[str, Any] = {"where": "processes", "module": SerialModule(), "fragment_length": 8, "seed": 0}
    return MultiAgentRollout(makers, **(defaults | options))


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@given(
    fate=st.sampled_from(["kill", "raise"]),
    step=st.integers(0, 20),
    lives=st.integers(1, 3),
    fragment_length=st.integers(1, 9),
    length=st.sampled_from([3, 50]),
    envs=st.integers(1, 2),
    workers=st.integers(1, 2),
    prefetch=st.integers(0, 1),
    at_once=st.booleans(),
    seed=st.integers(0, 1000),
    max_batch=st.sampled_from([None, 8, 64]),
)
@settings(max_examples=examples(8))
def test_every_agent_step_of_a_lost_worker_is_in_a_chunk_or_counted(
    tmp_path_factory: pytest.TempPathFactory, where: str, fate: str, step: int, lives: int, envs: int, **drawn: Any
) -> None:
    if where == "rollouts":
        del drawn["max_batch"]
    folder = tmp_path_factory.mktemp("log")
    kinds = {"length": drawn.pop("length"), "at_once": drawn.pop("at_once"), "nested": 0}
    doomed = [partial(DoomedAgents, 0, folder, fate=fate, step=step, lives=lives, **kinds)]
    makers = doomed + [partial(DoomedAgents, slot, folder, **kinds) for slot in range(1, 2 * envs)]
    with rollout_of(makers, where=where, lanes=2, num_fragments=30, **drawn) as rollout:
        fragments = list(rollout.fragments())
        check_laws(rollout, fragments, folder, 2 * envs)
    assert sorted({fragment.lane for fragment in fragments}) == [0, 1]
    if where == "rollouts":  # a life that comes to nothing is told of with the next one
        assert sum(len(fragment.losses) for fragment in fragments if fragment.lane == 1) <= lives * (
            drawn["workers"] == 1
        )
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


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@given(
    calls=st.sets(st.integers(0, 60), min_size=1, max_size=4),
    lanes=st.integers(1, 3),
    workers=st.integers(1, 2),
    fragment_length=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
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


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_environments_that_hang_in_their_reset_are_made_again(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    makers = [partial(DoomedAgents, 0, tmp_path, fate="stop at reset", lives=1, nested=0)]
    with rollout_of(makers, where=where, num_fragments=1, reset_timeout=10.0) as rollout:
        [fragment] = rollout.fragments()
        assert rollout.lost == {}
    assert bool(fragment.losses) == (where == "rollouts")  # nothing was open
    assert "no answer to a reset within 10.0 s" in caplog.text


@pytest.mark.parametrize("fate", ["kill", "raise", "stop"])
def test_what_is_open_ends_as_truncated_and_says_why(
    tmp_path: Path, fate: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoppedClock(monkeypatch)
    makers = [partial(DoomedAgents, 0, tmp_path, fate=fate, step=5, lives=1, agents=2, nested=0, at_once=True)]
    with rollout_of(makers, num_fragments=2, step_timeout=1.0, seed=4) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.lost == {"workers": 2}
        check_laws(rollout, fragments, tmp_path, 1)
    assert not_emitted(fragments, logs_of(tmp_path, 0)) == 0
    [loss] = [loss for fragment in fragments for loss in fragment.losses]
    lost = [episode for fragment in fragments for episode in fragment.episodes() if "lost" in episode.custom_data]
    why = {
        "kill": "was killed by SIGKILL",
        "raise": "RuntimeError: it broke",
        "stop": "no answer to a step within 1.0 s",
    }[fate]
    assert (loss[0], why in loss[1]) == (5, True)
    assert [episode.custom_data["lost"] for episode in lost] == [loss[1]]
    assert all(each.custom_data["lost"] == loss[1] for each in lost[0].agent_episodes.values())
    assert [each.is_truncated for each in lost[0].agent_episodes.values()] == [True, True]
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "lane 0 is lost and made again in 0.0 s" in record.getMessage()


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["kill", "raise", "stop"])
def test_a_whole_rollout_that_is_lost_is_told_of_and_begins_anew(tmp_path: Path, fate: str) -> None:
    makers = [partial(DoomedAgents, 0, tmp_path, fate=fate, step=13, lives=1, agents=2, nested=0, at_once=True)]
    options: Any = {"where": "rollouts", "num_fragments": 3, "step_timeout": 1.0}
    with rollout_of(makers, seed=4, **options) as rollout:
        fragments = list(rollout.fragments())
        # Of a worker that is killed the fragment in the making goes as well, 5 steps of 2 agents.
        assert rollout.lost == {"workers": 2 if fate == "raise" else 12}
        check_laws(rollout, fragments, tmp_path, 1)
    why = {
        "kill": "was killed by SIGKILL",
        "raise": "RuntimeError: it broke",
        "stop": "no answer to a step within 1.0 s",
    }[fate]
    [loss] = [loss for fragment in fragments for loss in fragment.losses]
    assert (fragments[1].losses, why in loss[1]) == ([loss], True)
    assert [fragment.num_rows for fragment in fragments] == ([8, 5, 8] if fate == "raise" else [8, 8, 8])
    lost = [episode for fragment in fragments for episode in fragment.episodes() if "lost" in episode.custom_data]
    assert len(lost) == (fate == "raise")


def test_a_worker_that_is_killed_while_its_lane_waits_for_a_step(tmp_path: Path) -> None:
    makers = [
        partial(DoomedAgents, 0, tmp_path, fate="hold", step=10, lives=1, nested=0),
        partial(DoomedAgents, 1, tmp_path, nested=0),
    ]
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


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_batch": 8}, {"forward_in_thread": True}, WHOLE])
def test_one_that_fails_again_and_again_is_set_aside_and_the_others_go_on(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    makers = [
        partial(DoomedAgents, slot, tmp_path, fate="raise", step=3, lives=100 * (slot == 1), nested=0)
        for slot in range(3)
    ]
    count = 8 if "where" in options else 4  # with whole rollouts there each loss ends a fragment of the lane
    with rollout_of(makers, lanes=3, workers=2, fragment_length=40, num_fragments=count, **options) as rollout:
        fragments = list(rollout.fragments())
        check_laws(rollout, fragments, tmp_path, 3)
    assert [fragment.sequence for fragment in in_time(fragments) if fragment.lane != 1] == [*range(count)] * 2
    cut_short = [fragment for fragment in fragments if fragment.lane == 1]
    assert len(cut_short) == (6 if "where" in options else 1)
    assert sum(fragment.num_rows for fragment in cut_short) == 3 * 6
    assert sum(len(fragment.losses) for fragment in cut_short) == 6
    assert "lane 1 is set aside, lost 6 times in a row: RuntimeError: it broke" in caplog.text


class NeverReset(NumberedAgents):
    def reset(self, **kwargs: Any) -> Any:
        raise RuntimeError("no reset")


@pytest.mark.parametrize("where", PLACES)
def test_one_that_is_set_aside_before_it_has_begun_holds_nobody_up(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    makers = [partial(NeverReset if slot == 1 else NumberedAgents, slot, nested=0) for slot in range(3)]
    with rollout_of(makers, where=where, lanes=3, workers=2, fragment_length=8, num_fragments=3) as rollout:
        fragments = list(rollout.fragments())
    assert [fragment.sequence for fragment in in_time(fragments)] == [0, 1, 2] * 2
    assert "lane 1 is set aside, lost 6 times in a row: RuntimeError: no reset" in caplog.text


@pytest.mark.parametrize("where", PLACES)
def test_where_no_lane_is_left_the_run_ends_with_the_reasons(tmp_path: Path, where: str) -> None:
    makers = [partial(DoomedAgents, 0, tmp_path, fate="kill", step=0, lives=100, nested=0)]
    told = r"every lane was lost 6 times in a row, the last time by: lane 0: process \d+ was killed by SIGKILL"
    with rollout_of(makers, where=where) as rollout, pytest.raises(EnvError, match=told):
        next(iter(rollout.fragments()))


@pytest.mark.parametrize("where", PLACES)
def test_what_breaks_the_conventions_is_refused_by_environment_step_and_agent(tmp_path: Path, where: str) -> None:
    makers = [
        partial(NumberedAgents, 0, nested=0),
        partial(DoomedAgents, 1, tmp_path, fate="wrong", step=2, lives=1, nested=0),
    ]
    told = r"environment 1, env step \d, agent 'nobody': observations has it, but it is not in 'possible_agents'"
    with rollout_of(makers, where=where, lanes=2, workers=1) as rollout, pytest.raises(EnvError, match=told) as raised:
        next(iter(rollout.fragments()))
    assert any("lane 1, in a worker process" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("where", PLACES)
def test_an_environment_that_can_not_be_made_is_refused_at_once(where: Any) -> None:
    def broken() -> NumberedAgents:
        raise FileNotFoundError("no simulator here")

    before = processes_of()
    with pytest.raises(EnvError, match="FileNotFoundError: no simulator here") as raised:
        MultiAgentRollout([partial(NumberedAgents, 0), broken], where=where, lanes=2)
    assert "in the callable for environment 1" in raised.value.__notes__
    assert any("in a worker process" in note for note in raised.value.__notes__)
    assert processes_of() == before


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
