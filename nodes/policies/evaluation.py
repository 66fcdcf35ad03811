"""Evaluation of a policy: whole episodes in environments of its own, their returns and lengths."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from rollflow.nodes.argument_checks import check_numbers, is_whole
from rollflow.nodes.env.env_source import lane_makers
from rollflow.nodes.env.lane_envs import reset_values, step_values
from rollflow.nodes.env.multi_agent_env import adapted, agent_spaces
from rollflow.nodes.env.observation_check import Deviations, check_reset, info_given, rewards_of
from rollflow.nodes.env.stepping import LaneVectorEnv, Stepped, autoreset_mode, columns_of
from rollflow.stream.data.closing import close_all, closing_on_error
from rollflow.stream.data.errors import EnvError, PolicyError, noted, shown
from rollflow.stream.data.ranges import finite_float32
from rollflow.stream.data.tree import Tree, map_tree, stack_trees, tree_at
from rollflow.stream.episodes.agent_timeline import ALL_AGENTS
from rollflow.stream.graph.seeding import env_seed_for
from rollflow.stream.multi_agent.agent_states import AgentNumbers

if TYPE_CHECKING:
    from rollflow.nodes.policies.policy import Policy

_RESAMPLES, _TAILS = 2000, (2.5, 97.5)  # per cent

EnvMaker = str | EnvSpec | Callable[[], gym.Env[Any, Any] | VectorEnv[Any, Any, Any]]


def name_of_env(env: Any, env_kwargs: Mapping[str, Any] | None = None) -> str:
    """The name of environments, as they were given, with the keywords that they are made with."""
    name = env.id if isinstance(env, EnvSpec) else env
    name = name if isinstance(name, str) else getattr(env, "__qualname__", type(env).__name__)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in env_kwargs.items())})" if env_kwargs else name


def env_to_evaluate(env: Any, whose: str = "env is", *, may_be_id: bool) -> Any:
    """Return what makes the environments of an evaluation.

    whose        begins the error's text
    may_be_id    whether the id of an environment will do, beside a function

    Raises PolicyError for what makes no environments one by one, and TypeError for a number of episodes.
    """
    if is_whole(env):
        raise TypeError(f"evaluate's env is {env}, expected what makes environments: the number is episodes={env}")
    if not callable(env) and not (may_be_id and isinstance(env, str | EnvSpec)):
        kinds = "an id, or a function that makes one" if may_be_id else "a function that makes an environment"
        raise PolicyError(f"{whose} {name_of_env(env)}, expected env: {kinds}")
    return env


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Returns and lengths of all episodes of an evaluation, in the order of their seeds.

    returns    f64[E]
    lengths    i64[E]
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def deviation(self) -> float:
        """Standard deviation of the returns; 0 for one episode."""
        return float(self.returns.std(ddof=1)) if len(self.returns) > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Interval that has the mean in it with a confidence of 95 %, by resampling the episodes."""
        rng = np.random.default_rng(0)
        drawn = rng.integers(len(self.returns), size=(_RESAMPLES, len(self.returns)))
        low, high = np.percentile(self.returns[drawn].mean(1), _TAILS)
        return float(low), float(high)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"mean return {self.mean:.2f} (95 % confidence: {low:.2f} to {high:.2f}), deviation {self.deviation:.2f}, "
            f"mean length {self.lengths.mean():.1f}, {len(self.returns)} episodes"
        )


def evaluated(policy: "Policy", env: EnvMaker, *, episodes: int, num_envs: int, seed: int) -> Evaluation:
    """Play so many episodes, each with a seed of its own, in environments that step side by side.

    Which episodes count is known before they begin, so that short ones have no more weight than long ones. An id whose
    plain form has other spaces than the policy is made in its vectorized form, as a rollout makes it; slots of vector
    environments have a seed for their first episode, and go on with their generators.
    """
    env_to_evaluate(env, may_be_id=True)
    check_numbers(episodes=(episodes, 1), num_envs=(num_envs, 1))
    envs: list[gym.Env[Any, Any] | VectorEnv[Any, Any, Any]] = [_made(env, policy, min(num_envs, episodes))]

    def close() -> None:
        close_all((f"environment {place}", each.close) for place, each in enumerate(envs))

    with closing_on_error(close):
        first = envs[0]
        if isinstance(first, VectorEnv):
            check_spaces(policy, first.single_observation_space, first.single_action_space, str(first))
            found = _played_together(policy, first, episodes, seed)
        else:
            check_spaces(policy, first.observation_space, first.action_space, str(first))
            while len(envs) < min(num_envs, episodes):
                made = _made(env, policy, 1)
                if any(made is other for other in envs):
                    text = f"the callable for slot {len(envs)} gave an environment that another slot has already"
                    raise EnvError(text)
                envs.append(made)
            found = _played(policy, envs, episodes, seed)
    close()
    return found


Asked = dict[Any, tuple[Tree, float]]  # session -> its observation, and the reward since its last action
Player = Generator[Asked, dict[Any, Any], None]  # takes the actions of the sessions that it has asked for


def play(players: Iterable[Player], policy_of: Callable[[Any], "Policy"]) -> None:
    """Have policies act for all that players ask for, in one pass for each policy, until they ask for no more."""
    asking = [(player, asked) for player in players if (asked := next(player, None)) is not None]
    while asking:
        sessions: dict[int, list[Any]] = {}  # by policy
        wanted = {session: each for _, asked in asking for session, each in asked.items()}
        for session in wanted:
            sessions.setdefault(id(policy_of(session)), []).append(session)
        actions: dict[Any, Any] = {}
        for ids in sessions.values():
            observations = stack_trees([map_tree(np.asarray, wanted[session][0]) for session in ids])
            rewards = np.array([wanted[session][1] for session in ids], np.float32)
            made = policy_of(ids[0]).act_batch(observations, rewards, ids)
            actions |= {session: tree_at(made, row) for row, session in enumerate(ids)}
        going = []
        for player, asked in asking:
            with suppress(StopIteration):
                going.append((player, player.send({session: actions[session] for session in asked})))
        asking = going


def _played(policy: "Policy", envs: Sequence[Any], episodes: int, seed: int) -> Evaluation:
    returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
    waiting = iter(range(episodes))

    def player(session: int, env: gym.Env[Any, Any]) -> Player:
        for episode in waiting:
            policy.reset(session)
            where = f"slot {session}, episode {episode}"
            with noted(f"{where}, the reset"):
                answer = env.reset(seed=env_seed_for(seed, "evaluation", episode))
            check_reset(answer, where)
            observation, reward, ended = answer[0], 0.0, False
            while not ended:
                actions = yield {session: (observation, reward)}
                observation, reward, ended = _stepped(env, actions[session], f"{where}, step {lengths[episode]}")
                returns[episode] += reward
                lengths[episode] += 1

    play([player(session, env) for session, env in enumerate(envs)], lambda _: policy)
    return Evaluation(returns, lengths)


def _stepped(env: gym.Env[Any, Any], action: Any, where: str) -> tuple[Tree, float, bool]:
    """Observation, reward, and whether the episode has ended. Raises EnvError for what a rollout refuses, too."""

    def named(_: int) -> str:
        return where

    with noted(where):
        answer = env.step(action)
    [observation], earned, [terminated], [truncated], [info] = columns_of([answer], named)
    rewards = rewards_of(earned, named)
    finite_float32(rewards, named)
    info_given(info, where)
    return observation, float(rewards[0]), bool(terminated or truncated)


def _played_together(policy: "Policy", env: VectorEnv[Any, Any, Any], episodes: int, seed: int) -> Evaluation:
    """Play in the slots of a vector environment: slot i of N plays the episodes i, i + N, i + 2 N, …"""
    slots, resets_next_step = env.num_envs, autoreset_mode(env) is AutoresetMode.NEXT_STEP
    lane = LaneVectorEnv(env, deviations=Deviations())
    returns, lengths = np.zeros(episodes), np.zeros(episodes, np.int64)
    playing, rewards = np.arange(slots), np.zeros(slots, np.float32)
    resetting = np.zeros(slots, np.bool_)  # in the next step, which is part of no episode
    with noted("the first reset"):
        observations, _ = lane.reset([env_seed_for(seed, "evaluation", slot) for slot in range(slots)])
    steps = 0

    def named(slot: int) -> str:
        return f"slot {slot}, vector step {steps}"

    while playing.min() < episodes:
        actions = policy.act_batch(map_tree(np.array, observations), rewards, list(range(slots)))
        with noted(f"vector step {steps}"):
            stepped = Stepped(*lane.step(actions))
        observations = stepped.observations
        earned = np.where(resetting, 0, rewards_of(list(stepped.rewards), named))
        rewards = finite_float32(earned, named)
        counted = (playing < episodes) & ~resetting
        returns[playing[counted]] += earned[counted]
        lengths[playing[counted]] += 1
        ended = np.logical_or(stepped.terminateds, stepped.truncateds) & ~resetting
        begun, resetting = (resetting, ended) if resets_next_step else (ended, resetting)
        playing[ended] += slots
        rewards[begun] = 0
        for slot in np.flatnonzero(begun).tolist():
            policy.reset(slot)
        steps += 1
    return Evaluation(returns, lengths)


def _made(env: EnvMaker, policy: "Policy", slots: int) -> gym.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    """One environment; of an id whose plain form is not there, or has other spaces, so many in its vectorized form."""
    if not isinstance(env, str | EnvSpec):
        made = env()
        if not isinstance(made, gym.Env | VectorEnv):
            raise PolicyError(
                f"env gives {shown(made)}, expected an id, or a function that makes a gymnasium environment"
            )
        return made
    spec = lane_makers(env, 1, 1)[0].spec
    assert spec is not None
    if spec.vector_entry_point is None:
        return gym.make(env)
    with suppress(Exception):  # it may not be there, or not take the vectorized form's keywords
        plain: gym.Env[Any, Any] = gym.make(env)
        if (plain.observation_space, plain.action_space) == (policy.observation_space, policy.action_space):
            return plain
        plain.close()
    return lane_makers(env, slots, 1)[0].make()


def check_spaces(policy: Any, observation_space: Any, action_space: Any, where: str, whose: str = "the policy") -> None:
    """Raise PolicyError if a policy was made for other spaces than these, of `where`."""
    for name, theirs in (("observation_space", observation_space), ("action_space", action_space)):
        own = getattr(policy, name)
        if own != theirs:
            raise PolicyError(f"{name} of {where} is {theirs}, but {whose} was made for {own}")


# Several agents


def evaluate_agents(
    policies: "Mapping[Any, Policy]", env: Callable[[], Any], episodes: int = 100, *, seed: int = 0
) -> dict[Any, Evaluation]:
    """Returns and lengths of each agent, over whole episodes that the agents play together.

        policies    agent -> its policy, which may be that of other agents, too
        env         makes a `MultiAgentEnv`, or what PettingZoo has
        seed        of the environments

    An agent's length is the number of its actions. Sessions of the policies are begun anew, one for each agent. Raises
    PolicyError for an agent without a policy, or with one for other spaces.
    """
    check_numbers(episodes=(episodes, 1))
    made = adapted(env_to_evaluate(env, may_be_id=False)())
    try:
        _check_agents(policies, made)
        found = {agent: Evaluation(np.zeros(episodes), np.zeros(episodes, np.int64)) for agent in policies}
        play([_player(policies, made, found, episodes, seed)], policies.__getitem__)
    finally:
        made.close()
    return found


def _player(
    policies: "Mapping[Any, Policy]", env: Any, found: Mapping[Any, Evaluation], episodes: int, seed: int
) -> Player:
    """Player of all agents, whose returns and lengths go into `found`."""
    slots = AgentNumbers([list(policies)], 1)  # names what breaks a rule
    for episode in range(episodes):
        for agent, policy in policies.items():
            policy.reset(agent)
        since = dict.fromkeys(policies, 0.0)  # an agent's last action
        slots.steps[0] = -1
        with noted(f"episode {episode}"):
            with noted(slots.env_named(0)):
                answer = env.reset(seed=env_seed_for(seed, "evaluation", episode))
            reset_values([0], [answer], slots)
        slots.steps[0], observations = 0, answer[0]
        ended: set[Any] = set()
        while observations:
            actions = yield {agent: (seen, since[agent]) for agent, seen in observations.items()}
            for agent in actions:
                found[agent].lengths[episode] += 1
                since[agent] = 0.0
            with noted(f"episode {episode}"):
                with noted(slots.env_named(0)):
                    answer = env.step(actions)
                step_values([answer], slots)
            slots.steps[0] += 1
            observations, rewards, terminateds, truncateds, _ = answer
            for agent, reward in rewards.items():
                found[agent].returns[episode] += float(reward)
                since[agent] += float(reward)
            ended |= {agent for told in (terminateds, truncateds) for agent, flag in told.items() if flag}
            is_over = ALL_AGENTS in ended or ended >= policies.keys()
            observations = {} if is_over else {each: seen for each, seen in observations.items() if each not in ended}


def _check_agents(policies: "Mapping[Any, Policy]", env: Any) -> None:
    spaces = agent_spaces(env)
    missing = [agent for agent in spaces.agents if agent not in policies]
    unknown = [agent for agent in policies if agent not in spaces.agents]
    if missing or unknown:
        raise PolicyError(f"policies are missing of {missing}, and {unknown} are no agents; expected {spaces.agents}")
    for agent, policy in policies.items():
        theirs = spaces.observation_spaces[agent], spaces.action_spaces[agent]
        check_spaces(policy, *theirs, f"agent {agent!r}", "its policy")
