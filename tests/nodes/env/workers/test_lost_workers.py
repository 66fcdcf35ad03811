"""Workers that are killed, stopped, or raise: nothing that came out of them is lost, and the others go on."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ending_envs import Doomed, NeverReset, check_chunks, lives_of, rewards_by_slot
from hypothesis import given, settings, strategies as st
from numbered_module import NumberedEnv, NumberedModule
from property_examples import examples, strategies

from rollflow import Forward, Rollout, Timeouts
from rollflow.stream import EnvError
from rollflow.stream.graph.inline_run import InlineRun

pytestmark = pytest.mark.wait_times(first_pause_s=0.01)


fates = st.sampled_from(["kill", "raise", "stop"])


DRAWN = strategies(fate=fates, step=(0, 20), lives=(1, 3), fragment_length=(1, 9), longest=[3, 50], slots=(1, 2))
DRAWN |= strategies(prefetch=(0, 1), seed=(0, 1000), apart=bool)
APART = {"forward": Forward(max_batch=64)}  # each slot steps on its own


@pytest.mark.slow
@given(**DRAWN)
@settings(max_examples=examples(15))
def test_every_step_of_a_lost_worker_is_in_a_chunk_or_counted(
    tmp_path_factory: pytest.TempPathFactory, slots: int, longest: int, prefetch: int, apart: bool, **drawn: Any
) -> None:
    log = tmp_path_factory.mktemp("log")
    doomed: Any = {"log": log, "step": drawn["step"], "fate": drawn["fate"], "lengths": (1, longest)}
    makers = [partial(Doomed, slot, lives=drawn["lives"] if slot == 0 else 0, **doomed) for slot in range(2 * slots)]
    options: Any = {"module": NumberedModule(), "fragment_length": drawn["fragment_length"], "seed": drawn["seed"]}
    options["timeouts"] = Timeouts(step=3.0 if drawn["fate"] == "stop" else 60.0)
    options |= {"workers": 2, "num_fragments": 30, "prefetch": prefetch, **(APART if apart else {"lanes": 2})}
    with Rollout(makers, where="processes", **options) as rollout:
        fragments = list(rollout.fragments())
        lost = rollout.lost.pop("workers", 0)
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert sorted({fragment.lane for fragment in fragments}) == ([0] if apart else [0, 1])
    check_chunks(fragments)
    missing = 0
    for slot, rewards in rewards_by_slot(fragments).items():
        made = [steps for steps in Doomed.lives(log, slot) if steps]
        seen = lives_of(rewards)
        missing += sum(made) - sum(seen)
        assert all(0 <= before - after <= 1 for before, after in zip(made, seen, strict=False))
    assert 0 <= missing <= lost <= slots * drawn["lives"]
    losses = sum(len(fragment.losses) for fragment in fragments)
    assert losses <= drawn["lives"] * (slots if apart else 1)  # slots begin anew one by one
    if not apart and (drawn["step"] + 1) * drawn["lives"] < 29 * drawn["fragment_length"]:
        assert losses == drawn["lives"]


@pytest.mark.parametrize("apart", [{}, APART], ids=["lane", "slot"])
@pytest.mark.parametrize("fate", ["kill", "raise", "stop"])
def test_what_is_open_ends_as_truncated_and_says_why(
    tmp_path: Path, fate: str, apart: dict[str, Any], caplog: pytest.LogCaptureFixture, stopped_clock: None
) -> None:
    maker = partial(Doomed, 0, tmp_path, fate, 5, 1, lengths=(100, 100))
    options: Any = {"fragment_length": 8, "num_fragments": 2, "timeouts": Timeouts(step=1.0), "seed": 0, **apart}
    with Rollout(maker, where="processes", module=NumberedModule(), **options) as rollout:
        first, second = rollout.fragments()
        assert rollout.lost == {"workers": 1}
        assert rollout.returns.count == 0  # it is no episode's return
    lost, begun = first.episodes()
    assert (len(lost), lost.is_truncated, len(begun), begun.is_done) == (5, True, 3, False)
    assert [int(row[2]) for row in lost.get_observations(slice(None))] == [0, 1, 2, 3, 4, 5]
    why = {"kill": "was killed by SIGKILL", "raise": "RuntimeError: it broke"}
    why = why.get(fate, "no answer to a step within 1.0 s")
    assert why in lost.custom_data["lost"]
    assert why in first.losses[0].reason
    assert second.losses == []
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{'slot' if apart else 'lane'} 0 is lost and made again in 0.0 s" in record.getMessage()
    assert why in record.getMessage()


def test_one_that_fails_again_and_again_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    makers = [partial(Doomed, slot, tmp_path, "raise", 3, 100 * (slot == 1)) for slot in range(3)]
    options: Any = {"module": NumberedModule(), "fragment_length": 40, "num_fragments": 4, "seed": 0}
    told = "lane 1 is set aside, lost 6 times in a row: RuntimeError: it broke"
    with Rollout(makers, where="processes", lanes=3, workers=2, **options) as rollout:
        with pytest.warns(RuntimeWarning, match=told):
            fragments = list(rollout.fragments())
        assert rollout.environments.lanes_at_work == {0, 2}
        report = rollout.report()
    assert report.as_dict()["notes"] == [told]
    assert told in str(report)
    assert [fragment.sequence for fragment in fragments if fragment.lane == 0] == [0, 1, 2, 3]
    assert [fragment.sequence for fragment in fragments if fragment.lane == 2] == [0, 1, 2, 3]
    [cut_short] = [fragment for fragment in fragments if fragment.lane == 1]
    assert cut_short.num_steps == cut_short.num_rows == 3 * 6
    check_chunks(fragments)
    assert "lane 1 is set aside, lost 6 times in a row: RuntimeError: it broke" in caplog.text
    assert caplog.text.count("lane 1 is lost and made again") == 5
    assert caplog.text.count("Traceback (most recent call last)") == 1


@pytest.mark.parametrize("options", [{}, {"max_lag": 1, "on_excess": "pace"}], ids=["plain", "pace"])
def test_one_that_is_set_aside_with_a_reward_that_is_not_finite_is_left_out_and_the_others_go_on(
    options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is lost again and again in the step after such a reward."""
    makers = [partial(Doomed, slot, tmp_path, "nan and raise", 3, 100 * (slot == 1)) for slot in range(3)]
    options = {"module": NumberedModule(), "fragment_length": 40, "num_fragments": 4, "seed": 0, **options}
    with Rollout(makers, where="processes", lanes=3, workers=2, **options) as rollout:
        with pytest.warns(RuntimeWarning, match="lane 1 is set aside"):
            fragments = list(rollout.fragments())
        made = rollout.num_steps
    assert sorted((each.lane, each.sequence) for each in fragments) == [(lane, n) for lane in (0, 2) for n in range(4)]
    assert made - rollout.lost["closed"] == sum(each.num_steps for each in fragments) == 320
    told = "lane 1, slot 0, vector step 3: its reward is nan, expected a finite float32"
    assert f"the last fragment of a lane that is set aside is left out: {told}" in caplog.text


def test_gates_hear_of_the_fragment_that_is_left_out_with_its_lane(tmp_path: Path) -> None:
    heard = list[Any]()
    gate = SimpleNamespace(admits=lambda lane: True, watch=id, leave=heard.append, gone=lambda *of: heard.append(of))
    makers = [partial(Doomed, slot, tmp_path, "nan and raise", 3, 100 * (slot == 1)) for slot in range(2)]
    options: Any = {"module": NumberedModule(), "fragment_length": 40, "num_fragments": 2, "seed": 0}
    rollout = Rollout(makers, where="processes", lanes=2, **options)
    rollout.hold_back(gate)
    with InlineRun(rollout.graph()) as run:
        while run.next_outputs():
            pass
    assert heard == [1, (1, 0)]  # no fragment of lane 1 is to be waited for


class KillsAll(Doomed):
    """Kills the process that it is in, once, after the environment `other` has been made again."""

    def __init__(self, log: Path, other: int) -> None:
        super().__init__(0, log, "kill", -1, 1)
        self.other = other

    def step(self, action: Any) -> Any:
        if len(Doomed.lives(self.log_path.parent, self.other)) > 1:
            self.fated = self.life
        return super().step(action)


@pytest.mark.slow
def test_a_traceback_is_logged_once_however_many_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    makers: list[Any] = [partial(KillsAll, tmp_path, 16), *(partial(NumberedEnv, slot) for slot in range(1, 16))]
    makers.append(partial(Doomed, 16, tmp_path, "raise", 3, 100))
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 100}
    with Rollout(makers, where="processes", lanes=17, workers=1, **options) as rollout:
        fragments = iter(rollout.fragments())
        while "it broke" not in caplog.text.partition("SIGKILL")[2]:
            next(fragments)
    assert caplog.text.count("was killed by SIGKILL") == 17
    assert caplog.text.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_one_that_is_set_aside_before_it_began_holds_nobody_up(where: Any, caplog: pytest.LogCaptureFixture) -> None:
    makers = [partial(NeverReset if slot == 1 else NumberedEnv, slot) for slot in range(3)]
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 3, "seed": 0}
    with Rollout(makers, where=where, lanes=3, workers=2, **options) as rollout:
        fragments = list(rollout.fragments())
        assert rollout.environments.lanes_at_work == {0, 2}
    assert sorted((fragment.lane, fragment.sequence) for fragment in fragments) == [
        (lane, sequence) for lane in (0, 2) for sequence in range(3)
    ]
    assert "lane 1 is set aside, lost 6 times in a row: RuntimeError: it has no beginning" in caplog.text


@pytest.mark.parametrize("prefetch", [0, 1])
def test_every_lane_of_a_process_that_is_killed_is_lost_and_goes_on(tmp_path: Path, prefetch: int) -> None:
    makers = [partial(Doomed, slot, tmp_path, "kill", 5, 2 * (slot == 1)) for slot in range(3)]
    options: Any = {"module": NumberedModule(), "fragment_length": 4, "num_fragments": 6, "prefetch": prefetch}
    with Rollout(makers, where="processes", lanes=3, workers=1, seed=0, **options) as rollout:
        fragments = list(rollout.fragments())
        lost = rollout.lost["workers"]
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    assert sorted((fragment.lane, fragment.sequence) for fragment in fragments) == [
        (lane, sequence) for lane in range(3) for sequence in range(6)
    ]
    check_chunks(fragments)
    missing = 0
    for slot, rewards in rewards_by_slot(fragments).items():
        missing += sum(Doomed.lives(tmp_path, slot)) - sum(lives_of(rewards))
    made = [len(Doomed.lives(tmp_path, slot)) for slot in range(3)]
    assert made[1] == 3  # it is killed twice; the second time the others in its process may not be made yet
    assert {made[0], made[2]} <= {2, 3}
    assert 0 <= missing <= lost <= 3 * 2


@pytest.mark.parametrize("where", ["processes", "rollouts"])
def test_where_no_lane_is_left_the_run_ends_with_the_reasons(where: Any, tmp_path: Path) -> None:
    maker = partial(Doomed, 0, tmp_path, "kill", 0, 100)
    told = r"every lane was lost 6 times in a row, the last time by: lane 0: process \d+ was killed by SIGKILL"
    with Rollout(maker, where=where, module=NumberedModule(), seed=0) as rollout:
        with pytest.raises(EnvError, match=told):
            next(iter(rollout.fragments()))


@pytest.mark.slow
@pytest.mark.wait_times(close_s=0.1)
@pytest.mark.parametrize(
    ("forward", "late", "hang"),
    [
        (Forward(), "lane 1, vector step 0", "lanes [1]"),
        (Forward(max_batch=2), "lane 0, slot 1", "slots [1]"),
    ],
    ids=["lanes", "slots apart"],
)
def test_a_thread_that_hangs_is_named(forward: Forward, late: str, hang: str, caplog: pytest.LogCaptureFixture) -> None:
    release = []

    class Hangs(NumberedEnv):
        def step(self, action: Any) -> Any:
            while self.slot == 1 and not release:
                time.sleep(0.01)
            return super().step(action)

    makers = [partial(Hangs, slot) for slot in range(2)]
    options: Any = {"where": "threads", "forward": forward, "timeouts": Timeouts(step=1.0)}
    rollout = Rollout(makers, module=NumberedModule(), seed=0, **options)
    with pytest.raises(EnvError, match=late + r": no answer to a step within 1\.0 s"), rollout:
        next(iter(rollout.fragments()))
    assert f"the environments of {hang} hang" in caplog.text
    release.append(True)
    if forward.max_batch:
        assert all(lane.has_stopped and not lane.fragment.columns for lane in rollout.environments.lanes)


class FailsFirst(NumberedEnv):
    """Raises in the first reset, or ends its process, in the first so many lives."""

    def __init__(self, slot: int, log: Path, fate: str, times: int) -> None:
        super().__init__(slot, lengths=(3, 9))
        self.log_path, self.fate, self.times = log / f"{slot}", fate, times

    def reset(self, **options: Any) -> Any:
        with self.log_path.open("a") as file:
            file.write("life\n")
        if self.log_path.read_text().count("life") <= self.times:
            if self.fate == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("it broke")
        return super().reset(**options)


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["kill", "raise"])
def test_slots_of_a_worker_that_is_lost_in_the_first_resets_are_reset_again(tmp_path: Path, fate: str) -> None:
    makers = [partial(FailsFirst, slot, tmp_path, fate, slot == 1) for slot in range(4)]
    options: Any = {"module": NumberedModule(), "fragment_length": 8, "num_fragments": 3, "seed": 0, **APART}
    with Rollout(makers, where="processes", workers=2, **options) as rollout:
        fragments = list(rollout.fragments())
    check_chunks(fragments)
    assert sorted(rewards_by_slot(fragments)) == [0, 1, 2, 3]
    assert all(len(lives_of(rewards)) == 1 for rewards in rewards_by_slot(fragments).values())
    assert rollout.lost == {}


@pytest.mark.slow
def test_a_worker_that_never_gives_first_observations_ends_a_run_of_slots_apart(tmp_path: Path) -> None:
    makers = [partial(FailsFirst, slot, tmp_path, "raise", 100 * (slot == 1)) for slot in range(3)]
    told = "^slot 1 was lost 6 times in a row before its first observations had come, the last time by: RuntimeError"
    options: Any = {"module": NumberedModule(), **APART}
    with (
        pytest.raises(EnvError, match=told),
        Rollout(makers, where="processes", workers=3, **options) as rollout,
    ):
        next(rollout.fragments())


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1])
def test_what_slots_of_a_worker_that_is_set_aside_have_answered_is_taken(tmp_path: Path, prefetch: int) -> None:
    makers = [partial(Doomed, slot, tmp_path, "raise", 3, 100 * (slot == 1), lengths=(3, 9)) for slot in range(4)]
    options: Any = {"module": NumberedModule(), "fragment_length": 100, "prefetch": prefetch, "seed": 0, **APART}
    with Rollout(makers, where="processes", workers=2, **options) as rollout:

        def until_set_aside() -> Iterator[Any]:
            for fragment in rollout.fragments():
                yield fragment
                if rollout.environments.set_aside_texts:
                    rollout.drain()

        with pytest.warns(RuntimeWarning, match="the worker of slots 0 to 1 is set aside, lost 6 times in a row"):
            fragments = list(until_set_aside())
        assert rollout.num_steps == sum(fragment.num_steps for fragment in fragments)
    check_chunks(fragments)
    assert len(lives_of(rewards_by_slot(fragments)[1])) == 6


@pytest.mark.slow
@pytest.mark.wait_times(first_pause_s=60.0)
def test_slots_that_are_lost_are_not_waited_for_once_the_rollout_is_drained(tmp_path: Path) -> None:
    makers = [partial(Doomed, slot, tmp_path, "kill", 3, 1, lengths=(30, 30)) for slot in range(2)]
    options: Any = {"module": NumberedModule(), "fragment_length": 30, "prefetch": 1, "seed": 0, **APART}
    with Rollout(makers, where="processes", workers=1, **options) as rollout:
        while not rollout.environments.remotes[0].failures:
            time.sleep(0.01)
        rollout.drain()
        (fragment,) = rollout.fragments()
    assert rollout.num_steps == fragment.num_steps > 3
    assert rollout.lost == {"workers": 2}
