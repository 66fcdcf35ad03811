import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import gymnasium as gym
import numpy as np
import pytest
import torch
from graph_rows import drawn, row
from gymnasium.vector import SyncVectorEnv
from leftovers import descriptors_here
from numbered_module import NumberedEnv, NumberedModule, numbered_envs
from piece_forms import Breaks, OneByOne
from small_env import SmallEnv
from torch import nn

from rollflow import ConnectorV2, Forward, Fragment, FrameStacking, Graph, RLModule, Rollout, Timeouts, Watch
from rollflow.nodes import EpisodeReturns, LambdaConnector
from rollflow.nodes.connectors.common.batches import TensorToNumpy
from rollflow.nodes.env.environments import Environments
from rollflow.stream import ColumnError, ConnectorError, EnvError, GraphError, Inlet, LagError, ModuleError, RunError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.graph import inline_run


class Policy(RLModule):
    """A small network for CartPole."""

    def setup(self) -> None:
        self.trunk = nn.Linear(4, 8)
        self.heads = nn.Linear(8, 3)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = self.heads(torch.tanh(self.trunk(batch["obs"])))
        return {"action_dist_inputs": output[:, :2], "vf_preds": output[:, 2]}


def numbered(count: int = 3, **kwargs: Any) -> Rollout:
    given = {"env": numbered_envs(count)[1], "module": NumberedModule(), "fragment_length": 5, "seed": 0}
    return Rollout(**(given | kwargs))


# The short form


def test_the_first_program_runs() -> None:
    policy, batches = Policy(), []
    with Rollout("CartPole-v1", num_envs=4, module=policy, fragment_length=16, seed=0) as rollout:
        for batch in rollout.batches():
            batches.append(batch)
            assert rollout.publish(policy.state_dict()) == len(batches)
            if len(batches) == 3:
                break
    steps = [len(batch["obs"]) for batch in batches]
    assert all(0 < count <= 64 for count in steps)
    recorded = {"obs", "actions", "rewards", "terminateds", "truncateds", "policy_version"}
    assert set(batches[0]) == recorded | {"action_dist_inputs", "vf_preds", "action_logp"}
    assert (batches[0]["obs"].dtype, batches[0]["obs"].shape) == (torch.float32, (steps[0], 4))
    assert rollout.lost == {}


def test_training_in_place_does_not_reach_the_acting_copy_until_it_is_published() -> None:
    module = NumberedModule()
    with numbered(module=module) as rollout:
        fragments = iter(rollout.fragments())
        with torch.no_grad():
            module.weight += 5.0
        assert set(next(fragments).column("weight").ravel()) == {0.0}
        rollout.publish(module.state_dict())
        with torch.no_grad():
            module.weight += 5.0
        assert set(next(fragments).column("weight").ravel()) == {5.0}


def test_without_exploration_the_likeliest_action_is_taken() -> None:
    with numbered(explore=False) as rollout:
        fragment = next(iter(rollout.fragments()))
    np.testing.assert_array_equal(fragment.column("actions"), fragment.column("action_dist_inputs").argmax(-1))
    assert not fragment.column("action_logp").any()


def test_a_rollout_ends_after_its_fragments() -> None:
    with numbered(num_fragments=3, lanes=2) as rollout:
        numbers = [(fragment.sequence, fragment.lane) for fragment in rollout.fragments()]
    assert numbers == list(np.ndindex(3, 2))


def test_a_batch_that_could_not_be_made_is_lost() -> None:
    with pytest.raises(ZeroDivisionError), numbered(learner_connector=lambda obs, act: Breaks(at=1)) as rollout:
        next(iter(rollout.batches()))
    assert rollout.lost == {"failed": 15}


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"lanes": 2, "forward": Forward(max_batch=2)}])
def test_a_loop_that_was_left_may_be_taken_up_again(options: dict[str, Any]) -> None:
    envs, makers = numbered_envs(4)
    seen = 0
    with Rollout(makers, module=NumberedModule(), fragment_length=5, seed=0, num_fragments=6, **options) as rollout:
        for number in range(3):
            fragment = next(iter(rollout.fragments()))
            seen += fragment.num_steps
            if number:
                seen += len(next(iter(rollout.batches()))["obs"])
        for batch in rollout.batches():
            seen += len(batch["obs"])
    assert seen == rollout.num_steps == sum(len(env.log) for env in envs)
    assert rollout.lost == {}


def test_returns_leave_out_episodes_of_which_a_fragment_is_missing() -> None:
    _, makers = numbered_envs(3, lengths=(6, 12))
    with Rollout(makers, module=NumberedModule(), fragment_length=4, seed=0, num_fragments=30) as rollout:
        fragments = list(rollout.fragments())
    some = EpisodeReturns(window=1000)
    for fragment in fragments:
        if fragment.sequence % 7 != 3:
            some(fragment)
    whole = rollout.returns.returns
    assert 0 < some.count < rollout.returns.count
    assert all(value in whole for value in some.returns)


def test_returns_are_those_of_whole_episodes() -> None:
    envs, makers = numbered_envs(3, lengths=(1, 12))
    with Rollout(makers, module=NumberedModule(), fragment_length=4, seed=0, num_fragments=10) as rollout:
        list(rollout.fragments())
    expected, lengths = [], []
    for env in envs:
        whole = 0.0
        for _, step, _, reward, terminated, truncated in env.log:
            whole += reward
            if terminated or truncated:
                expected.append(whole)
                lengths.append(step + 1)
                whole = 0.0
    assert sorted(rollout.returns.returns) == sorted(expected)
    assert sorted(rollout.returns.lengths) == sorted(lengths)
    assert rollout.returns.count == len(expected)
    assert rollout.returns.mean == pytest.approx(np.mean(expected))
    assert np.isnan(EpisodeReturns().mean)


def test_explain_says_how_it_runs() -> None:
    assert numbered(8, lanes=2).explain().splitlines()[:2] == [
        "[env → env_to_module → module → module_to_env ↺]   one task, 2 lanes × 4 slots, inline",
        "env_to_module.fragments ──(capacity 2, block)──▶ output 'fragments'",
    ]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_next_takes_one_fragment_and_a_loop_goes_on_behind_it(prefetch: int) -> None:
    with numbered(prefetch=prefetch) as rollout:
        fragments = rollout.fragments()
        taken = [next(fragments), next(fragments)]
        for fragment in fragments:
            taken.append(fragment)
            if len(taken) == 4:
                break
        taken.append(next(fragments))
        assert [fragment.sequence for fragment in taken] == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_anext_takes_one_fragment_and_an_async_loop_goes_on_behind_it() -> None:
    async with numbered() as rollout:
        fragments = rollout.fragments()
        taken = [await anext(fragments), await anext(fragments)]
        async for fragment in fragments:
            taken.append(fragment)
            rollout.drain()
        assert [fragment.sequence for fragment in taken] == list(range(len(taken)))
        assert len(taken) > 2


def test_next_after_the_end_raises_stop_iteration() -> None:
    with numbered() as rollout:
        fragments = rollout.fragments()
        next(fragments)
        rollout.drain()
        list(fragments)
        with pytest.raises(StopIteration):
            next(fragments)


# Running ahead, in threads, asynchronously


VARIANTS: dict[str, dict[str, Any]] = {
    "prefetch": {"prefetch": 2},
    "gathering": {"forward": Forward(max_batch=6), "lanes": 3},
    "gathering, waiting": {"forward": Forward(max_batch=6, max_wait=10.0), "lanes": 3, "num_fragments": 4},
}


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"lanes": 3}, *VARIANTS.values()])
async def test_the_loop_may_be_asynchronous(options: dict[str, Any]) -> None:
    async with numbered(6, **{"num_fragments": 4, **options}) as rollout:
        steps = 0
        async for batch in rollout.batches():
            steps += len(batch["obs"])
            rollout.publish({"weight": torch.tensor(1.0)})
            rollout.report()
    assert steps == rollout.num_steps
    assert rollout.lost == {}


@pytest.mark.anyio
async def test_in_a_graph_a_pass_waits_for_other_lanes_no_longer_than_it_may() -> None:
    options: dict[str, Any] = {"forward": Forward(max_batch=8, max_wait=1e-3)}
    rollout = numbered(4, lanes=2, where="threads", num_fragments=3, **options)  # no pass is ever full
    with anyio.fail_after(60):
        async with row(rollout=rollout, output="fragments").run() as run:
            steps = sum([fragment.num_steps async for fragment in run["fragments"]])
    assert steps == rollout.num_steps == 4 * 3 * 5


@pytest.mark.anyio
async def test_a_rollout_that_is_entered_a_second_time_goes_on() -> None:
    with numbered(2, num_fragments=2) as rollout:
        fragments = rollout.fragments()
        next(fragments)
        with pytest.raises(RunError, match="it runs once"):
            async with rollout:
                raise AssertionError("it was entered twice")
        assert len(list(fragments)) == 1


@pytest.mark.anyio
async def test_nothing_is_left_open_of_an_asynchronous_loop() -> None:
    rollouts, counts = [], []
    for _ in range(3):
        rollouts.append(numbered(2, num_fragments=1))
        async with rollouts[-1] as rollout:
            assert [fragment.num_steps async for fragment in rollout.fragments()] == [10]
        counts.append(len(descriptors_here()))
    assert counts[1:] == counts[:1] * 2


def test_a_rollout_runs_ahead_by_what_prefetch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    can_not_go_on, wait = threading.Event(), inline_run.wait_for_any

    def waited(nodes: Any, bell: Any) -> None:
        can_not_go_on.set()
        wait(nodes, bell)

    monkeypatch.setattr(inline_run, "wait_for_any", waited)
    with numbered(4, prefetch=2) as rollout:
        batches = iter(rollout.batches())
        next(batches)
        assert can_not_go_on.wait(60)
        assert rollout.environments.lanes[0].vector_steps == 3 * 5


# Policy versions and lag


@pytest.mark.parametrize("options", [{"prefetch": 3, "max_lag": 1}, {"lanes": 2, "max_lag": 0}], ids=["ahead", "lanes"])
def test_a_fragment_that_is_too_old_when_it_is_handed_out_is_dropped_and_counted(options: dict[str, Any]) -> None:
    with numbered(4, num_fragments=8, **options) as rollout:
        seen = []
        for fragment in rollout.fragments():
            seen.append(rollout.policy_version - fragment.policy_version)
            assert rollout.lag.last == seen[-1]  # not that of a dropped one
            for _ in range(3):
                rollout.publish({"weight": torch.tensor(0.0)})
    assert max(seen) <= options["max_lag"]
    assert rollout.lag.last == seen[-1]
    assert rollout.lag.dropped_fragments > 0
    assert rollout.lost == {"max_lag": rollout.lag.dropped_steps}


@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_under_pace_nothing_is_dropped_and_no_batch_is_older_than_the_bound(max_lag: int) -> None:
    with numbered(4, lanes=2, prefetch=4, max_lag=max_lag, on_excess="pace", num_fragments=12) as rollout:
        lags = []
        for batch in rollout.batches():
            lags.append(rollout.policy_version - int(batch["policy_version"].min()))
            rollout.publish({"weight": torch.tensor(0.0)})
    assert len(lags) == 12
    assert max(lags) <= max_lag
    assert rollout.lost == {}


@pytest.mark.parametrize("options", [{"prefetch": 2, "max_lag": 1}, {"lanes": 2, "max_lag": 0}], ids=["ahead", "lanes"])
def test_under_pace_publishing_more_often_than_once_per_batch_is_refused(options: dict[str, Any]) -> None:
    told = f"max_lag={options['max_lag']}"
    with numbered(4, on_excess="pace", **options) as rollout, pytest.raises(LagError, match=told):
        for fragment in rollout.fragments():
            assert rollout.policy_version - fragment.policy_version <= options["max_lag"]
            for _ in range(3):
                rollout.publish({"weight": torch.tensor(0.0)})


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ({"other": torch.tensor(0.0)}, r"weights do not fit module 'NumberedModule': missing \['weight'\]"),
        (NumberedModule(), r"weights are NumberedModule, expected a state_dict\(\)"),
        ({"weight": torch.zeros(2)}, r"'weight' is \[2\], expected \[\]"),
        ({"weight": np.zeros(())}, r"\['weight'\] are numpy arrays, expected tensors, as a state_dict\(\)"),
        ({"weight": 1}, "weights: 'weight' is 1, expected tensors"),
    ],
    ids=["other name", "module", "other shape", "array", "number"],
)
def test_weights_that_do_not_fit_are_refused(weights: Any, told: str) -> None:
    with numbered() as rollout:
        with pytest.raises(ModuleError, match=told):
            rollout.publish(weights)
        assert rollout.policy_version == 0


# As a node of a graph


@pytest.mark.anyio
async def test_a_graph_fans_fragments_out_to_a_complete_sink_and_to_one_that_drops() -> None:
    envs, makers = numbered_envs(4)
    rollout = Rollout(makers, module=NumberedModule(), fragment_length=5, seed=0, num_fragments=20)
    complete: list[Fragment] = []
    finished = anyio.Event()

    def keep(fragments: Fragment) -> None:
        complete.append(fragments)
        if fragments.sequence == 19:
            finished.set()

    class Slow:
        def __init__(self) -> None:
            self.fragments: list[Fragment] = []

        async def run(self, fragments: Inlet[Fragment]) -> None:
            await finished.wait()
            self.fragments = [fragment async for fragment in fragments]

    slow = Slow()
    ways = "rollout >1 complete", "rollout >drop_oldest3 slow"
    graph = drawn(*ways, rollout=rollout, complete=keep, slow=slow)
    assert graph.explain().startswith(
        "rollout   [env → env_to_module → module → figures → module_to_env ↺]   one task, 1 lane × 4"
    )
    async with graph.run() as run:
        await run.wait()
        edges = {edge.name: edge for edge in run.report().edges}
    assert [fragment.sequence for fragment in complete] == list(range(20))
    assert sum(fragment.num_steps for fragment in complete) == sum(len(env.log) for env in envs)
    assert [fragment.sequence for fragment in slow.fragments] == [17, 18, 19]
    assert all(one is other for one, other in zip(complete[17:], slow.fragments, strict=True))
    assert edges["rollout/env_to_module.fragments → slow.fragments"].dropped == 17
    assert edges["rollout/env_to_module.fragments → complete.fragments"].dropped == 0


@pytest.mark.anyio
async def test_a_rollout_in_a_graph_runs_once_and_counts_what_was_not_taken() -> None:
    rollout = numbered(4)
    async with row(rollout=rollout, output="fragments").run() as run:
        taken = (await run["fragments"].receive()).num_steps
        await anyio.wait_all_tasks_blocked()
    assert rollout.lost == {"closed": rollout.num_steps - taken}
    with pytest.raises(RunError, match="these environments have been run before"):
        async with row(rollout=rollout, output="fragments").run() as run:
            await run["fragments"].receive()


# Nothing left behind


@pytest.mark.wait_times(close_s=0.5)
def test_leaving_waits_for_nodes_that_take_their_time_to_close(caplog: pytest.LogCaptureFixture) -> None:
    """As many worker processes do."""
    released = threading.Event()

    class Slow(NumberedEnv):
        def close(self) -> None:
            threading.Timer(0.6, released.set).start()
            released.wait()
            super().close()

    envs = [Slow(0)]
    with Rollout([lambda: envs[0]], module=NumberedModule(), fragment_length=5, seed=0, prefetch=1) as rollout:
        next(iter(rollout.batches()))
    assert envs[0].closed
    assert not caplog.text


def test_an_error_in_a_piece_names_piece_and_node() -> None:
    for options in ({}, {"prefetch": 1}):
        breaks = numbered(env_to_module_connector=lambda env: Breaks(), **options)
        with pytest.raises(ZeroDivisionError) as raised, breaks as rollout:
            list(rollout.batches())
        assert raised.value.__notes__ == [
            "in connector piece 'Breaks' (1 of 4 in EnvToModulePipeline)",
            "lane 0, vector step 7",
            "in node 'env_to_module'",
        ]


# What is refused, before anything runs


SHARED = NumberedEnv(0)


def without_mode() -> SyncVectorEnv:
    env = SyncVectorEnv(numbered_envs(2)[1])
    env.metadata = {}
    return env


def by_error(cases: dict[type[Exception], list[Any]]) -> list[Any]:
    return [(error, *case) for error, of_error in cases.items() for case in of_error]


REFUSED: dict[type[Exception], list[tuple[dict[str, Any], str]]] = {
    ValueError: [
        ({"fragment_length": 0}, "fragment_length is 0, expected a whole number from 1 on"),
        ({"fragment_length": 1.5}, "fragment_length is 1.5, expected a whole number"),
        ({"lookback": -1}, "lookback is -1, expected a whole number from 0 on"),
        ({"prefetch": -1}, "prefetch is -1, expected a whole number from 0 on"),
        ({"forward": Forward(max_batch=2)}, "max_batch is 2, expected at least 3: a lane's slots go together"),
        ({"on_excess": "shrug"}, "on_excess is 'shrug', expected 'drop' or 'pace'"),
        ({"on_excess": "pace"}, "on_excess='pace' is for fragments older than max_lag, expected max_lag="),
        ({"explore": "yes"}, "explore is 'yes', expected True or False"),
        ({"debug": 1}, "debug is 1, expected True or False"),
    ],
    EnvError: [
        ({"lanes": 9}, "lanes is 9, expected at most num_envs, which is 3"),
        ({"num_envs": 4}, "num_envs is 4, expected 3: one for each callable given"),
        ({"lanes": 0}, "lanes is 0, expected at least 1"),
        ({"lanes": 0, "where": "threads"}, "lanes is 0, expected at least 1"),
        (
            {"env": lambda: SHARED, "num_envs": 3},
            "the callable for slot 1 gave an environment that another slot has already",
        ),
        ({"env": lambda: None}, r"the callable for slot 0 gave None, expected a gymnasium\.Env"),
        ({"env": "CartPole"}, "; expected a version, such as 'CartPole-v1'\nsee "),
        ({"env": "gymnasium:CartPole"}, "; expected a version, such as 'gymnasium:CartPole-v1'\nsee "),
        ({"env": "gymnasium:Cartpole-v1"}, r"Did you mean: `CartPole`\?\nsee "),
        (
            {"env": type("Odd", (SmallEnv,), {"observation_space": gym.spaces.Text(3)})},
            r"slot 0: the observation space Text\(.*\) has no columns",
        ),
        ({"env": without_mode}, r"autoreset_mode.\] is None, expected a gymnasium.vector.Autoreset"),
        *(({"env": env}, "env is .*, expected an environment's id, a callable") for env in (7, [], [7])),
    ],
    ModuleError: [
        (
            {"module": NumberedModule(gym.spaces.Box(0, 1, (9,)))},
            r"module 'NumberedModule' was made for observations in Box\(0.*\(9,\).*, but those that come are in Box",
        ),
        ({"module": object()}, "module is object, which has no method forward_exploration"),
        (
            {"module": type("WithoutInit", (RLModule,), {"__init__": lambda self: None})()},
            r"WithoutInit.__init__ did not call super\(\).__init__\(\), expected that first",
        ),
    ],
    ConnectorError: [
        (
            {"env_to_module_connector": FrameStacking},
            r"env_to_module_connector is the class FrameStacking, expected lambda env: FrameStacking\(\)",
        ),
        (
            {"learner_connector": lambda env: FrameStacking()},
            r"learner_connector takes \(env\), expected \(obs_space, act_space\)",
        ),
        (
            {"env_to_module_connector": lambda env: FrameStacking},
            r"env_to_module_connector returned the class FrameStacking, not FrameStacking\(\), expected a ConnectorV2",
        ),
        (
            {"env_to_module_connector": Breaks()},
            r"env_to_module_connector is <Breaks>, expected a function .* such as lambda env: MyPiece\(\)",
        ),
        ({"env_to_module_connector": 3}, "env_to_module_connector is 3, expected a function"),
        ({"learner_connector": lambda obs, act: None}, "learner_connector returned NoneType, expected"),
    ],
    TypeError: [
        ({"forward": True}, r"forward is True, expected Forward\(...\)"),
        (
            {"flat_forward": True, "fragment_lenght": 4},
            r"Rollout has no keyword 'flat_forward', expected forward=Forward\(flat=…\); "
            "'fragment_lenght', expected 'fragment_length'",
        ),
        ({"policy": None}, "Rollout has no keyword 'policy', expected module=…"),
        ({"num_steps": 8}, "Rollout has no keyword 'num_steps', expected 'fragment_length'"),
        ({"xyz": 2}, r"Rollout has no keyword 'xyz', expected one of those in help\(Rollout\)"),
        ({"complete_episodes": True}, r"expected rollout.batches\(complete_episodes=…\) or fragments\(com"),
        ({"joint_connector": None}, "Rollout has no keyword 'joint_connector'"),
    ],
}


@pytest.mark.parametrize(("error", "options", "told"), by_error(REFUSED))
def test_arguments_that_make_no_sense_are_refused(error: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(error, match=told):
        numbered(**options)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Forward(max_batch=0), "max_batch is 0, expected a whole number from 1 on"),
        (lambda: Forward(max_wait=-1.0), r"max_wait is -1\.0, expected seconds from 0 on"),
        (lambda: Forward(max_wait=0.1), r"max_wait=0\.1 is for a pass over several lanes, expected max_batch as well"),
        (lambda: Forward(flat="no"), "flat is 'no', expected True or False"),
        (lambda: Forward(flat=2), "flat is 2, expected True or False"),
        (lambda: Forward(compile="max"), "compile is 'max', expected True, False or a dict of torch"),
        (lambda: Forward(compile=True, flat=True), "flat and compile are two ways of doing a pass"),
        (lambda: Timeouts(step="1"), "step of Timeouts is '1', expected seconds"),
        (lambda: Timeouts(step=0), "step of Timeouts is 0, expected seconds above 0"),
        (lambda: Timeouts(step=float("nan")), "step of Timeouts is nan, expected seconds"),
        (lambda: Timeouts(reset=float("inf")), "reset of Timeouts is inf, expected seconds"),
        (lambda: Watch(stall_after=0), "stall_after is 0, expected a number of seconds above 0, or None"),
        (lambda: Watch(log_every=0), "log_every is 0, expected a number of seconds above 0"),
        (lambda: Watch(log_x="epochs"), "log_x is 'epochs', expected 'steps', 'updates', 'time'"),
    ],
)
def test_records_of_options_refuse_what_makes_no_sense(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.anyio
async def test_a_loop_of_the_other_kind_is_refused() -> None:
    told = r"running, entered by 'async with'; this loop expects: with .* around it, or rollout.start"
    async with numbered() as rollout:
        with pytest.raises(RunError, match=told):
            next(iter(rollout.batches()))


def test_a_piece_that_does_not_declare_its_space_is_told_how() -> None:
    def widens(episodes: Any) -> None:
        for episode in episodes:
            episode.set_observations(new_data=np.append(episode.get_observations(-1), 0), at_indices=-1)

    with pytest.raises(ColumnError) as raised, numbered(env_to_module_connector=lambda env: LambdaConnector(widens)):
        pass
    assert "recompute_output_observation_space" in raised.value.__notes__[0]


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts", "auto"])
@pytest.mark.parametrize("num_envs", [0, -1])
def test_too_few_environments_are_refused_by_their_number(where: Any, num_envs: int) -> None:
    with pytest.raises(EnvError, match=f"^num_envs is {num_envs}, expected at least 1$"):
        Rollout("CartPole-v1", num_envs=num_envs, where=where)


class WrongVector(SyncVectorEnv):
    """Gives observations with one number too many."""

    def reset(self, **kwargs: Any) -> Any:
        observations, infos = super().reset(**kwargs)
        return np.concatenate([observations, observations[:, :1]], 1), infos


def test_observations_outside_their_space_are_refused_before_a_step() -> None:
    envs, makers = numbered_envs(2)
    told = r"column 'obs': got int64\[2, 4\], expected int64\[2, 3\]; slot 0 has shape \[4\], expected \[3\]"
    with pytest.raises(ColumnError, match=told) as raised, Rollout(WrongVector(makers), module=NumberedModule()):
        pass
    assert raised.value.__notes__ == ["lane 0, the first reset", "in node 'env'"]
    assert envs[0].log == []


class Outputs(NumberedModule):
    """Gives what it is told to."""

    def __init__(self, output: dict[str, Any]) -> None:
        super().__init__()
        self.output = output

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self.output


def one_left(others: float) -> torch.Tensor:
    """Logits with one action that is left in slot 0, which will do, and the same for all actions of the others."""
    logits = torch.full((3, 7), others)
    logits[0] = torch.tensor([-torch.inf] * 6 + [0.0])
    return logits


CHOSEN = {"actions": torch.zeros(3, dtype=torch.int64)}
UNUSABLE: dict[type[Exception], list[tuple[Any, str]]] = {
    ModuleError: [
        ({"vf_preds": torch.zeros(3)}, r"the output of Outputs has \['vf_preds'\], expected 'actions' or"),
        ({"action_dist_inputs": torch.zeros(3, 5)}, r"has shape \[3, 5\], expected a last axis of 7"),
        ({"action_dist_inputs": torch.zeros(3, 7).long()}, r"is torch.int64\[3, 7\], expected torch.float32"),
        (torch.zeros(3), "Outputs.forward_exploration returned Tensor, expected a dict of tensors"),
        ({"action_dist_inputs": one_left(-torch.inf)}, "rules out every action in lane 0, vector step 0, slot 1, 2"),
        ({"action_dist_inputs": one_left(torch.inf)}, r"is \+inf in lane 0"),
    ],
    ColumnError: [
        ({"action_dist_inputs": torch.zeros(7)}, r"inputs' has shape \[7\], expected \[3, D\]: a row for"),
        ({"action_dist_inputs": torch.zeros(1, 7)}, r"has shape \[1, 7\], expected \[3, D\]: a row for each"),
        ({"actions": torch.zeros(3, 2, dtype=torch.int64)}, r"column 'actions': got int64\[3, 2\], expected"),
        ({"actions": torch.zeros(3)}, r"column 'actions': got float32\[3\], expected int64\[3\]"),
        (
            {**CHOSEN, "loss": torch.zeros(())},
            r"output 'loss' is float32\[\], expected numbers with a leading axis of 3",
        ),
        *(
            (
                {**CHOSEN, name: torch.zeros(3, 1)},
                rf"lane 0: '{name}' has shape \[3, 1\], expected \[3\]: one number for each step",
            )
            for name in ("vf_preds", "action_logp")
        ),
    ],
}


@pytest.mark.parametrize(("error", "output", "told"), by_error(UNUSABLE))
def test_a_modules_output_that_can_not_be_used_is_refused_before_a_step(error: Any, output: Any, told: str) -> None:
    envs, makers = numbered_envs(3)
    with pytest.raises(error, match=told), Rollout(makers, module=Outputs(output)) as rollout:
        next(iter(rollout.batches()))
    assert all(env.log == [] for env in envs)


@pytest.mark.parametrize("low", [-1.0, -np.inf])  # clipped or not, and so in pieces one by one or fused
@pytest.mark.parametrize("options", [{}, {"lanes": 2, "forward": Forward(max_batch=2)}])
def test_an_action_that_the_module_gives_and_that_is_no_number_is_refused(low: float, options: dict[str, Any]) -> None:
    space = gym.spaces.Box(np.float32(low), np.float32(-low), (2,))

    class Takes(gym.Wrapper[Any, Any, Any, Any]):
        action_space = space

        def step(self, action: Any) -> Any:
            assert not np.isnan(action).any()
            return self.env.step(1)

    class Sick(RLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            actions = torch.zeros(len(batch["obs"]), 2)
            actions[1, 1] = torch.nan
            return {"actions": actions}

    makers = [lambda: Takes(gym.make("CartPole-v1"))] * 4
    message = "'actions' is NaN in lane 0, vector step 0, slot 1"
    with pytest.raises(ModuleError, match=message), Rollout(makers, module=Sick(), **options) as rollout:
        next(rollout.batches())


@pytest.mark.parametrize("explore", [True, False])
def test_a_module_is_not_blamed_for_an_environment_whose_observations_are_no_numbers(explore: bool) -> None:
    class Broken(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            observation, *rest = self.env.step(action)
            return observation * np.float32(np.nan), *rest

    makers = [lambda: gym.make("CartPole-v1"), lambda: Broken(gym.make("CartPole-v1"))]
    told = "vector step 1, slot 1: the observation itself is not finite in slot 1, expected numbers"
    with pytest.raises(ModuleError, match=told), Rollout(makers, explore=explore, seed=0) as rollout:
        next(iter(rollout.batches()))


def test_a_reward_that_is_no_number_is_told_with_one_place() -> None:
    class Broken(SmallEnv):
        def pay(self, action: Any) -> float:
            return float("nan") if self.t == 3 else 0.0

    where = "lane 0, slot 0, vector step 2: its reward is nan, expected a finite float32"
    with pytest.raises(EnvError, match=where) as caught, Rollout(Broken, fragment_length=8) as rollout:
        next(rollout.fragments())
    assert not any("vector step" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("explore", [True, False])
def test_weights_that_are_no_numbers_are_named(explore: bool) -> None:
    name, told = "policy_head.layers.0.weight", "slot 0, 1: weights are not finite: policy_head.layers.0.weight; exp"
    with pytest.raises(ModuleError, match=told), Rollout("CartPole-v1", num_envs=2, explore=explore, seed=0) as rollout:
        weights = rollout.module.state_dict()
        rollout.publish({**weights, name: torch.full_like(weights[name], torch.nan)})
        next(iter(rollout.batches()))


def test_outputs_that_change_between_steps_are_refused() -> None:
    class Fickle(NumberedModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            output = super()._forward(batch)
            return output if batch["obs"][0, 2] == 0 else {**output, "more": output["vf_preds"]}

    _, makers = numbered_envs(2, lengths=(9, 9))
    told = r"lane 0: the outputs changed between steps: missing \[\], new \['more'\]"
    with pytest.raises(ColumnError, match=told), Rollout(makers, module=Fickle(), seed=0) as rollout:
        next(iter(rollout.batches()))


def test_an_environment_that_loses_the_last_observation_is_refused() -> None:
    class Forgetful(SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            *rest, infos = super().step(actions)
            infos.pop("final_obs", None)
            return *rest, infos

    env = Forgetful(numbered_envs(2, lengths=(1, 1))[1], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    told = r"slots \[0, 1\] ended under SAME_STEP autoreset, but infos has no 'final_obs'"
    with pytest.raises(EnvError, match=told) as raised, Rollout(env, module=NumberedModule()) as rollout:
        next(iter(rollout.batches()))
    *notes, see = raised.value.__notes__
    assert see.endswith("environments.md#vector-environments")
    assert notes == ["lane 0, vector step 0", "in node 'env'"]
    assert "use another" not in str(raised.value)


@pytest.mark.parametrize("where", ["inline", "threads", "processes", "rollouts"])
def test_a_step_that_is_no_mere_reset_is_refused_under_next_step(where: Any) -> None:
    class ResetsWithin(SyncVectorEnv):
        """Resets in the step that ends an episode, and says NEXT_STEP."""

        def __init__(self) -> None:
            super().__init__(numbered_envs(2, lengths=(3, 3))[1], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
            self.metadata = {**self.metadata, "autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}

        def step(self, actions: Any) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, rewards + 7, *rest

    told = "slot 0 gave a reward of .* in the step after the end of its episode, .* expected the mode SAME_STEP"
    with pytest.raises(EnvError, match=told):
        with Rollout(ResetsWithin, module=NumberedModule(), where=where, fragment_length=8) as rollout:
            next(iter(rollout.batches()))


def test_pacing_is_refused_in_a_graph() -> None:
    with pytest.raises(GraphError, match="on_excess='pace' is for a loop over the rollout"):
        Graph().add(rollout=numbered(max_lag=1, on_excess="pace"))


# Environments


def test_an_ids_own_vectorized_form_is_used() -> None:
    environments = Environments("CartPole-v1", num_envs=6, lanes=2)
    assert [type(env.unwrapped).__name__ for env in environments.envs] == ["CartPoleVectorEnv"] * 2
    assert (environments.num_envs, environments.describe()) == (6, "2 lanes × 3 slots")


def test_ids_without_one_are_stepped_one_by_one() -> None:
    environments = Environments("FrozenLake-v1", num_envs=3)
    assert isinstance(environments.envs[0], SyncVectorEnv)
    environments.close()


def test_slots_are_dealt_out_evenly_to_lanes() -> None:
    environments = Environments(numbered_envs(7)[1], lanes=3)
    assert [env.num_envs for env in environments.envs] == [3, 2, 2]
    assert environments.describe() == "3 lanes × 2 or 3 slots"


def test_seeds_belong_to_slots_whatever_the_lanes() -> None:
    logs = []
    for lanes in (1, 2, 3):
        envs, makers = numbered_envs(6)
        with Rollout(makers, module=NumberedModule(), explore=False, lanes=lanes, seed=3, num_fragments=4) as rollout:
            list(rollout.fragments())
        logs.append([env.log for env in envs])
    assert logs[0] == logs[1] == logs[2]


def test_a_rollout_without_a_seed_can_be_repeated_by_the_one_it_drew() -> None:
    first = numbered(seed=None)
    with first:
        fragment = next(iter(first.fragments()))
    with numbered(seed=first.seed) as again:
        np.testing.assert_array_equal(next(iter(again.fragments())).column("obs"), fragment.column("obs"))


@pytest.mark.parametrize(
    "env_id", ["Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0", "FrozenLake-v1", "Blackjack-v1"]
)
def test_gymnasiums_own_environments_run(env_id: str) -> None:
    class Any_(RLModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            width = self.get_exploration_action_dist_cls().required_input_dim
            return {"action_dist_inputs": torch.zeros(len(leaves_of(batch["obs"])[0]), width)}

    with Rollout(env_id, num_envs=3, module=Any_(), fragment_length=20, num_fragments=3, seed=0) as rollout:
        assert [0 < len(batch["rewards"]) <= 60 for batch in rollout.batches()] == [True] * 3


class Seen(RLModule):
    """Records what it is given."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"actions": torch.zeros(len(batch["obs"]), dtype=torch.int64), "seen": batch["obs"]}


def stacked(rows: Any, count: int) -> list[list[int]]:
    """The numbers of the steps in stacks of `count` numbered observations."""
    return rows.reshape(-1, count, 3)[:, :, 2].tolist()


def test_pipelines_edited_before_the_run_have_the_lookback_that_they_need() -> None:
    rollout = Rollout(numbered_envs(1, lengths=(20, 20))[1], module=Seen(), fragment_length=4, num_fragments=4)
    rollout.env_to_module.prepend(FrameStacking(num_frames=4))
    rollout.learner_pipeline.prepend(FrameStacking(num_frames=6, as_learner_connector=True))
    with rollout:
        batches = list(rollout.batches())
    acted, learnt = (
        [stack for batch in batches for stack in stacked(batch[column], count)]
        for column, count in (("seen", 4), ("obs", 6))
    )
    assert acted == [[max(0, step - back) for back in (3, 2, 1, 0)] for step in range(16)]
    assert learnt == [[max(0, step - back) for back in range(5, -1, -1)] for step in range(16)]


@pytest.mark.anyio
async def test_a_pipeline_edited_after_the_graph_is_drawn_is_refused() -> None:
    rollout = Rollout(numbered_envs(1)[1], module=Seen(), fragment_length=4, num_fragments=2)
    graph = row(rollout=rollout, output="fragments")
    rollout.env_to_module.prepend(FrameStacking(num_frames=4))
    with pytest.raises(ConnectorError, match="EnvToModulePipeline looks back 3 steps, but fragments keep 1; expected"):
        async with graph.run() as run:
            await run["fragments"].receive()


@pytest.mark.parametrize("made", [NumberedModule(), NumberedModule, lambda seen, done: NumberedModule(seen, done)])
def test_a_module_is_told_or_made_of_the_spaces_as_the_connectors_leave_them(made: Any) -> None:
    rollout = numbered(module=made, env_to_module_connector=lambda env: FrameStacking(num_frames=2))
    assert rollout.module.observation_space.shape == (6,)
    assert rollout.module.action_space == gym.spaces.Discrete(7)


def test_a_builder_may_take_the_spaces_and_a_device_too() -> None:
    given: list[Any] = []

    def build(env: Any, spaces: Any, device: Any) -> ConnectorV2:
        given.extend([env, spaces, device])
        return FrameStacking()

    rollout = numbered(env_to_module_connector=build)
    space = rollout.environments.observation_space, rollout.environments.action_space
    assert given == [rollout.environments.envs[0], {"__env_single__": space}, None]


@pytest.mark.parametrize("where", ["inline", "processes"])
def test_a_default_module_does_not_fit_a_pipeline_edited_after_it(where: Any, tmp_path: Path) -> None:
    rollout = Rollout(
        "CartPole-v1", where=where, fragment_length=4, num_fragments=1, log=f"jsonl:{tmp_path}/rows.jsonl"
    )
    rollout.env_to_module.prepend(FrameStacking(num_frames=2))
    for begin in (lambda: Graph().add(rollout=rollout), rollout.__enter__):
        with pytest.raises(ModuleError, match="env_to_module was edited: it leaves observations in Box"):
            begin()
    assert repr(rollout).startswith("<Rollout new")
    assert not list(tmp_path.iterdir())
    assert "env_to_module" in rollout.explain()
    rollout.env_to_module.remove(FrameStacking)
    with rollout:
        assert [fragment.num_steps for fragment in rollout.fragments()] == [4]


def test_one_seed_makes_one_default_module_and_leaves_torch_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    monkeypatch.delattr(torch.cuda, "manual_seed_all")  # nobody restores what generators of devices had
    modules = [Rollout("CartPole-v1", seed=seed).module for seed in (0, 0, 1)]
    weights = [torch.cat([each.flatten() for each in module.parameters()]) for module in modules]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("flat", [None, False, True])
def test_a_module_that_changes_its_batch_is_refused(flat: bool | None) -> None:
    class Shifts(NumberedModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            obs = batch["obs"]
            obs -= 1
            return super()._forward({"obs": obs})

    told, made = "Shifts.forward_exploration changed a tensor of its batch in place", Forward(flat=flat)
    with pytest.raises(ModuleError, match=told), numbered(module=Shifts(), forward=made) as rollout:
        next(iter(rollout.fragments()))


@pytest.mark.parametrize("lookback", [None, 4])
def test_a_piece_is_told_when_fill_stands_for_what_was_cut_away(lookback: int | None) -> None:
    def look_back(episodes: Any) -> None:
        for episode in episodes:
            episode.get_rewards(slice(-4, None), fill=0.0)

    piece = LambdaConnector(look_back, lookback=lookback or 0)
    options: Any = {"fragment_length": 6, "num_fragments": 3, "env_to_module_connector": lambda env: piece}
    rollout = Rollout(numbered_envs(1, lengths=(20, 20))[1], module=NumberedModule(), **options)
    told = "'rewards': fill stands for steps that the episode had, but that are no longer"
    with rollout, nullcontext() if lookback else pytest.warns(UserWarning, match=told):
        assert len(list(rollout.fragments())) == 3


@pytest.mark.parametrize("threads", [1, 2, None])
def test_forward_passes_and_sampling_use_so_many_threads_and_nothing_else_does(threads: int | None) -> None:
    seen: set[int] = set()
    sampling: set[int] = set()

    class Watches(NumberedModule):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            seen.add(torch.get_num_threads())
            return super()._forward(batch)

    def watch(batch: Any) -> Any:
        sampling.add(torch.get_num_threads())
        return batch

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rollout = numbered(module=Watches(), forward=Forward(threads=threads), num_fragments=2)
        rollout.module_to_env.prepend(LambdaConnector(watch))
        with rollout:
            for _ in rollout.fragments():
                assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == sampling == {threads or 3}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lanes": 2, "forward": Forward(max_batch=4)}, {"where": "rollouts"}])
@pytest.mark.parametrize("explore", [True, False])
def test_a_piece_may_make_the_logits_arrays_before_actions_are_sampled(explore: bool, settings: dict[str, Any]) -> None:
    def run(*, as_arrays: bool) -> list[Any]:
        given: dict[str, Any] = {"fragment_length": 10, "num_fragments": 2, "seed": 0, **settings}
        rollout = Rollout("CartPole-v1", num_envs=4, explore=explore, **given)
        if as_arrays:
            rollout.module_to_env.prepend(TensorToNumpy())
        with rollout:
            fragments = sorted(rollout.fragments(), key=lambda each: (each.lane, each.sequence))
        return [(each.column("actions"), each.column("action_logp"), each.column("obs")) for each in fragments]

    plain = run(as_arrays=False)
    assert plain
    for one, other in zip(run(as_arrays=True), plain, strict=True):
        for ours, expected in zip(one, other, strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-5)


@pytest.mark.parametrize("where", ["inline", "processes"])
@pytest.mark.parametrize("by_items", [False, True])
@pytest.mark.parametrize("added", [None, 0, 1])
def test_what_environments_get_is_recorded_where_pieces_change_it(
    where: Any, by_items: bool, added: int | None
) -> None:
    options: Any = {"module_to_env_connector": lambda env: [OneByOne()]} if by_items else {}
    rollout = Rollout(lambda: NumberedEnv(0), num_envs=2, where=where, fragment_length=12, seed=0, **options)

    def see_what_environments_get(batch: Any) -> None:
        np.testing.assert_array_equal(batch["actions_for_env"], batch["actions"])
        if added:
            batch["actions_for_env"] = (np.asarray(batch["actions_for_env"]) + added) % 7

    if added is not None:
        rollout.module_to_env.append(LambdaConnector(see_what_environments_get))
    with rollout:
        fragment = next(iter(rollout.fragments()))
    assert ("actions_for_env" in fragment.extra_columns) is (added is not None)
    if added is not None:
        np.testing.assert_array_equal(fragment.column("actions_for_env"), (fragment.column("actions") + added) % 7)
