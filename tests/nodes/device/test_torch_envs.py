"""`TorchEnvs` gives of each form what gymnasium's own loop gives of the same numbers, as arrays and as tensors."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from extras import needs
from fragment_equality import assert_alike
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from hypothesis import settings
from property_examples import examples
from tensor_envs import (
    ACTIONS,
    FORMS,
    OBSERVATIONS,
    VMAS,
    Groups,
    ManiSkillEnv,
    NumberedTensors,
    RslRlEnv,
    VmasEnv,
    drawn_rollouts,
    of_arrays,
)

from benchmarks.host_reads import counting_reads
from rollflow import Columns, GeneralAdvantageEstimation, Rollout
from rollflow.nodes.device.torch_envs import TorchEnvs
from rollflow.nodes.env.stepping import seeds_for
from rollflow.stream import EnvError

PAGE = Path(__file__).parents[3] / "docs/how_to/on_a_device.md"
torch_envs = partial(TorchEnvs, allow_host_copies=True)


class NumberedSlot(gym.Env[Any, Any]):
    """One slot of `NumberedTensors`, in Python; without finals the observation before is also the last one."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def __init__(self, slot: int, first: int, lengths: tuple[int, ...], gives_final: bool) -> None:
        self.slot, self.episode, self.lengths, self.gives_final = slot, first - 1, lengths, gives_final

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode, self.t = self.episode + 1, 0
        return self._observation(0), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        done = self.t == self.lengths[(self.slot + self.episode) % len(self.lengths)]
        is_cut = self.episode % 2 == 1
        reward = float(np.float32(self.t) + action[0] / np.float32(8))
        seen = self._observation(self.t - (done and not self.gives_final))
        return seen, reward, done and not is_cut, done and is_cut, {}

    def _observation(self, t: int) -> Any:
        return np.array([self.slot, self.episode, t], np.float32)


def fragments_of(env: Any, **options: Any) -> list[Any]:
    with Rollout(env, num_fragments=3, env_to_module_connector=of_arrays, **options) as rollout:
        return list(rollout.fragments())


@pytest.mark.parametrize("form", [form for form in FORMS | VMAS if form != "rsl_rl with groups"])
@settings(max_examples=examples(60))
@drawn_rollouts
def test_a_rollout_records_what_the_environment_numbered(
    form: str, num_envs: int, lengths: tuple[int, ...], gives_final: bool, seed: int, **options: int
) -> None:
    """Buffers that are written over, ends in every slot, last observations given and not."""
    numbered = NumberedTensors(num_envs, lengths=lengths, gives_final=gives_final)
    env = (FORMS | VMAS)[form](numbered, allow_host_copies=True)
    ours = fragments_of(env, seed=seed, **options)
    knows_last = form in ("VectorEnv", "VMAS") or (form == "plain" and gives_final)
    first, agents = seeds_for(seed, 0, 1)[0] % 8, env.num_agents
    slots = [partial(NumberedSlot, slot // agents, first, lengths, knows_last) for slot in range(num_envs * agents)]
    assert_alike(ours, fragments_of(slots, lanes=1, seed=seed, **options))
    recorded = np.concatenate([fragment.column(Columns.ACTIONS) for fragment in ours])
    np.testing.assert_array_equal(torch.stack(numbered.actions).numpy(), recorded)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("continuous", [True, False])
def test_vmas_is_stepped_as_by_a_loop(continuous: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Ends in single environments, and at the time limit in all of them; the page's program runs."""
    monkeypatch.setitem(sys.modules, "gym", gym)  # of which VMAS takes the spaces; it has no wheel
    options: dict[str, Any] = {"continuous_actions": continuous, "max_steps": 30, "terminated_truncated": True}
    made = [needs("vmas").make_env(scenario="balance", num_envs=4, seed=0, **options) for _ in range(2)]
    drawn = torch.rand(80, 4, 3, 2, generator=torch.Generator().manual_seed(0))
    actions = drawn * 2 - 1 if continuous else (drawn[..., 0] * 9).long()

    def stack(parts: Any) -> torch.Tensor:
        return torch.stack(parts, 1).flatten(0, 1)

    seen, ends = [stack(made[0].reset(seed=5))], [0]
    made[0].steps += torch.arange(4) // 2 * 7  # so that two of them end, and then the others
    for each in actions:
        last, rewards, terminated, truncated, _ = made[0].step(list(each.clone().unbind(1)))
        now = [part.clone() for part in last]
        ended = (terminated | truncated).nonzero()[:, 0].tolist()
        fresh, ends = made[0].reset() if len(ended) == 4 else None, [*ends, len(ended)]
        for index in ended:
            for part, new in zip(now, fresh or made[0].reset_at(index), strict=True):
                part[index] = new[index]
        seen.append((stack(now), stack(rewards), stack([terminated] * 3), stack([truncated] * 3), stack(last)))
    env = TorchEnvs(made[1])
    assert torch.equal(env.reset_tensors([5])[0], seen[0])
    made[1].steps += torch.arange(4) // 2 * 7
    for each, (now, rewards, terminated, truncated, last) in zip(actions, seen[1:], strict=True):
        ours = env.step_tensors(each.flatten(0, 1))
        same = zip(ours[:4], (now, rewards, terminated, truncated), strict=True)
        assert all(torch.equal(one, other) for one, other in same)
        assert ours.final is None or torch.equal(ours.final[0], last)
        assert (ours.final is None) == (not (terminated | truncated).any())
    assert {0, 2} <= set(ends)
    program, printed = re.findall(
        r"```python with=vmas\n(.*?)```\n\n```text output\n(.*?)```", PAGE.read_text(), re.DOTALL
    )[0]
    exec(program, {})
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("time_outs", ["given", "missing", "more"])
def test_time_outs_truncate_the_episodes_that_end(time_outs: str) -> None:
    for fragment in fragments_of(torch_envs(RslRlEnv(NumberedTensors(4), time_outs=time_outs)), seed=0):
        ends, cut = fragment.column(Columns.TERMINATEDS), fragment.column(Columns.TRUNCATEDS)
        odd = fragment.columns[Columns.OBS].tree["policy"][fragment.first_row : fragment.last_row, :, 1] % 2 == 1
        assert not (ends & cut).any()
        assert ends.any()
        np.testing.assert_array_equal(cut, odd & (ends | cut) & (time_outs != "missing"))


class InColumns(VmasEnv):
    """Its rewards are any[N, 1], as those of VMAS's "wheel"."""

    def step(self, actions: list[torch.Tensor]) -> tuple[Any, ...]:
        observations, rewards, *others = super().step(actions)
        return observations, [each[:, None] for each in rewards], *others


@pytest.mark.parametrize("kind", [VmasEnv, InColumns])
def test_agents_of_vmas_are_read_once_a_step_and_ended_together(kind: type[VmasEnv]) -> None:
    env = TorchEnvs(kind(NumberedTensors(3)))
    env.reset_tensors([3])
    with counting_reads() as reads:
        steps = [env.step_tensors(torch.zeros(6, 2)) for _ in range(8)]
    assert (reads, env.num_envs, env.num_agents) == (["numpy"] * 8, 6, 2)
    for each in steps:
        assert each.rewards.shape == (6,)
        assert torch.equal(each.terminateds[::2], each.terminateds[1::2])
        assert torch.equal(each.observations[::2], each.observations[1::2])
    assert env.last_extras["agents"].keys() == {"agent_0", "agent_1"}


def test_advantages_are_those_of_rsl_rls_formula() -> None:
    """A truncation adds the discounted value of the observation before to the reward, and every end cuts the sum."""
    gamma, lambda_ = 0.9, 0.8
    gae = GeneralAdvantageEstimation(gamma=gamma, lambda_=lambda_)
    options: dict[str, Any] = {"fragment_length": 24, "num_fragments": 1, "seed": 0}
    env = torch_envs(RslRlEnv(NumberedTensors(4)), group="policy")
    with Rollout(env, learner_connector=lambda obs, act: gae, **options) as rollout:
        (batch,) = list(rollout.batches())
    names = ("rewards", "vf_preds", "terminateds", "truncateds", "value_targets")
    rewards, values, terminateds, truncateds, targets = (batch[name].reshape(4, 24).double() for name in names)
    done = terminateds + truncateds
    rewards = rewards + gamma * values * truncateds
    for slot in range(4):
        advantage = 0.0
        for t in reversed(range(int(done[slot].nonzero()[-1]) + 1)):  # the last observation is in no batch
            goes_on = 1 - done[slot, t]
            following = values[slot, t + 1] if goes_on else 0.0
            delta = rewards[slot, t] + goes_on * gamma * following - values[slot, t]
            advantage = delta + goes_on * gamma * lambda_ * advantage
            assert targets[slot, t] == pytest.approx(float(advantage + values[slot, t]), abs=1e-5)


class Plain:
    """Gives the same answers again and again."""

    def __init__(self, observations: Any = None, answer: Any = None) -> None:
        self.observations, self.answer = observations, answer

    def reset(self) -> Any:
        return self.observations, {}

    def step(self, actions: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("observations", "space"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), spaces.Box(-np.inf, np.inf, (3,), np.float64)),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), spaces.Box(0, 255, (4, 4), np.uint8)),
        (torch.zeros(2, dtype=torch.bool), spaces.Box(0, 1, (), np.bool_)),
        (
            Groups(a=torch.zeros(2, 3), b=[torch.zeros(2, 1, dtype=torch.float16)]),
            spaces.Dict(
                {
                    "a": spaces.Box(-np.inf, np.inf, (3,), np.float32),
                    "b": spaces.Tuple([spaces.Box(-np.inf, np.inf, (1,), np.float16)]),
                }
            ),
        ),
    ],
)
def test_observations_say_their_space(observations: Any, space: gym.Space[Any]) -> None:
    env = TorchEnvs(Plain(observations), action_space=spaces.Discrete(2))
    assert env.single_observation_space == space
    assert (env.num_envs, env.device) == (2, torch.device("cpu"))
    assert env.observation_space.contains(env.reset()[0])
    assert env.action_space == spaces.MultiDiscrete([2, 2])


class Wrapped(NumberedTensors):
    """Says nothing of its keywords, another name of its device, and no extras."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self.device, self.given = torch.device("cpu:0"), kwargs
        return super().reset(*args, **kwargs)

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        return *super().step(actions)[:4], None


def test_a_wrapper_gets_the_seed_and_has_the_device_that_its_tensors_have() -> None:
    numbered = Wrapped(2)
    with torch.device("meta"):
        env = TorchEnvs(numbered, action_space=ACTIONS)
    assert (env.device, env.single_observation_space) == (torch.device("cpu"), OBSERVATIONS)
    env.reset(seed=np.int64(3))
    assert numbered.given == {"seed": 3}
    env.step(np.zeros((2, 2), np.float32))
    assert env.last_extras == {}


def test_groups_are_all_taken_or_one() -> None:
    env = TorchEnvs(RslRlEnv(NumberedTensors(2)))
    assert isinstance(env.single_observation_space, spaces.Dict)
    assert list(env.single_observation_space) == ["critic", "policy"]
    assert TorchEnvs(RslRlEnv(NumberedTensors(2)), group="critic").single_observation_space == OBSERVATIONS


def test_extras_are_kept_and_the_environment_is_closed_with_it() -> None:
    numbered = NumberedTensors(2)
    env = TorchEnvs(numbered, action_space=ACTIONS)
    assert TorchEnvs(RslRlEnv(numbered)).last_extras == {}
    env.reset(seed=0)
    env.step(np.zeros((2, 2), np.float32))
    assert env.last_extras == {}
    env.close()
    assert numbered.is_closed
    wrapped = TorchEnvs(RslRlEnv(NumberedTensors(2)))
    wrapped.reset(seed=0)
    wrapped.step(np.zeros((2, 2), np.float32))
    assert wrapped.last_extras["log"] == {"steps": 1}


class Learned(NumberedTensors):
    """Observations and rewards are made by a network, and a buffer is written over."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.network, self.buffer = torch.nn.Linear(3, 3), torch.zeros(num_envs, 3)

    def look(self) -> torch.Tensor:
        return self.buffer.copy_(self.network(super().look()))

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        observations, rewards, *rest = super().step(actions)
        return observations, rewards + self.network.bias[0], *rest


def test_no_graph_is_kept_of_environments_with_networks() -> None:
    env = TorchEnvs(Learned(2), action_space=ACTIONS)
    with Rollout(env, fragment_length=4, num_fragments=1) as rollout:
        (batch,) = list(rollout.batches())
    assert batch["obs"].abs().sum() > 0
    assert not any(batch[name].requires_grad for name in ("obs", "rewards", "actions"))
    assert not env.env.buffer.is_inference()
    parameters = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(2))
    stepped = plain(*parameters, *torch.zeros(2, 2), {}).step_tensors(torch.zeros(2, 2))
    assert not stepped.observations.requires_grad
    assert not stepped.rewards.requires_grad


class NextStep(ManiSkillEnv):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012


ROW, ONES = torch.zeros(2, 3), torch.ones(2)


def plain(*answer: Any) -> TorchEnvs:
    return TorchEnvs(Plain(ROW, answer), action_space=ACTIONS)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((ROW, ONES, ONES[:, None], {}), r"^dones is a Tensor float32\[2, 1\] on cpu, expected a tensor \[2\] on"),
        ((ROW, ONES[:, None], ONES, {}), r"^rewards is a Tensor float32\[2, 1\]"),
        ((ROW, ONES, ONES, {"time_outs": ONES[:1]}), r"^extras\['time_outs'\] is a Tensor float32\[1\]"),
        ((ROW, ONES, ONES, {"time_outs": [0, 1]}), r"^extras\['time_outs'\] is \[0, 1\], expected"),
        ((ROW, ONES, ONES[:, None], ONES, {}), r"^terminateds is a Tensor"),
        ((ROW, ONES, ONES, ONES.to("meta"), {}), r"^truncateds is a Tensor float32\[2\] on meta, expected"),
        ((ROW, ONES, ONES, ONES.numpy(), {}), r"^truncateds is an array float32\[2\], expected"),
        ((ROW, ONES, ONES, "log"), "^extras is a str of 3, expected a dict"),
        ((ROW, ONES, ONES, {"final_obs": ROW[:1]}), r"^extras\['final_obs'\] is a Tensor float32\[1, 3\], expected"),
        ((ROW, ONES, ONES, ONES, {"final_obs": ROW[:1]}), r"^infos\['final_obs'\] .* float32\[2, 3\]: a row for each"),
        ((ROW, ONES, ONES, ONES, {"final_obs": np.array([None, None])}), r"^infos\['final_obs'\] is an array object"),
        ((ROW, ONES, ONES, ONES, {"final_observation": [*ROW]}), r"^infos\['final_observation'\] is \[a?.*, expected"),
        ((ROW, ONES, ONES, ONES, {"final_obs": {"obs": ROW}}), r"^infos\['final_obs'\] is {'obs': .*, expected a Ten"),
    ],
)
def test_values_are_refused_by_the_names_that_environments_have(answer: Any, text: str) -> None:
    with pytest.raises(EnvError, match=text):
        plain(*answer).step_tensors(torch.zeros(2, 2))


def test_an_environment_may_give_no_extras() -> None:
    env = plain(ROW, ONES, ONES, None)
    assert env.step_tensors(torch.zeros(2, 2)).final is None
    assert env.last_extras == {}


class Limited(VmasEnv):
    terminated_truncated = False


class FiveValues(RslRlEnv):
    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        return (None, *super().step(actions))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: TorchEnvs(FiveValues(NumberedTensors(2))).step_tensors(torch.zeros(2, 2)),
            r"a tuple of 5, expected \(observations, rewards, dones, extras\) of an rsl_rl .* legged_gym",
        ),
        (lambda: TorchEnvs(NumberedTensors), "env is the class NumberedTensors, expected an instance"),  # type: ignore[arg-type]
        (lambda: TorchEnvs(gym.make("CartPole-v1")), "a gymnasium.Env of one slot, expected .* takes a callable"),
        (lambda: TorchEnvs(Plain(np.zeros((2, 3))), action_space=ACTIONS), "array float64.* tensor; .* arrays goes to"),
        (lambda: TorchEnvs(Plain(ROW), group=["policy"]), r"group is \['policy'\], expected the name of one"),  # type: ignore[arg-type]
        (
            lambda: TorchEnvs(VmasEnv(NumberedTensors(2), spaces=(OBSERVATIONS, ACTIONS))),
            r"agents have different spaces, .* agent_0: Box\(.*\(3,\), float32\) and Box.*; agent_1: Box\(.*\(2,\)",
        ),
        (lambda: TorchEnvs(Limited(NumberedTensors(2))), r"with max_steps=9, .*make_env\(…, terminated_truncated"),
        (lambda: TorchEnvs("CartPole-v1"), r"env is 'CartPole-v1', expected an environment of tensors"),
        (lambda: TorchEnvs(NextStep(NumberedTensors(2))), r"is AutoresetMode.NEXT_STEP, expected AutoresetMode.SAME"),
        (lambda: TorchEnvs(Plain(ROW[0, 0]), action_space=ACTIONS), r"^reset gave a Tensor float32\[\], expected"),
        (lambda: TorchEnvs(Plain(ROW)), r"action_space is None, expected the gymnasium.Space"),
        (
            lambda: TorchEnvs(Plain(ROW), action_space=spaces.Dict({"to": spaces.Box(0, 3, (2,), np.int64)})),
            r"action_space\['to'\] is a Box of int64, expected Discrete or MultiDiscrete, or one of floats",
        ),
        (lambda: TorchEnvs(Plain(ROW.bfloat16()), action_space=ACTIONS), "is torch.bfloat16, expected a dtype that"),
        (
            lambda: TorchEnvs(RslRlEnv(NumberedTensors(2)), group="actor"),
            r"group is 'actor', but its groups are \['policy', 'critic'\]",
        ),
        (
            lambda: TorchEnvs(RslRlEnv(NumberedTensors(2), form="tensor"), group="actor"),
            r"group is 'actor', but its observations have no groups",
        ),
        (
            lambda: TorchEnvs(Plain(ROW, (ROW, {})), action_space=ACTIONS).step(np.zeros((2, 2))),
            r"step gave a tuple of 2, expected \(observations, rewards, dones, extras\) or \(observations, rewards",
        ),
    ],
)
def test_what_is_no_environment_of_tensors_is_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        make()


@pytest.mark.parametrize(
    ("keyword", "name"), [("groups", "group"), ("obs_group", "group"), ("allow_host_copy", "allow_host_copies")]
)
def test_keywords_that_there_are_not_are_named(keyword: str, name: str) -> None:
    with pytest.raises(TypeError, match=f"TorchEnvs has no keyword '{keyword}', expected '{name}'"):
        TorchEnvs(NumberedTensors(2), **{keyword: "policy"})
    with pytest.raises(ValueError, match="allow_host_copies is 'yes', expected True or False"):
        TorchEnvs(NumberedTensors(2), allow_host_copies="yes")  # type: ignore[arg-type]


class WithMode(ManiSkillEnv):
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012


@pytest.mark.parametrize(
    "make",
    [
        lambda: RslRlEnv(NumberedTensors(2)),
        lambda: [RslRlEnv(NumberedTensors(2))],
        lambda: lambda: RslRlEnv(NumberedTensors(2)),
        lambda: VmasEnv(NumberedTensors(2)),
        lambda: ManiSkillEnv(NumberedTensors(2)),
        lambda: WithMode(NumberedTensors(2, "meta")),
        lambda: WithMode(NumberedTensors(2)),
    ],
)
def test_a_rollout_names_torch_envs_for_environments_of_tensors(make: Callable[[], Any]) -> None:
    def play() -> None:
        with Rollout(make(), fragment_length=4) as rollout:
            next(rollout.batches())

    with pytest.raises((EnvError, AttributeError)) as caught:
        play()
    texts = [str(caught.value), *caught.value.__notes__] if hasattr(caught.value, "__notes__") else [str(caught.value)]
    assert any("write TorchEnvs(env)" in text for text in texts)


@pytest.mark.parametrize(
    ("last", "is_given"),
    [
        ({"a": ROW, "b": (ROW,)}, True),
        ({"b": [ROW], "a": ROW}, True),
        ({"a": ROW, "b": ROW}, False),
        ({"a": ROW, "c": (ROW,)}, False),
        ({"a": ROW}, False),
        ({"a": ROW, "b": (ROW, ROW)}, False),
        ({"a": ROW, "b": (ROW[:1],)}, False),
    ],
)
def test_last_observations_are_trees_like_the_others(last: Any, is_given: bool) -> None:
    seen = {"a": ROW, "b": (ROW,)}
    env = TorchEnvs(Plain(seen, (seen, ONES, ONES, ONES, {"final_obs": last})), action_space=ACTIONS)
    if is_given:
        assert env.step_tensors(torch.zeros(2, 2)).final is not None
    else:
        with pytest.raises(
            EnvError, match=r"infos\['final_obs'\] is {'a': .*, expected {'a': Tensor .*: a row for each"
        ):
            env.step_tensors(torch.zeros(2, 2))
