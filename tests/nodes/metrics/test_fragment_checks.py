"""Faults that fragments show: rollouts that have one are told of it once, and those that have none of nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import gymnasium as gym
import numpy as np
import pytest
import torch
from doctor_clock import Looking
from graph_rows import row
from held_envs import await_that
from numbered_agents import NumberedAgents
from small_env import SmallEnv

from rollflow import MultiAgentRollout, RLModule, Rollout, Watch
from rollflow.nodes.metrics import fragment_checks
from rollflow.nodes.modules.policy_weights import PolicyWeights

ROUNDS = 45  # more than the looks after which values are said never to change


NAN = "observations are NaN in fragment after fragment"


class RandomEnv(SmallEnv):
    """Random observations and rewards, or the given ones; episodes of `length` steps, at random 5 to 15."""

    metadata: dict[str, Any] = {}  # noqa: RUF012
    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)

    def __init__(
        self,
        *,
        obs: float | None = None,
        reward: float | None = None,
        length: int | None = None,
        action_space: gym.Space[Any] | None = None,
    ) -> None:
        self.action_space = gym.spaces.Discrete(3) if action_space is None else action_space
        self._obs, self._reward, self._length = obs, reward, length

    def look(self) -> Any:
        if not self.t:
            self.length = self._length or int(self.np_random.integers(5, 16))
        return self.np_random.random(2, np.float32) if self._obs is None else np.full(2, self._obs, np.float32)

    def pay(self, action: Any) -> float:
        return float(self.np_random.random()) if self._reward is None else self._reward


class By(RLModule):
    """What a function makes of observations."""

    def __init__(self, forward: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        super().__init__()
        self.weight, self.by = torch.nn.Parameter(torch.zeros(1)), forward

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return self.by(batch["obs"])


class Wild(By):
    """Chooses an action that the space does not have, from its second pass on."""

    passes = 0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.passes += 1
        return {"actions": torch.full((len(batch["obs"]),), 7 if self.passes > 1 else 2)}


def logits(*values: float, **more: int) -> By:
    """The same logits for every observation, and other outputs that are one number, such as `actions`."""
    told = {"action_dist_inputs": torch.tensor(values)} | {name: torch.tensor(value) for name, value in more.items()}
    return By(lambda obs: {name: value.expand(len(obs), *value.shape) for name, value in told.items()})


EVEN = logits(0.0, 0.5, 0.0)
QUIET: dict[str, Any] = {"seed": 0, "watch": Watch(stall_after=None)}


def publish(rollout: Rollout) -> None:
    rollout.publish(rollout.module.state_dict())


def said(
    env: Any,
    module: Any = EVEN,
    after: Any = publish,
    keep: Any = str,
    every: int = 1,
    kind: Any = Rollout,
    **more: Any,
) -> list[str]:
    """What is said with a look at each `every`-th fragment; `keep` is called with each, and then `after`."""
    texts: list[str] = []
    given = {"fragment_length": 4, "num_fragments": ROUNDS, **QUIET, **more}
    with kind(env, module=module, **given) as rollout:
        looking = Looking(rollout._doctor)
        for number, fragment in enumerate(rollout.fragments()):
            keep(fragment)
            texts += looking.once() if number % every == 0 else ()
            after(rollout)
        assert len(looking.watch.diagnose().notes) == len(texts)
    return texts


class Once(RandomEnv):
    """One observation is NaN."""

    steps = 0

    def look(self) -> Any:
        self.steps += 1
        return super().look() * (np.nan if self.steps == 50 else np.float32(1))


WILD = Wild(lambda obs: {})
# A probability of 1 for an action that the observation says; inputs of a distribution of one's own, which are no
# logits; Q values that lie far apart, and actions other than the best.
SURE = By(lambda obs: {"action_dist_inputs": 1e4 * torch.nn.functional.pad(obs - obs.flip(1), (0, 1))})
OWN = By(lambda obs: {"action_dist_inputs": torch.zeros(len(obs), 1), "actions": torch.arange(len(obs)) % 3})
FAR = torch.tensor([90.0, 60.0, 30.0])
GREEDY = By(lambda obs: {"action_dist_inputs": FAR.expand(len(obs), -1), "actions": (obs[:, 0] < 0.1).long()})


def no_training(rollout: Rollout) -> None:
    """Publish nothing."""


LOOKED_AT = "in 30 fragments that were looked at, through "
SAME_REWARDS = "rewards were all 0.5, and no episode has ended in 30 fragments"
OUTSIDE = "the module's actions are outside of Discrete(3): 7 is one of them"
NO_ENTROPY = "every action was the likeliest one, with a probability above 0.999999, in 30 fragments"
CASES: dict[str, tuple[Any, Any, Callable[[Rollout], None], str]] = {
    "sound": (RandomEnv, EVEN, publish, ""),
    "masked": (RandomEnv, logits(-float("inf"), 0.0, 0.0), publish, ""),
    "nan observations": (lambda: RandomEnv(obs=np.nan), EVEN, no_training, NAN),
    "one nan observation": (Once, EVEN, publish, ""),
    "same observations": (lambda: RandomEnv(obs=3.0), EVEN, publish, f"observations were all one value {LOOKED_AT}"),
    "same observations, not trained": (lambda: RandomEnv(obs=3.0), EVEN, no_training, ""),
    "same observations, bandit": (lambda: RandomEnv(obs=3.0, length=1), EVEN, publish, ""),
    "same rewards": (lambda: RandomEnv(reward=0.5, length=10_000), EVEN, publish, SAME_REWARDS),
    "same rewards, whose returns are lengths": (lambda: RandomEnv(reward=1.0), EVEN, publish, ""),
    "same rewards, not trained": (lambda: RandomEnv(reward=0.0, length=500), EVEN, no_training, ""),
    "same actions": (RandomEnv, logits(0.0, 0.5, 0.0, actions=2), publish, f"actions were all 2 {LOOKED_AT}"),
    "no choice": (lambda: RandomEnv(action_space=gym.spaces.Discrete(1)), logits(0.0), publish, ""),
    "actions outside": (RandomEnv, WILD, no_training, OUTSIDE),
    "no entropy": (RandomEnv, SURE, publish, NO_ENTROPY),
    "a distribution of one's own": (RandomEnv, OWN, publish, ""),
    "greedy": (RandomEnv, GREEDY, publish, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_values_with_a_fault_are_named_once_and_others_not(case: str) -> None:
    env, module, after, text = CASES[case]
    assert [told[: len(text)] for told in said(env, module, after, num_envs=2)] == [text] * bool(text)


def test_those_who_ask_have_nothing_looked_at_and_are_told_what_was_found() -> None:
    options = {"fragment_length": 4, "num_fragments": 36, **QUIET}
    with Rollout(lambda: RandomEnv(obs=np.nan), module=EVEN, **options) as rollout:
        looking = Looking(rollout._doctor)
        texts: list[str] = []
        for number, _ in enumerate(rollout.fragments()):
            looking.watch.diagnose()
            rollout.snapshot()
            texts += looking.once() if number % 4 == 0 else ()  # at the end, ten have been looked at
        assert texts == []
        assert looking.once() == [*looking.watch.diagnose().notes] == [NAN]


def test_published_weights_that_nobody_acts_with_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolicyWeights, "load_into", lambda weights, module: 0)
    [text] = said(RandomEnv)
    assert text.startswith(
        "version 1 was published 20 fragments ago, and 20 after it, and none acts: fragments are made"
    )


def test_weights_that_are_published_faster_than_anybody_looks_are_in_order() -> None:
    assert said(RandomEnv, every=40, fragment_length=1, num_fragments=200, prefetch=1) == []


@pytest.mark.parametrize(("memory", "is_named"), [(1e5, True), (1e9, False)])
def test_a_reader_that_keeps_all_fragments_is_named_once_they_take_much_memory(
    memory: float, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragment_checks, "_MEMORY", memory)
    kept: list[Any] = []

    options: Any = {"after": lambda rollout: None, "num_fragments": 110}
    assert said(RandomEnv, keep=lambda each: kept.append(np.array(each.column("rewards"))), **options) == []
    texts = said(RandomEnv, keep=lambda each: kept.append(each.episodes()[0].rewards), **options)
    assert len(texts) == is_named
    if is_named:
        assert texts[0].startswith("100 of 100 fragments that were given are still in memory, ")


class Given:
    """Fragments of lanes, as far as they are counted."""

    def __init__(self) -> None:
        self.checks = fragment_checks.FragmentChecks()
        self.numbers: dict[int, int] = {}

    def give(self, lane: int, count: int = 1) -> None:
        self.numbers.setdefault(lane, 0)
        for _ in range(count):
            fragment: Any = type("Counted", (), {"lane": lane, "sequence": self.numbers[lane], "is_empty": True})()
            fragment.columns, fragment.outline = {"rewards": type("Rewards", (), {"tree": np.zeros(1)})}, fragment
            self.numbers[lane] = fragment.sequence + 1
            self.checks(fragment)

    def texts(self, *, away: Sequence[int] = ()) -> Sequence[str]:
        return [sign.text for sign in self.checks.signs(0, self.numbers.keys() - set(away))]


NOTHING = "lane 3 gave 0 fragments while the middle one of 4 lanes gave 50"


@pytest.mark.parametrize(
    ("before", "counts", "told"),
    [
        ([1, 1, 1, 1], [50, 60, 12, 70], "lane 2 gave 12 fragments while the middle one of 4 lanes gave 60"),
        ([0, 1, 1, 0], [50, 50, 50, 0], NOTHING),
        ([1, 1, 1, 50], [50, 50, 50, 0], NOTHING),
        ([1, 1, 1, 51], [50, 50, 50, 0], ""),  # it has given as many as any other, and may have ended
        ([1, 1], [50, 11], ""),
        ([1, 1, 1], [49, 49, 1], ""),
        ([1, 1, 1], [50, 60, 13], ""),
    ],
)
def test_a_lane_that_gives_much_less_than_its_sisters_is_named_until_it_does_no_more_or_is_gone(
    before: Sequence[int], counts: Sequence[int], told: str
) -> None:
    given, named = Given(), [told] * bool(told)
    for at in (before, counts):
        assert given.texts() == []
        for lane, count in enumerate(at):
            given.give(lane, count)
        looked = given.texts()
    assert looked == given.texts() == named
    assert given.texts(away=[int(text.split()[1]) for text in named]) == []
    for lane in range(len(counts)):
        given.give(lane, 50)
    assert given.texts() == []


@pytest.mark.anyio
async def test_a_rollout_in_a_graph_is_told_of_as_well() -> None:
    texts: list[str] = []
    options: Any = {"fragment_length": 4, "num_fragments": ROUNDS, "num_envs": 2, "seed": 0}
    rollout = Rollout(lambda: RandomEnv(obs=np.nan), module=EVEN, **options)
    async with row(rollout=rollout, output="fragments").run(stall_after=None) as run:
        looking = Looking(run.doctor)
        async for _ in run["fragments"]:
            texts += await anyio.to_thread.run_sync(looking.once)
    assert texts == [f"rollout: {NAN}"]


class Paced(RandomEnv):
    """A step of a slow one takes as long as so many of the two others together."""

    steps = 0  # of those that are not slow

    def __init__(self, slow: int = 0) -> None:
        super().__init__()
        self._slow, self._due = slow, 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._slow:
            self._due += self._slow
            await_that(lambda: Paced.steps >= self._due)
        else:
            Paced.steps += 1
        return super().step(action)


@pytest.mark.parametrize(("slow", "named"), [(24, ["lane 2"]), (10**8, ["lane 2"]), (0, [])])
def test_a_lane_with_slow_steps_is_named_in_a_run(slow: int, named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paced, "steps", 0)
    envs = [Paced, Paced, lambda: Paced(slow)]
    texts: list[str] = []
    options = {"where": "threads", "lanes": 3, "fragment_length": 1, "prefetch": 2, **QUIET}
    with Rollout(envs, module=EVEN, **options) as rollout:
        looking = Looking(rollout._doctor)
        for _ in zip(range(240), rollout.fragments(), strict=False):
            texts += looking.once()
        monkeypatch.setattr(Paced, "steps", 10**9)  # the slow one goes on
    assert [text.split(" gave ")[0] for text in texts] == named


class StillAgents(NumberedAgents):
    """Observations are ones."""

    def _observe(self, agent: str) -> Any:
        super()._observe(agent)
        return np.ones(5, np.int64)


@pytest.mark.parametrize("env", [StillAgents, NumberedAgents])
def test_faults_of_several_agents_are_named(env: type[NumberedAgents]) -> None:
    def publish_all(rollout: Any) -> None:
        rollout.publish({name: module.state_dict() for name, module in rollout.module.items()})

    texts = said(lambda: env(0, nested=0), None, publish_all, kind=MultiAgentRollout, num_envs=2)
    named = "observations were all one value in 30 fragments"
    assert [text[: len(named)] for text in texts] == [named] * (env is StillAgents)
