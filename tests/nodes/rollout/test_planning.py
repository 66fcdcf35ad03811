"""Plans: what to change first, what is refused, and what a rollout measures for them."""

from typing import Any

import gymnasium as gym
import pytest
from idle_env import Given
from numbered_module import NumberedModule

from rollflow.nodes import MultiAgentRollout, RemoteEnvs, Rollout
from rollflow.nodes.rollout import planning, rollout_doctor
from rollflow.nodes.rollout.placement_probe import ProbeResult
from rollflow.nodes.rollout.placement_trials import TriedCosts
from rollflow.nodes.rollout.planning import Plan, Planner, Running, changed, predicted
from rollflow.nodes.rollout.simulation import Setting, VirtualClock
from rollflow.nodes.rollout.step_costs import StepCosts
from rollflow.stream.graph.report import NodeReport, Report

IDLE = Running(None, (), None)


def costs(env: float, module: float, **others: Any) -> StepCosts:
    """Seconds of a step of one environment, and of a forward pass, however many rows it has."""
    stages = {"env_to_module": lambda rows: 1e-6, "module": lambda rows: module, "module_to_env": lambda rows: 1e-6}
    return StepCosts(8, lambda slots: env * slots, 0.0, lambda slots: module + 2e-6, stages=stages, **others)


class Asked:
    """A rollout whose environments and module take so long on so many cores, without a step of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: StepCosts, cores: int, **options: Any) -> None:
        monkeypatch.setattr(planning, "core_count", lambda: cores)
        monkeypatch.setattr(planning, "probe", lambda *args, **kwargs: ProbeResult(of, {}))
        monkeypatch.setattr(TriedCosts, "measured", lambda self, costs, setting: costs)
        self.rollout = Rollout(Given, module=NumberedModule(), **{"num_envs": 8, **options})

    def __call__(self, **changes: Any) -> Plan:
        with self.rollout:
            return self.rollout.what_if(**changes)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda *args, **options: Asked(monkeypatch, *args, **options)


def test_a_slow_environment_wants_more_workers(asked: Any) -> None:
    plan = asked(costs(env=10e-3, module=1e-4), 8, where="processes", lanes=8, workers=1)()
    assert plan.now.bottleneck == "env"
    assert plan.now.steps_per_s == pytest.approx(100, rel=0.02)  # 10 ms of one worker for each
    assert plan.first.startswith("change first: workers=8; 7.")


def test_a_slow_environment_inline_wants_another_place(asked: Any) -> None:
    plan = asked(costs(env=10e-3, module=1e-4), 8)()
    assert plan.now.bottleneck == "env"
    assert plan.first.startswith("change first: where='rollouts', ")
    assert "workers=8" in plan.first


def test_a_slow_module_that_several_lanes_call_wants_one_pass_for_all_of_them(asked: Any) -> None:
    plan = asked(costs(env=1e-5, module=10e-3), 1, lanes=8)()
    assert plan.now.bottleneck == "module"
    assert plan.now.steps_per_s == pytest.approx(100, rel=0.02)  # a pass for each
    assert plan.first.startswith("change first: max_batch=8; 7.")


def test_a_slow_module_in_one_lane_wants_more_slots_or_to_be_faster(asked: Any) -> None:
    plan = asked(costs(env=1e-5, module=10e-3), 1)()
    assert plan.first.startswith("change first: num_envs=16; 2.0 times")
    rows = StepCosts(8, lambda slots: 1e-5 * slots, 0.0, lambda slots: 1e-2 * slots)
    plan = asked(rows, 1)()
    assert plan.first.startswith("change first: the stage module itself, for no other numbers or place give much more")
    assert "2.0 times the steps per second" in plan.first


def test_a_setting_that_is_asked_for_is_predicted_beside_that_of_now(asked: Any) -> None:
    plan = asked(costs(env=1e-3, module=1e-3, step_bytes=100.0), 4)(slots=16, prefetch=1)
    assert plan.now.steps_per_s == pytest.approx(8 / 9.002e-3, rel=1e-3)
    assert plan.then.steps_per_s == pytest.approx(16 / 17.002e-3, rel=1e-3)
    assert len(plan.predictions) == 1
    assert plan.then.memory_bytes == 100 * 16 * 128 * 3
    text = str(plan)
    assert "  now\n" in text  # it has not run: nothing was measured
    assert "all steps/s are predictions" in text
    assert plan.as_dict()["predictions"][0]["setting"]["slots"] == 16
    assert "num_envs=16" in str(plan.then)


def test_what_other_machines_would_give_is_marked(asked: Any) -> None:
    plan = asked(costs(env=10e-3, module=1e-4), 2)(where="rollouts", cores=8)
    assert plan.then.setting.workers == 8
    assert plan.then.steps_per_s > 6 * plan.now.steps_per_s
    *_, row, mark, _, _ = str(plan).splitlines()
    assert row.endswith(" *")
    assert mark.startswith("*: another machine")


def test_a_slow_link_holds_back_what_hosts_make(asked: Any) -> None:
    of, links = costs(env=1e-3, module=1e-4, step_bytes=1000.0), ({}, {"link_bytes_s": 1_000_000})
    fast, slow = (asked(of, 2)(hosts=4, prefetch=1, **link).then for link in links)
    assert fast.bottleneck == "env"
    assert slow.bottleneck == "link"
    assert slow.steps_per_s == pytest.approx(1000, rel=0.05)  # a kilobyte each
    assert fast.steps_per_s > 2 * slow.steps_per_s
    assert "hosts=4, link_bytes_s=1000000" in str(slow)


def test_without_a_setting_there_is_a_table(asked: Any) -> None:
    plan = asked(costs(env=1e-3, module=1e-4), 2)()
    assert {each.setting.where for each in plan.predictions} == {"inline", "threads", "processes", "rollouts"}
    assert {each.setting.slots for each in plan.predictions if not each.setting.hosts} == {8, 16, 32}
    assert {each.cores for each in plan.predictions} == {2, 4, 8}
    assert [(each.setting.hosts, each.setting.link_bytes_s) for each in plan.predictions if each.setting.hosts] == [
        (2, 125e6),
        (2, 12.5e6),
        (4, 125e6),
        (4, 12.5e6),
    ]


def test_a_table_for_many_slots_simulates_few_events_for_each(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events = 0
    advance = VirtualClock._advance

    def counted(clock: VirtualClock, process: Any) -> None:
        nonlocal events
        events += 1
        advance(clock, process)

    monkeypatch.setattr(VirtualClock, "_advance", counted)
    plan = asked(costs(env=2e-5, module=2e-4), 2, num_envs=128)()
    assert max(each.setting.slots for each in plan.predictions) == 512
    assert 1024 < events < 300_000  # about 3 µs each


# The doctor meanwhile


def test_a_reader_that_keeps_its_fragment_after_a_plan_is_told_for_how_long(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**9
    monkeypatch.setattr(rollout_doctor, "clock", lambda: now_ns)
    on = asked(costs(env=1e-3, module=1e-4), 2, fragment_length=2)
    with on.rollout as rollout:
        next(rollout.fragments())
        now_ns += 2 * 10**9
        assert "it has had its fragment for 2.0 s" in str(rollout.diagnose())
        rollout.what_if(lanes=2)
        now_ns += 5 * 10**9
        assert "it has had its fragment for 5.0 s" in str(rollout.diagnose())


def test_a_plan_in_one_thread_is_no_error_of_a_diagnosis_or_a_reader_in_another(
    asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = asked(costs(env=1e-3, module=1e-4), 2, fragment_length=2)
    with on.rollout as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        is_planning, real = False, rollout_doctor.clock

        def plans_just_now() -> int:
            nonlocal is_planning
            if not is_planning:
                is_planning = True
                rollout.what_if(lanes=2)
                is_planning = False
            return real()

        monkeypatch.setattr(rollout_doctor, "clock", plans_just_now)
        assert "the reader works" in str(rollout.diagnose())
        for _ in range(9):  # some of them are of one round
            next(fragments)


# Changes

NOW = Setting(where="processes", slots=8, lanes=4, workers=2)


@pytest.mark.parametrize(
    ("changes", "lanes", "workers"),
    [
        ({"where": "inline"}, 1, 4),
        ({"where": "threads"}, 8, 4),
        ({"where": "rollouts"}, 4, 4),
        ({"where": "rollouts", "workers": 2}, 2, 2),
        ({"workers": 6}, 6, 6),
        ({"slots": 2}, 2, 2),
        ({"hosts": 2, "slots": 64}, 8, 4),
    ],
)
def test_lanes_and_workers_are_those_that_a_rollout_would_have(
    changes: dict[str, Any], lanes: int, workers: int
) -> None:
    then, cores = changed(NOW, changes, 4)  # type: ignore[arg-type]
    assert (then.lanes, then.workers, cores) == (lanes, workers, 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"where": "moon"}, "where is 'moon', expected 'inline', 'threads', 'processes', 'rollouts'"),
        ({"workers": 0}, "workers is 0, expected a whole number from 1 on"),
        ({"lanes": 2.5}, "lanes is 2.5, expected a whole number"),
        ({"prefetch": -1}, "prefetch is -1, expected a whole number from 0 on"),
        ({"cores": 0}, "cores is 0, expected a whole number from 1 on"),
        ({"where": "threads", "workers": 2}, "workers is 2, but where='threads' has none"),
        ({"hosts": 2, "where": "inline"}, "hosts is 2 and where is 'inline', expected where='rollouts'"),
        ({"lanes": 9}, "lanes is 9, expected at most the slots, which are 8"),
        ({"max_batch": 1}, "max_batch is 1, expected at least 2, the slots of a lane"),
        ({"max_batch": 8, "where": "rollouts"}, "max_batch is 8, expected another where than 'rollouts'"),
        ({"link_bytes_s": 8}, "link_bytes_s is 8, but nothing comes over a link; expected hosts="),
        ({"num_envs": 8}, "what_if has no num_envs, expected where, lanes, "),
    ],
)
def test_what_a_rollout_does_not_take_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        changed(NOW, changes, 4)  # type: ignore[arg-type]


def test_environments_that_are_made_already_are_refused() -> None:
    rollout = Rollout(gym.make_vec("CartPole-v1", num_envs=2), module=NumberedModule())
    with pytest.raises(ValueError, match="these vector environments are made already; expected a rollout with an id"):
        rollout.what_if(lanes=2)
    rollout.close()


def test_environments_on_hosts_are_refused() -> None:
    planner = Planner(RemoteEnvs.__new__(RemoteEnvs), None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="those of RemoteEnvs are on hosts; expected a rollout with an id or a callable"
    ):
        planner.plan(None, IDLE, {})
    assert not hasattr(MultiAgentRollout, "what_if")  # which has no costs of its own yet


# What is measured


def test_times_of_the_run_replace_those_of_the_probe() -> None:
    now = Setting(where="inline", slots=8, fragment_length=16)
    busy = {"env": 8.0, "env_to_module": 1.0, "module": 4.0, "module_to_env": 1.0, "caller": 9.0}
    busy["learner_pipeline"] = 150.0
    report = Report(23.0, tuple(NodeReport(name, 1000, busy_s, 0.0, 0.0) for name, busy_s in busy.items()), ())
    of = planning.calibrated(costs(env=5e-4, module=1e-3), now, Running(report, (9.0, 0.5, 0.7), 1.0))
    assert of.env(8) == pytest.approx(8e-3)  # twice as long as the probe had it
    assert of.env(16) == pytest.approx(16e-3)
    assert of.parts["module"](8) == pytest.approx(4e-3)
    assert of.parts["module_to_env"](8) == pytest.approx(1e-3 + 11e-3)  # of 25 ms a step, 14 are in stages
    assert of.update(8 * 16) == pytest.approx(0.6)  # but for the first one
    assert of.update(16 * 16) == pytest.approx(1.2)  # twice the rows
    assert of.update_releases == pytest.approx(1 - 0.15 / 0.6)  # batches are made by the interpreter
    assert predicted(of, now, 2).bottleneck == "caller"


def test_the_making_of_batches_counts_as_work_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[StepCosts] = []

    def seen(*args: Any) -> StepCosts:
        found.append(calibrated(*args))
        return found[-1]

    calibrated = planning.calibrated
    monkeypatch.setattr(planning, "calibrated", seen)
    with Rollout(Given, module=NumberedModule(), num_envs=4, fragment_length=8, seed=0) as rollout:
        batches = rollout.batches()
        for _ in range(4):
            next(batches)
        rollout.what_if(lanes=2)
    assert 0 <= found[0].update_releases < 1


def test_a_rollout_that_runs_measures_itself_and_leaves_out_the_time_of_the_plan() -> None:
    with Rollout(Given, module=NumberedModule(), num_envs=4, fragment_length=8, seed=0) as rollout:
        fragments = iter(rollout.fragments())
        for _ in range(4):
            next(fragments)
        plan = rollout.what_if(lanes=2)
        assert plan.measured is not None
        assert plan.now.setting == Setting(where="inline", slots=4, fragment_length=8)
        assert plan.then.setting.lanes == 2
        assert plan.then.memory_bytes > 0
        for _ in range(2):
            next(fragments)
        again = rollout.what_if(lanes=2)
        assert again.measured is not None
        assert f"measured: {again.measured:,.0f} steps/s" in str(again)
