"""`MultiAgentRollout` as its users see it: numbers worked by hand, what it refuses."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from drawn_agents import Drawn, made, publish_next
from numbered_agents import NumberedAgents

from rollflow import Forward, MultiAgentRollout, RLModule
from rollflow.nodes import (
    ClipActions,
    DefaultModule,
    FlattenObservations,
    MultiAgentEnv,
    PrevActionsPrevRewards,
    RandomModule,
)
from rollflow.stream import ColumnError, ConnectorError, EnvError, LagError, ModuleError


class Talk(MultiAgentEnv):
    """Two agents that speak in turn, `a` first: four env steps; rewards come as their turns end, and once between.

    env step            0     1     2     3     4
    a observes          x           x           x
    b observes                x           x     x (truncated)
    rewards of a              1     2     4     8
    rewards of b                    16    32    64
    """

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, gym.spaces.Box(0, 100, (1,), np.float32))
    action_spaces = dict.fromkeys(possible_agents, gym.spaces.Discrete(2))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.step_number = 0
        return {"a": np.zeros(1, np.float32)}, {"a": {"turn": 0}}

    def step(self, actions: Any) -> Any:
        self.step_number = now = self.step_number + 1
        rewards = {"a": float(2 ** (now - 1))} | ({"b": float(2 ** (now + 2))} if now > 1 else {})
        seeing = {1: "b", 2: "a", 3: "b", 4: "ab"}[now]
        observations = {agent: np.full(1, now, np.float32) for agent in seeing}
        infos = {agent: {"turn": now} for agent in seeing}
        return observations, rewards, {"__all__": False}, {"__all__": now == 4}, infos


class Values(RLModule):
    """Says always 1 of observations' worth, and acts by a number of its own."""

    def __init__(self, action: int = 0) -> None:
        super().__init__()
        self.action = action
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        count = len(batch["obs"])
        return {"actions": torch.full((count,), self.action), "vf_preds": torch.ones(count)}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return torch.ones(len(batch["obs"]))


def talk(**options: Any) -> MultiAgentRollout:
    given = {"module": {"a": Values(0), "b": Values(1)}, "fragment_length": 4, "num_fragments": 1, "seed": 0}
    return MultiAgentRollout(Talk, **{**given, **options})


def test_an_agents_reward_is_what_came_until_its_next_observation() -> None:
    with talk() as rollout:
        [fragment] = rollout.fragments()
    rewards = {agent: fragment.of_module(agent).gather("rewards").tolist() for agent in "ab"}
    assert rewards == {"a": [3.0, 12.0], "b": [48.0, 64.0]}
    [episode] = fragment.episodes()
    assert episode.is_truncated
    assert {agent: own.tolist() for agent, own in episode.get_rewards().items()} == rewards
    assert rollout.returns.count == 1
    assert list(rollout.returns.returns) == [127.0]
    assert list(rollout.returns.lengths) == [4]
    assert {name: list(own.returns) for name, own in rollout.returns.by_module.items()} == {"a": [15.0], "b": [112.0]}
    assert rollout.returns.mean == 127.0


def test_a_fragment_is_read_only_and_names_a_module_that_has_not_acted() -> None:
    with talk() as rollout:
        [fragment] = rollout.fragments()
    [part] = fragment.parts
    for each, error in ((fragment, KeyError), (part, ColumnError)):
        with pytest.raises(error, match="module 'z' has not acted"):
            each.of_module("z")
    with pytest.raises(ValueError, match="read-only"):
        part.columns["rewards"].tree[0] = 1.0


def test_outputs_that_change_between_steps_are_refused() -> None:
    class Fickle(Values):
        def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            output = super()._forward(batch)
            return output if batch["obs"][0] == 0 else {**output, "x": output["vf_preds"]}

    told = r"the outputs of module 'a' changed between steps: missing \[\], new \['x'\]"
    with pytest.raises(ColumnError, match=told), talk(module={"a": Fickle(), "b": Values()}) as rollout:
        list(rollout.fragments())


def test_returns_are_added_up_over_fragments() -> None:
    with talk(fragment_length=3, num_fragments=4) as rollout:
        list(rollout.fragments())
    assert list(rollout.returns.returns) == [127.0] * 3
    assert list(rollout.returns.by_module["b"].returns) == [112.0] * 3


@pytest.mark.parametrize(("rows", "batches"), [(4, 1), (1, 2)])  # a batch of frozen modules alone is left out
def test_frozen_modules_have_no_batches(rows: int, batches: int) -> None:
    with talk(fragment_length=rows, num_fragments=4 // rows, modules_to_train=["b"]) as rollout:
        assert [list(batch) for batch in rollout.batches()] == [["b"]] * batches


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda r: r.publish({"c": {}}), r"there is no module 'c' to publish .* ids among \['a', 'b'\]"),
        (
            lambda r: r.publish({"a": Values().state_dict(), "b": {}}),
            "module 'b': weights do not fit module 'Values': m",
        ),
    ],
)
def test_modules_that_do_not_fit_are_refused_and_nothing_has_changed(call: Any, match: str) -> None:
    rollout = talk()
    with pytest.raises(ModuleError, match=match):
        call(rollout)
    assert rollout.policy_versions == {"a": 0, "b": 0}
    rollout.environments.close()


SEEN = gym.spaces.Box(0, 100, (1,), np.float32)


@pytest.mark.parametrize("asked", [3, 2])
def test_a_module_that_chooses_other_actions_than_its_agents_have_is_refused(asked: int) -> None:
    made: Any = DefaultModule(SEEN, gym.spaces.Discrete(asked))
    given = {"module": {"a": Values(), "b": made}}
    if asked == 2:
        talk(**given).environments.close()
        return
    # Both agents have the same spaces, so that nobody asks which of them is mapped to it.
    match = r"module 'b': 'DefaultModule' was made for actions in Discrete\(3\), but those of agent 'a' are in Discr.*2"
    with pytest.raises(ModuleError, match=match):
        talk(**given)
    talk(**given, module_to_env_connector=lambda part: ClipActions()).environments.close()  # a piece may translate them


def test_an_unknown_module_that_is_mapped_to_is_refused_where_its_agent_begins() -> None:
    names = {"a": "a", "b": "b"}
    told = (
        r"agent 'a' is mapped to module 'late', which does not exist: expected one of \['a', 'b'\]; "
        r"module=\{id: module\} has all of them from the beginning, and publish gives one other weights"
    )
    with pytest.raises(EnvError, match=told) as caught:
        with talk(num_fragments=3, agent_to_module_mapping_fn=lambda agent, episode: names[agent]) as rollout:
            for _ in rollout.fragments():
                names["a"] = "late"
    assert any("environment 0, agent 'a', vector step" in note for note in caught.value.__notes__)


# How old


@pytest.mark.parametrize(("learnt", "taken"), [(["a"], 3), (["b"], 6)])
def test_too_old_is_what_a_trained_module_made(learnt: list[str], taken: int) -> None:
    ids, count = list(learnt), 0
    with talk(num_envs=2, lanes=2, num_fragments=3, max_lag=0, modules_to_train=ids) as rollout:
        ids.clear()  # the rollout has its own
        for _ in rollout.fragments():
            count += 1
            rollout.publish({"a": Values().state_dict()})  # by then the other lane's fragment has come
    assert (count, rollout.num_steps) == (taken, 24)
    assert rollout.lost == ({"max_lag": 4 * (6 - taken)} if taken < 6 else {})


def test_pacing_waits_instead() -> None:
    taken = 0
    with talk(num_fragments=6, prefetch=3, max_lag=1, on_excess="pace") as rollout:
        for _ in rollout.batches():
            taken += 1
            rollout.publish({"a": Values().state_dict(), "b": Values().state_dict()})
    assert taken == 6
    assert rollout.lost == {}


def test_a_step_that_waits_over_a_cut_is_as_old_as_its_action() -> None:
    _, rollout = made(Drawn(3, 1, 4, 0, 9, False, 4, 1, False, 11), max_lag=0, on_excess="pace")
    with rollout, pytest.raises(LagError, match="allow by max_lag for steps that wait for their agent's next turn"):
        for number, _ in enumerate(rollout.fragments()):
            publish_next(rollout, number)


# What it tells


def test_explain_names_the_stages() -> None:
    parts = "1 lane × 1 environment × 2 agents, inline"
    assert talk().explain().startswith(f"[env → env_to_module → module → module_to_env ↺]   one task, {parts}")


# What it refuses


UNEVEN = partial(NumberedAgents, 0, agents=2, nested=1, at_once=True)  # two agents with different spaces


REFUSED: dict[str, tuple[Any, ...]] = {
    "an instance": (EnvError, "expected a callable that makes an environment", {}, Talk()),
    "a list with an instance": (EnvError, "expected a callable that makes an environment", {}, [Talk, Talk()]),
    "another number": (EnvError, "num_envs is 3, but there are 2 callables", {"num_envs": 3}, [Talk, Talk]),
    "no environments": (ValueError, "num_envs is 0, expected a whole number from 1 on", {"num_envs": 0}),
    "more lanes": (EnvError, "lanes", {"lanes": 2}),
    "a small pass": (
        ValueError,
        "max_batch is 1, expected at least 2: a lane's slots",
        {"forward": Forward(max_batch=1)},
    ),
    "several parts": (
        ModuleError,
        "spaces, one each as 'agent 0', 'agent 1', of which one m",
        {"module": None},
        UNEVEN,
    ),
    "a mapping that is none": (
        ModuleError,
        "agent_to_module_mapping_fn is 3, expected a dict: agent id -> module id, or a function",
        {"agent_to_module_mapping_fn": 3},
    ),
    "a word for a bool": (ModuleError, "explore is 'no', expected a bool, or a dict: module", {"explore": "no"}),
    "a word in a dict": (ModuleError, "module id -> bool, with ids among .*'a', 'b'", {"explore": {"a": "yes"}}),
    "an unknown one explores": (ModuleError, "module id -> bool, with ids among", {"explore": {"c": True}}),
    "a module that is none": (ModuleError, "module 'b': module is int, which", {"module": {"a": None, "b": 42}}),
    "a callable that makes nothing": (EnvError, "the callable for environment 0 gave None", {}, lambda: None),
    "a piece for all agents": (
        ConnectorError,
        "expected a Dict by agent ids; in a MultiAgentRollout, .* multi_agent is to be left out",
        {"env_to_module_connector": lambda part: FlattenObservations(multi_agent=True)},
    ),
    "no modules": (ModuleError, "expected a dict with at least one: module id -> module", {"module": {}}),
    "no default module": (ModuleError, "model_config is for default modules, but every", {"model_config": {}}),
    "no module": (ModuleError, r"has no method forward_exploration\(\)", {"module": object()}),
    "unknown to train": (ModuleError, r"is \['z'\], expected a list of ids among", {"modules_to_train": ["z"]}),
    "a name to train": (ModuleError, "expected a list of ids among", {"modules_to_train": "a"}),
    "a piece": (ConnectorError, "expected a function that", {"env_to_module_connector": PrevActionsPrevRewards()}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_worked_with_is_refused(what: str) -> None:
    error, match, options, env, *_ = (*REFUSED[what], Talk)
    with pytest.raises(error, match=match):
        MultiAgentRollout(env, **{"module": {"a": Values(), "b": Values()}, "seed": 0, **options})


@pytest.mark.parametrize(
    ("env", "options", "match", "where"),
    [
        (
            Talk,
            {"agent_to_module_mapping_fn": {"a": "a", "b": "nobody"}},
            r"agent 'b' is mapped to module 'nobody', which does not exist: expected one of \['a', 'b'\]",
            "environment 0, agent 'b', vector step 1",
        ),
        (
            Talk,
            {"agent_to_module_mapping_fn": {"a": "a"}},
            r"agent_to_module_mapping_fn is {'a': 'a'}, expected every agent: \['b'\] are missing",
            "environment 0, agent 'b', vector step 1",
        ),
        (
            UNEVEN,
            {"agent_to_module_mapping_fn": lambda agent, episode: "a"},
            "agent 'agent 1', vector step 0: module 'a' serves agent 'agent 0', with observations in .* but this one's",
            "",
        ),
        (
            lambda: NumberedAgents(0, agents=4, nested=2, at_once=True),
            {"agent_to_module_mapping_fn": lambda agent, episode: "a" if agent in ("agent 1", "agent 2") else "b"},
            "agent 'agent 2', vector step 0: module 'a' serves agent 'agent 1', .* in Dict.* one's are in Box",
            "",
        ),
    ],
)
def test_a_mapping_that_can_not_be_followed_is_refused_where_an_agent_begins(
    env: Any, options: Any, match: str, where: str
) -> None:
    rollout = MultiAgentRollout(env, **{"module": {"a": Values(), "b": Values()}, "seed": 0, **options})
    with pytest.raises(EnvError, match=match) as caught, rollout:
        next(iter(rollout.fragments()))
    assert where in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_returns_by_module_count_agents_that_act_seldom(rows: int) -> None:
    makers = [partial(NumberedAgents, env, nested=0, length=6) for env in range(2)]
    mapping = {f"agent {number}": "ab"[number % 2] for number in range(4)}
    modules = {"a": RandomModule, "b": RandomModule}
    options: Any = {"module": modules, "agent_to_module_mapping_fn": mapping, "seed": 1, "num_fragments": 60 // rows}
    ended = {"a": 0, "b": 0}
    with MultiAgentRollout(makers, fragment_length=rows, **options) as rollout:
        for fragment in rollout.fragments():
            for module_id in fragment.module_ids:
                chunks = fragment.of_module(module_id).chunks
                ended[module_id] += int((chunks.terminated | chunks.truncated).sum())
    assert {module_id: each.count for module_id, each in rollout.returns.by_module.items()} == ended
    assert min(ended.values()) > 10


def test_the_default_module_is_made_for_those_that_have_none_of_their_own() -> None:
    class Uneven(Talk):
        action_spaces = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Discrete(9)}  # noqa: RUF012

    rollout = MultiAgentRollout(Uneven, module={"a": None, "default_policy": None}, seed=0)
    assert rollout.module["a"].action_space.n == 2
    assert rollout.module["default_policy"].action_space.n == 9


def test_a_module_whose_id_no_agent_has_is_told_once() -> None:
    modules = {"a0": Values(), "default_policy": Values()}
    with pytest.warns(
        RuntimeWarning, match=r"no agent has the modules \['a0'\]: expected ids of the agents, \['a'"
    ) as told:
        talk(module=modules).close()
    assert [each.filename for each in told] == [__file__]
    talk(module=modules, agent_to_module_mapping_fn=lambda agent, episode: "default_policy").close()


def test_box_actions_at_random_follow_from_the_seed() -> None:
    class Pushes(Talk):
        action_spaces = dict.fromkeys(Talk.possible_agents, gym.spaces.Box(-3, 2, (2,), np.int16))

    def actions(seed: int) -> Any:
        options: Any = {"module": RandomModule, "fragment_length": 20, "num_fragments": 1, "seed": seed}
        with MultiAgentRollout(Pushes, **options) as rollout:
            return [batch["default_policy"]["actions"].numpy() for batch in rollout.batches()]

    np.testing.assert_array_equal(actions(3), actions(3))
    assert not np.array_equal(actions(3), actions(4))
    assert set(np.unique(actions(3))) == {-3, -2, -1, 0, 1, 2}


def test_a_module_whose_agents_can_not_be_told_before_is_refused_where_one_begins() -> None:
    served = {"agent 0": "first", "agent 1": "second"}
    seen = UNEVEN().observation_spaces["agent 1"]
    rollout = MultiAgentRollout(
        UNEVEN,
        module={"first": None, "second": None, "late": DefaultModule(seen, gym.spaces.Discrete(70))},
        agent_to_module_mapping_fn=lambda agent, episode: served[agent],
        num_fragments=1,
        seed=0,
    )
    served["agent 1"] = "late"
    with (
        pytest.raises(ModuleError, match=r"module 'late': .* actions in Discrete\(70\), but those of agent 'agent 1'"),
        rollout,
    ):
        list(rollout.fragments())


class Later(Talk):
    """Without observations of 2 before long."""

    def step(self, actions: Any) -> Any:
        observations, *told = super().step(actions)
        return {agent: seen + 50 for agent, seen in observations.items()}, *told


class Doubtful(Values):
    """Has NaN for logits where observations are 2, as those of `a` in the third env step are."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits = batch["obs"].float().expand(-1, 2)
        return {"action_dist_inputs": torch.where(logits == 2, torch.nan, logits), "vf_preds": torch.ones(len(logits))}


@pytest.mark.parametrize("explore", [True, False])
def test_logits_that_are_no_numbers_are_told_with_environment_agent_and_module(explore: bool) -> None:
    given = {"chance": RandomModule, "doubt": Doubtful(), "b": Values()}
    mapping = {"a": "doubt", "b": "b"}
    settings: dict[str, Any] = {"module": given, "agent_to_module_mapping_fn": mapping, "explore": explore, "seed": 0}
    with MultiAgentRollout([Later, Talk], lanes=2, **settings) as rollout, pytest.raises(ModuleError) as caught:
        list(rollout.fragments())
    told = str(caught.value)
    assert "'action_dist_inputs' is NaN in lane 1, vector step 2, environment 1, agent 'a' of module 'doubt'" in told
    assert any("module 'doubt', lane 1, vector step 2, agents ['a']" in note for note in caught.value.__notes__)
