"""Policies of a rollout over several agents: one for each agent, the same to the bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_policies import ACTIONS, BOX, MASKED, LoggedEnv, Repeats
from gymnasium import spaces
from mpe2 import simple_spread_v3
from together import Together

from rollflow import FrameStacking, MeanStdFilter, MultiAgentRollout, Policy
from rollflow.nodes import DefaultModule, FlattenObservations, LambdaConnector, MultiAgentEnv, PrevActionsPrevRewards
from rollflow.policy import evaluate_agents
from rollflow.stream import EnvError, ModuleError, PolicyError
from rollflow.stream.data.tree import stack_trees

STEPS = 24
CONFIG = {"fcnet_hiddens": (8,), "use_lstm": True, "lstm_cell_size": 6}


def logged_agents() -> Together:
    """Two walkers and a masked agent, whose episodes do not end; each environment keeps what it gave."""
    walkers = {name: LoggedEnv(BOX, ACTIONS["box"], seed, ends=0.0) for seed, name in enumerate(("ann", "bob"))}
    return Together({**walkers, "cat": LoggedEnv(MASKED, ACTIONS["discrete"], 2, ends=0.0)})


def pieces(part: Any) -> list[Any]:
    """Pieces that look back, for the walkers; a filter for the masked one."""
    if "cat" in part.agents:
        return [MeanStdFilter(update_stats=False)]
    previous = PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=2)
    return [previous, FlattenObservations(), FrameStacking(num_frames=2)]


def rollout_over(env: Together, **kwargs: Any) -> MultiAgentRollout:
    """A rollout of one fragment, with a module for the walkers, and one for the masked agent."""
    mapping = {"ann": "walker", "bob": "walker", "cat": "cat"}
    acts = {"module": {"walker": None, "cat": None}, "agent_to_module_mapping_fn": mapping, "model_config": CONFIG}
    options: Any = {"fragment_length": STEPS, "num_fragments": 1, "seed": 3, **acts, **kwargs}
    return MultiAgentRollout(lambda: env, env_to_module_connector=pieces, **options)


def _save_agents(rollout: MultiAgentRollout, path: Path) -> None:
    rollout.policy("ann").save(path / "walker")
    rollout.save_policy(path / "cat", "cat")


def _save_modules(rollout: MultiAgentRollout, path: Path) -> None:
    for module_id in ("walker", "cat"):
        rollout.save_policy(path / module_id, module_id=module_id)


@pytest.mark.parametrize(
    ("explore", "save"),
    [(False, _save_agents), (True, _save_modules), (False, MultiAgentRollout.save_policy)],
    ids=["agents", "modules", "all"],
)
def test_each_agents_policy_computes_what_the_rollout_computed(
    explore: bool, save: Callable[[MultiAgentRollout, Path], None], tmp_path: Path
) -> None:
    env = logged_agents()
    rollout = rollout_over(env, explore=explore)
    save(rollout, tmp_path)
    with pytest.raises(PolicyError, match=r"has the policies of cat, walker: load one of them, such as .*/cat'\)"):
        Policy.load(tmp_path)
    policies = {agent: Policy.load(tmp_path / module) for agent, module in (("ann", "walker"), ("cat", "cat"))}
    assert {agent: policy.trained_on["agent"] for agent, policy in policies.items()} == {"ann": "ann", "cat": "cat"}
    with rollout:
        (fragment,) = rollout.fragments()
    (episode,) = fragment.episodes()
    recorded = {agent: episode.agent_episodes[agent] for agent in env.possible_agents}
    for step in range(STEPS):
        for agents in (("ann", "bob"), ("cat",)):
            policy = policies[agents[0]]
            observations, rewards, _ = zip(*(env.envs[agent].log[step] for agent in agents), strict=True)
            policy.act_batch(stack_trees(observations), rewards, agents)
            for row, agent in enumerate(agents):
                expected = recorded[agent].get_extra_model_outputs("action_dist_inputs", step)
                np.testing.assert_array_equal(policy.outputs["action_dist_inputs"][row], expected)
                if not explore:
                    np.testing.assert_array_equal(policy.outputs["actions"][row], recorded[agent].get_actions(step))
            if explore and agents == ("ann", "bob"):
                return  # what it would look back to are other actions than the rollout's from here on


class Turns(MultiAgentEnv):
    """Two agents that act in turns, and see how often they have acted and what they earned since; "b" ends first."""

    possible_agents = ("a", "b")
    observation_spaces = dict.fromkeys(possible_agents, spaces.Box(-100.0, 100.0, (2,), np.float32))
    action_spaces = observation_spaces

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.step_number, self.acted = 0, {"a": 0.0, "b": 0.0}
        return {"a": np.zeros(2, np.float32)}, {}

    def step(self, actions: Any) -> Any:
        ((agent, action),) = actions.items()
        assert agent == ("a" if self.step_number % 2 == 0 or self.step_number > 3 else "b")
        assert action.tolist() == [self.acted[agent], 0.0]
        self.acted[agent] += 1.0
        self.step_number += 1
        follows = "a" if self.step_number % 2 == 0 or self.step_number > 3 else "b"
        observations = {follows: np.array([self.acted[follows], 0.0], np.float32)}
        ends = {"b": self.step_number == 4, "__all__": self.step_number == 6}
        return observations, {"a": 1.0, "b": 0.5} if self.step_number <= 4 else {"a": 1.0}, ends, {}, {}


def test_each_agents_returns_and_lengths_are_told() -> None:
    one = Policy(Repeats, observation_space=Turns.observation_spaces["a"], action_space=Turns.action_spaces["a"])
    told = evaluate_agents({"a": one, "b": one}, Turns, episodes=3)
    assert {agent: (each.returns.tolist(), each.lengths.tolist()) for agent, each in told.items()} == {
        "a": ([6.0] * 3, [4] * 3),
        "b": ([2.0] * 3, [2] * 3),
    }
    with pytest.raises(PolicyError, match=r"policies are missing of \['b'\], and \['c'\] are no agents"):
        evaluate_agents({"a": one, "c": one}, Turns)
    other = Policy(Repeats, observation_space=spaces.Discrete(2), action_space=spaces.Discrete(2))
    with pytest.raises(PolicyError, match="observation_space of agent 'b' is Box"):
        evaluate_agents({"a": one, "b": other}, Turns)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (({}, {"b": np.nan}, {}, {}, {}), ", agent 'b': its reward is nan, expected a finite"),
        (({}, {"b": None}, {}, {}, {}), ", agent 'b': its reward is None, expected one number"),
        (({}, {}, {}, {}), ": it gave .*, expected a tuple of observations"),
        (OSError("broken"), ""),
    ],
    ids=["nan", "none", "four", "raised"],
)
def test_faults_of_agents_are_told_with_episode_and_step(answer: Any, error: str) -> None:
    class Faulty(Turns):
        def step(self, actions: Any) -> Any:
            told = super().step(actions)
            if self.step_number != 2:
                return told
            if isinstance(answer, Exception):
                raise answer
            return answer

    one = Policy(Repeats, observation_space=Turns.observation_spaces["a"], action_space=Turns.action_spaces["a"])
    told = rf"^(broken\n)?environment 0, env step 1{error}(.|\n)*\nepisode 0"
    with pytest.raises((EnvError, OSError), match=told):
        evaluate_agents({"a": one, "b": one}, Faulty, episodes=2)


def test_what_can_not_be_saved_is_told_before_anything_is_written(tmp_path: Path) -> None:
    by_episode = {
        "module": {"walker": None, "cat": None, "idle": Repeats(BOX, ACTIONS["box"])},
        "agent_to_module_mapping_fn": lambda agent, episode: "cat" if agent == "cat" else "walker",
    }
    rollout = MultiAgentRollout(logged_agents, seed=3, **by_episode)
    with pytest.raises(ModuleError, match="which agents module 'idle' serves can't be told"):
        rollout.save_policy(tmp_path / "all")
    with pytest.raises(PolicyError, match=r"walker.zip is one file, expected a folder: shutil.make_archive makes"):
        rollout.save_policy(tmp_path / "walker.zip", module_id="walker")
    with pytest.raises(PolicyError, match="agent 'ann' may have another module in each episode"):
        rollout.save_policy(tmp_path / "ann", "ann")
    hidden = type("Hidden", (DefaultModule,), {"__module__": "__main__"})
    with pytest.raises(PolicyError, match="Hidden can't be imported"):
        rollout_over(logged_agents(), module={"cat": None, "walker": hidden}).save_policy(tmp_path / "all")
    assert not list(tmp_path.iterdir())
    rollout.save_policy(tmp_path / "walker", module_id="walker")
    assert Policy.load(tmp_path / "walker").trained_on["agent"] == "ann"


def test_policies_of_a_rollout_over_pettingzoo_are_evaluated() -> None:
    def make() -> Any:
        return simple_spread_v3.parallel_env(N=2)

    config = {"fcnet_hiddens": (8,), "use_lstm": True, "lstm_cell_size": 6}
    flat: Any = {"env_to_module_connector": lambda env: [PrevActionsPrevRewards(), FlattenObservations()]}
    rollout = MultiAgentRollout(make, model_config=config, seed=1, **flat)
    policies = {agent: rollout.policy(agent) for agent in ("agent_0", "agent_1")}
    first, again = (evaluate_agents(policies, make, episodes=2) for _ in range(2))
    by_rollout = rollout.evaluate(episodes=2)
    for agent in policies:
        assert first[agent].lengths.tolist() == [25, 25]
        np.testing.assert_array_equal(first[agent].returns, again[agent].returns)
        np.testing.assert_allclose(first[agent].returns, by_rollout[agent].returns, rtol=1e-4)  # one pass for both
    weights = rollout.module["default_policy"].state_dict()
    rollout.publish({"default_policy": {name: -part for name, part in weights.items()}})
    assert not np.allclose(rollout.evaluate(make, 2)["agent_0"].returns, first["agent_0"].returns)
    with pytest.raises(PolicyError, match="env is list, expected env: a function that makes an environment"):
        rollout.evaluate([make, make])
    with pytest.raises(PolicyError, match="env is CartPole-v1, expected env: a function that makes an environment"):
        rollout.evaluate("CartPole-v1")


def test_agents_without_a_policy_of_their_own_are_refused() -> None:
    with pytest.raises(PolicyError, match=r"agent 'dan': the agents are \['ann', 'bob', 'cat'\]"):
        rollout_over(logged_agents()).policy("dan")
    mapping = lambda agent, episode: "b" if agent == "cat" else "a"  # noqa: E731
    by_function = MultiAgentRollout(logged_agents, agent_to_module_mapping_fn=mapping, module={"a": None, "b": None})
    for call in (lambda: by_function.policy("ann"), by_function.evaluate):
        told = "agent_to_module_mapping_fn is a function; expected a dict there, or pol"
        with pytest.raises(PolicyError, match=told):
            call()
    assert by_function.policy("ann", "a").trained_on["module"] == "a"
    jointly = rollout_over(logged_agents(), joint_connector=lambda env: LambdaConnector(lambda batch: None, name="x"))
    with pytest.raises(PolicyError, match="joint_connector pieces see all agents together"):
        jointly.policy("ann")
