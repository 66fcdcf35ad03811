"""Modules that are added, removed and added again while agents are in the middle of their episodes."""

import gc
import weakref
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_env import SmallEnv
from together import Together

from rollflow import ConnectorV2, MultiAgentRollout, RLModule
from rollflow.nodes import MultiRLModule
from rollflow.stream import ColumnError, ModuleError

AGENTS = ("a", "b")


class Steps(SmallEnv):
    """Shows the number of the step, in episodes of `length`."""

    action_space = gym.spaces.Discrete(50)

    def __init__(self, length: int, high: int = 1000) -> None:
        self.length, self.observation_space = length, gym.spaces.Box(0, high, (1,), np.float32)

    def look(self) -> Any:
        return np.full(1, self.t, np.float32)

    def pay(self, action: Any) -> float:
        return 1.0


def alike(length: int) -> Together:
    return Together({agent: Steps(length) for agent in AGENTS})


def asking(names: dict[str, str]) -> tuple[list[tuple[Any, str]], Any]:
    """What a mapping to these names was asked of, and the mapping."""
    asked: list[tuple[Any, str]] = []
    return asked, lambda agent, episode: asked.append((agent, episode.id_)) or names[agent]  # type: ignore[func-returns-value]


def unlike(length: int) -> Together:
    """Two agents with spaces of their own."""
    return Together({"a": Steps(length), "b": Steps(length, high=999)})


class Acts(RLModule):
    """Acts by a number of its own, and counts its steps in its state if it has one."""

    def __init__(self, action: int = 0, *, state: int = 0, outputs: Any = None) -> None:
        super().__init__(model_config={"max_seq_len": 4})
        self.action, self.state, self.outputs = action, state, outputs or {}
        self.weight = torch.nn.Parameter(torch.full((2,), float(action)))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        made = {name: value.expand(len(batch["obs"]), *value.shape) for name, value in self.outputs.items()}
        actions = torch.full(batch["obs"].shape[:-1], self.action)
        if self.state:
            made["state_out"] = {"count": batch["state_in"]["count"] + 1}
            made["count"] = made["state_out"]["count"][:, :1]
        return {"actions": actions, **made}

    def get_initial_state(self) -> Any:
        return {"count": np.zeros(self.state, np.float32)} if self.state else {}


def marathon(length: int = 4, **options: Any) -> MultiAgentRollout:
    given = {"module": {"a": Acts(0), "b": Acts(1)}, "fragment_length": 2, "num_fragments": 8, "seed": 0}
    return MultiAgentRollout(partial(alike, length), **{**given, **options})


def replace(rollout: MultiAgentRollout, module: RLModule) -> None:
    """Have another module take the id `a`."""
    rollout.remove_module("a")
    rollout.add_module("a", module)


def played(rollout: MultiAgentRollout, *, batches: bool = False, **changes: RLModule) -> list[Any]:
    """All fragments or train batches; after that of number N the module `after_N` takes the id `a`."""
    taken = []
    with rollout:
        for number, item in enumerate(rollout.batches() if batches else rollout.fragments()):
            taken.append(item)
            if module := changes.get(f"after_{number}"):
                replace(rollout, module)
    return taken


def rows(fragment: Any, module_id: Any, name: str = "actions") -> list[Any]:
    return fragment.of_module(module_id).gather(name).tolist()  # type: ignore[no-any-return]


def test_agents_keep_the_module_that_they_began_with_when_another_takes_its_id() -> None:
    actions, versions = [], []
    with marathon(length=4, fragment_length=3, num_fragments=4) as rollout:
        for number, fragment in enumerate(rollout.fragments()):
            actions.append(rows(fragment, "a"))
            versions.append(rows(fragment, "a", "policy_version"))
            if number == 0:
                rollout.publish({"a": Acts(0).state_dict()})
                replace(rollout, Acts(7))
                assert rollout.policy_versions["a"] == 2
                assert rollout.publish({"a": Acts(7).state_dict()}) == {"a": 3}
    assert actions == [[0, 0, 0], [0, 7, 7], [7, 7, 7], [7, 7, 7]]
    assert versions == [[0, 0, 0], [1, 3, 3], [3, 3, 3], [3, 3, 3]]


def test_weights_of_a_removed_module_and_of_the_next_stay_apart() -> None:
    fragments = played(marathon(length=6, fragment_length=1, num_fragments=8), after_0=Acts(10), after_2=Acts(12))
    told = [(rows(fragment, "a")[0], rows(fragment, "a", "policy_version")[0]) for fragment in fragments]
    assert told == [(0, 0)] * 6 + [(12, 2)] * 2


def test_a_removed_modules_state_goes_on_and_the_next_begins_anew() -> None:
    modules = {"a": Acts(0, state=1), "b": Acts(1)}
    rollout = marathon(length=4, fragment_length=3, num_fragments=3, module=modules)
    counts = [each["a"]["count"].tolist() for each in played(rollout, batches=True, after_0=Acts(7, state=1))]
    assert counts[0] == [[1.0, 2.0, 3.0, 0.0]]
    assert counts[1] == [[4.0, 0.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]]


@pytest.mark.slow
def test_removed_modules_are_gone_once_they_serve_nobody() -> None:
    names = {"a": "a", "b": "b"}
    copies: list[Any] = []

    class Noted(Acts):
        def __deepcopy__(self, memo: Any) -> Any:
            copies.append(weakref.ref(copy := Acts(self.action, outputs=self.outputs)))
            return copy

    given: list[Any] = []
    options = {"agent_to_module_mapping_fn": lambda agent, episode: names[agent], "num_fragments": 60}
    with marathon(length=2, fragment_length=2, num_envs=2, lanes=2, **options) as rollout:
        for number, _ in enumerate(rollout.fragments()):
            old = names["a"]
            names["a"] = f"opponent {number}"
            outputs = {f"only here {number}": torch.zeros(2), "vf_preds": torch.zeros(())}
            rollout.add_module(names["a"], module := Noted(number % 50, outputs=outputs))
            given.append(weakref.ref(module))
            del module
            rollout.remove_module(old)
            if number % 20 == 19:
                gc.collect()
                assert sum(ref() is not None for ref in copies) < 10
                assert sum(ref() is not None for ref in given) < 10
                assert len(rollout.returns.by_module) < 10
                assert max(len(lane.modules) for lane in rollout.environments.lanes) < 10
                columns = [lane.parts[0].fragment.columns for lane in rollout.environments.lanes]
                assert max(map(len, columns)) < 16
    assert len(copies) == 120
    assert rollout.returns.by_module["b"].count == 120


@pytest.mark.parametrize("make", [alike, unlike])
@pytest.mark.parametrize("where", ["inline", "threads"])
def test_the_mapping_is_asked_once_for_an_agent_in_an_episode(make: Any, where: str) -> None:
    """Modules that come and go ask it of no episode that there was, or goes on; lookback and cuts ask of none."""
    newest = {"a": "a 0", "b": "b"}
    asked, mapping = asking(newest)
    options: dict[str, Any] = {"fragment_length": 3, "num_fragments": 12, "lookback": 2, "where": where}
    modules = {"a 0": Acts(0), "b": Acts(1)}
    played, before = set(), 0
    rollout = MultiAgentRollout(
        partial(make, 4), module=modules, num_envs=2, agent_to_module_mapping_fn=mapping, seed=0, **options
    )
    probes = len(asked)
    with rollout:
        for number, fragment in enumerate(rollout.fragments()):
            played |= {episode.id_ for episode in fragment.episodes()}
            before = len(asked)
            rollout.add_module(f"a {number + 1}", Acts(number + 1))
            rollout.remove_module(newest["a"])
            assert len(asked) == before
            newest["a"] = f"a {number + 1}"
    assert len(set(asked)) == len(asked)
    of_episodes = asked[probes:]
    assert {id_ for _, id_ in of_episodes} >= played
    assert not {id_ for _, id_ in asked[:probes]} & played
    assert probes == (0 if make is alike else 2 * 16)  # to tell which module has which spaces


def test_a_class_that_is_added_takes_the_spaces_of_the_agents_that_the_mapping_names_now() -> None:
    newest = {"a": "a", "b": "b"}
    asked, mapping = asking(newest)
    options: dict[str, Any] = {"fragment_length": 4, "num_fragments": 2, "agent_to_module_mapping_fn": mapping}
    with MultiAgentRollout(partial(unlike, 4), module={"a": Acts(0), "b": Acts(1)}, seed=0, **options) as rollout:
        for _ in rollout.fragments():
            if newest["b"] == "b":
                newest["b"] = "new b"
                rollout.add_module("new b", None)
                assert rollout.module["new b"].observation_space == Steps(4, high=999).observation_space
    assert len(set(asked)) == len(asked)


def test_a_module_may_give_an_output_in_another_type_than_one_that_has_gone() -> None:
    numbers = torch.tensor([1, 2, 3])
    modules = {"a": Acts(0, outputs={"hint": torch.tensor(0.5)}), "b": Acts(1)}
    rollout = marathon(length=2, fragment_length=2, num_fragments=6, module=modules)
    fragments = played(rollout, after_0=Acts(7, outputs={"hint": numbers}))
    hints = [rows(fragment, "a", "hint") for fragment in fragments]
    assert hints == [[0.5] * 2] * 2 + [[numbers.tolist()] * 2] * 4


def test_a_module_that_was_taken_out_of_the_modules_alone_was_removed() -> None:
    with marathon(length=4, fragment_length=3, num_fragments=3) as rollout:
        fragments = iter(rollout.fragments())
        next(fragments)
        rollout.publish({"a": Acts(0).state_dict()})
        rollout.module.remove_module("a")
        rollout.add_module("a", Acts(7))
        fragment = next(fragments)
        assert (rows(fragment, "a"), rows(fragment, "a", "policy_version")) == ([0, 7, 7], [1, 2, 2])
        next(fragments)
        assert [len(set(lane.modules) - {None}) for lane in rollout.environments.lanes] == [2]


def test_a_module_that_is_removed_while_it_is_looked_up_serves_or_leaves_it_to_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contains = MultiRLModule.__contains__
    modules = {"a": Acts(0), "default_policy": Acts(1)}
    for is_before in (False, True):
        with marathon(length=1, module=modules) as rollout:
            waiting = ["a"]

            def looked_up(
                here: MultiRLModule,
                each: Any,
                *,
                rollout: Any = rollout,
                waiting: Any = waiting,
                first: Any = is_before,
            ) -> bool:
                known = contains(here, each)
                if each in waiting:  # as another thread may do it meanwhile
                    waiting.remove(each)
                    rollout.remove_module(each)
                return contains(here, each) if first else known

            monkeypatch.setattr(MultiRLModule, "__contains__", looked_up)
            fragments = [(next(iter(rollout.fragments()))) for _ in range(3)]
            monkeypatch.undo()
        assert not waiting
        assert {module_id for each in fragments for module_id in each.policy_versions()} >= {"default_policy"}
        assert list(fragments[-1].policy_versions()) == ["default_policy"]


def test_a_module_that_takes_an_id_while_a_batch_is_made_has_a_learner_pipeline_of_its_own() -> None:
    made: list[int] = []

    def connector(*spaces: Any) -> list[ConnectorV2]:
        made.append(len(made))
        if len(made) == 3:  # as another thread may do it meanwhile
            replace(rollout, Acts(8))
        return []

    with marathon(learner_connector=connector) as rollout:
        batches = iter(rollout.batches())
        next(batches)
        assert len(made) == 2
        replace(rollout, Acts(7))
        for count in (3, 4, 4):
            next(batches)
            assert len(made) == count


def test_of_two_modules_of_one_id_the_columns_are_those_that_both_have() -> None:
    first, second = {"x": torch.zeros(()), "y": torch.zeros(())}, {"y": torch.ones(()), "z": torch.zeros(())}
    rollout = marathon(module={"a": Acts(0, outputs=first), "b": Acts(1)}, length=4, fragment_length=3)
    _, both, _, later, *_ = (each["a"] for each in played(rollout, batches=True, after_0=Acts(7, outputs=second)))
    assert {"y", "z"} <= later.keys()
    assert "x" not in later
    assert both["y"].tolist() == [0.0, 1.0, 1.0]
    assert not {"x", "z"} & both.keys()


def test_lanes_may_be_at_different_modules_of_one_id() -> None:
    first = {"x": torch.zeros(()), "y": torch.zeros(2), "z": torch.zeros(())}
    second = {"y": torch.ones(3), "z": torch.ones(())}
    makers = [partial(alike, 2), partial(alike, 50)]
    modules = {"a": Acts(0, outputs=first), "b": Acts(1)}
    with MultiAgentRollout(makers, module=modules, lanes=2, fragment_length=2, num_fragments=4, seed=0) as rollout:
        batches = rollout.batches()
        next(iter(batches))
        replace(rollout, Acts(7, outputs=second))
        *_, batch = batches
    assert batch["a"]["actions"].tolist() == [7, 7, 0, 0]
    assert batch["a"]["z"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not {"x", "y"} & batch["a"].keys()


def test_under_an_id_states_stay_alike() -> None:
    with marathon() as rollout:
        rollout.remove_module("a")
        with pytest.raises(ModuleError, match=r"module 'a' has the initial state \{'count': .*expected the same"):
            rollout.add_module("a", Acts(state=2))
        assert list(rollout.module) == ["b"]
        rollout.add_module("a", Acts())


def test_pacing_goes_on_where_a_module_is_replaced() -> None:
    with marathon(length=50, max_lag=0, on_excess="pace", num_fragments=4) as rollout:
        for _ in rollout.batches():
            replace(rollout, Acts(3))
    assert rollout.lost == {}


# Stateful ones


def test_a_stateful_module_may_be_added_beside_stateless_ones() -> None:
    names = {"a": "a", "b": "b"}
    options: Any = {
        "agent_to_module_mapping_fn": lambda agent, episode: names[agent],
        "length": 4,
        "fragment_length": 4,
    }
    with marathon(**options) as rollout:
        for number, batch in enumerate(rollout.batches()):
            if number == 0:
                names["a"] = "late"
                rollout.add_module("late", Acts(3, state=1))
            if number == 2:
                assert batch["late"]["state_in"]["count"].tolist() == [[0.0]]
                assert batch["late"]["count"].tolist() == [[1.0, 2.0, 3.0, 4.0]]
                assert batch["b"]["obs"].shape == (4, 1)


def test_a_stateful_module_is_refused_where_fragments_keep_nothing_of_the_ones_before() -> None:
    with marathon(lookback=0) as rollout:
        with pytest.raises(ModuleError, match="module 'late' is stateful, but lookback is 0"):
            rollout.add_module("late", Acts(state=1))
        assert "late" not in rollout.module


# Outputs


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"outputs": {"told": torch.zeros(3)}}, {"outputs": {"told": torch.zeros(2)}}),
        ({"outputs": {"told": torch.tensor(7)}}, {"outputs": {"told": torch.tensor(0.25)}}),
        ({"state": 1}, {"state": 3}),
    ],
)
def test_outputs_of_one_name_have_one_type_for_agents_of_the_same_spaces(ours: Any, theirs: Any) -> None:
    told = "output '(told|state_out)' of module 'b' is .*, but .* of another that serves agents with the same spaces"
    with pytest.raises(ColumnError, match=told), marathon(module={"a": Acts(**ours), "b": Acts(**theirs)}) as rollout:
        list(rollout.fragments())
    modules = {"a": Acts(**ours), "b": Acts(**theirs)}
    with MultiAgentRollout(partial(unlike, 4), module=modules, fragment_length=2, num_fragments=1) as rollout:
        assert len(list(rollout.fragments())) == 1  # of other spaces


# Weights that act


def test_the_weights_that_act_are_those_published_last() -> None:
    with marathon(num_fragments=3) as rollout:
        for number, _ in enumerate(rollout.fragments()):
            version, weights = rollout.acting_weights("a")
            assert version == number
            assert weights["weight"].tolist() == [float(number)] * 2
            weights["weight"] += 100
            with torch.no_grad():
                rollout.module["a"].weight += 50  # training alone changes nothing
            rollout.publish({"a": Acts(number + 1).state_dict()})
            assert rollout.acting_weights("a").version == number + 1
        with pytest.raises(ModuleError, match="there is no module 'c'"):
            rollout.acting_weights("c")


# Exploring


class Sure(RLModule):
    """Finds action 3 the likeliest, by little."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        logits = torch.zeros(len(batch["obs"]), 50)
        logits[:, 3] = 0.1
        return {"action_dist_inputs": logits}


@pytest.mark.parametrize(
    ("explore", "greedy"), [(True, ""), (False, "ab"), ({"a": False}, "a"), ({"a": True, "b": False}, "b"), ({}, "")]
)
def test_some_modules_explore_and_others_do_not(explore: Any, greedy: str) -> None:
    with marathon(module={"a": Sure(), "b": Sure()}, explore=explore, num_fragments=1, fragment_length=20) as rollout:
        [fragment] = rollout.fragments()
    for module_id in AGENTS:
        assert (set(rows(fragment, module_id)) == {3}) == (module_id in greedy)


def test_whether_a_module_explores_is_said_when_it_is_added() -> None:
    names = {"a": "a", "b": "b"}
    options: Any = {"agent_to_module_mapping_fn": lambda agent, episode: names[agent], "length": 20}
    with marathon(module={"a": Sure(), "b": Sure()}, fragment_length=20, num_fragments=3, **options) as rollout:
        fragments = rollout.fragments()
        next(iter(fragments))
        rollout.add_module("frozen", Sure(), explore=False)
        names["a"] = "frozen"
        *_, fragment = fragments
    assert set(rows(fragment, "frozen")) == {3}
    assert set(rows(fragment, "b")) != {3}


# Which module serves whom


class Asked(dict[Any, Any]):
    """A mapping that counts how often it is asked."""

    count = 0

    def __getitem__(self, agent: Any) -> Any:
        self.count += 1
        return super().__getitem__(agent)


def test_a_dict_is_asked_for_agents_and_a_function_for_their_episodes() -> None:
    asked = Asked(a="a", b="b")
    called, mapping = asking({"a": "a", "b": "b"})
    options: Any = {"num_envs": 16, "length": 2, "fragment_length": 10, "num_fragments": 2}
    with marathon(agent_to_module_mapping_fn=asked, **options) as rollout:
        by_dict = [rows(fragment, "b") for fragment in rollout.fragments()]
    assert asked.count <= 2 * (1 + 10)  # whenever agents begin, each once for all environments

    with marathon(agent_to_module_mapping_fn=mapping, **options) as rollout:
        called.clear()  # of what was asked to find out spaces, and at the first reset
        by_function = [rows(fragment, "b") for fragment in rollout.fragments()]
    assert by_function == by_dict
    assert len(called) == len(set(called)) == 2 * 16 * 10
