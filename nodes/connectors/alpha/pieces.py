"""Alpha pipelines as ConnectorV2 pieces, for the pipelines of rollouts."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from rollflow.nodes.connectors.alpha.connector import (
    ActionConnector,
    ActionConnectorDataType,
    ActionConnectorPipeline,
    AgentConnector,
    AgentConnectorPipeline,
    AgentConnectorsOutput,
    Connector,
    ConnectorContext,
    SampleBatch,
    agent_id_of,
    data_of,
)
from rollflow.nodes.connectors.connector_v2 import Batch, ConnectorV2, Episodes, Space
from rollflow.nodes.connectors.list_form import episode_key, rewrite_last
from rollflow.nodes.connectors.state_watch import StateWatch
from rollflow.nodes.connectors.stateful import is_stateful
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import ConnectorError
from rollflow.stream.data.tree import leaves_of, map_tree
from rollflow.stream.episodes.single_agent import SingleAgentEpisode

_DECLARATION = (
    "to_state and from_state, and merge_states where copies run in workers; or a learnt_state that returns {} where "
    "nothing has to last"
)


def _undeclaring(pipeline: Any) -> Iterator[Any]:
    """The connectors without a `to_state` or `learnt_state` of their own, also in nested pipelines."""
    for connector in pipeline:
        if hasattr(connector, "connectors"):
            yield from _undeclaring(connector)
        elif type(connector).to_state is Connector.to_state and type(connector).learnt_state is Connector.learnt_state:
            yield connector


def as_connector_v2(connector: Any) -> Any:
    """A ConnectorV2 piece that calls an Alpha connector or pipeline; anything else is returned as it is."""
    if isinstance(connector, AgentConnector):
        return AgentConnectorPiece(connector)
    return ActionConnectorPiece(connector) if isinstance(connector, ActionConnector) else connector


class _AlphaPiece(ConnectorV2):
    """A piece that calls Alpha connectors: their state is its state."""

    pipeline: Any
    _watches: list[tuple[Any, StateWatch]] | None = None  # (connector that declares no state, its watch)

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Name -> state of each connector that has learnt something. Raises StateError for undeclared state."""
        for connector, watch in self._watches or ():
            watch.check(connector, _DECLARATION)
        state: dict[str, Any] = self.pipeline.learnt_state()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Give connectors a state that `get_state` gave."""
        self._check_state(state)
        self.pipeline.take_learnt_state(state)

    def reset_state(self) -> None:
        """Make connectors that can forget do so."""
        for connector in self.pipeline:
            if callable(getattr(connector, "reset_state", None)):
                connector.reset_state()

    def merge_states(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Name -> merged state, connector by connector."""
        merged: dict[str, Any] = self.pipeline.merge_states(states)
        return merged

    def _take(self, connector: Connector, kind: type[Any]) -> None:
        self.pipeline = connector if isinstance(connector, kind) else kind(connector.ctx, [connector])
        self.name = type(connector).__name__

    def _watch_states(self) -> None:
        """Watch the connectors that declare no state, from the end of the first call on."""
        if self._watches is None:
            self._watches = [(each, StateWatch(each)) for each in _undeclaring(self.pipeline)]
            for connector, watch in self._watches:
                watch.begin(connector)

    def _complete_context(self, observation_space: Space | None, action_space: Space | None) -> None:
        """Fill in the spaces that the connectors' context lacks."""
        if self.pipeline.ctx is None:
            self.pipeline.bind(ConnectorContext())
        ctx: ConnectorContext = self.pipeline.ctx
        ctx.observation_space = observation_space if ctx.observation_space is None else ctx.observation_space
        ctx.action_space = action_space if ctx.action_space is None else ctx.action_space


class AgentConnectorPiece(_AlphaPiece):
    """Calls agent connectors over the episodes' newest steps, with the agents of one environment as one list.

        connector    an `AgentConnector` or an `AgentConnectorPipeline`

    Each agent's data are `new_obs`, `rewards`, `terminateds`, `truncateds` and `infos` of its newest step, with `t`,
    `eps_id`, `env_id` and `agent_index`. Before that the connectors get what the module chose at the step before, by
    `on_policy_output`, and `reset` where an environment has begun an episode. The `new_obs` and the `rewards` that they
    leave are written to the episodes. Columns that they make for the policy are added to the batch, without the
    states, which rollouts keep themselves.

    Raises ConnectorError where the connectors do not leave one item for each agent.
    """

    columnar = False
    changes_episodes = True
    lookback = 1

    def __init__(self, connector: AgentConnector) -> None:
        self._take(connector, AgentConnectorPipeline)
        self._episodes: dict[str, Any] = {}  # environment -> id of its newest episode
        self._answered: dict[str, dict[Any, int]] = {}  # environment -> agent -> steps whose output has been passed on
        self._is_complete = False
        super().__init__()

    def recompute_output_observation_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._complete_context(input_observation_space, input_action_space)
        left: Space = self.pipeline.observation_space_after(input_observation_space)
        return left

    def __call__(self, *, rl_module: Any = None, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if not self._is_complete:
            self._complete_states(rl_module)
        added: list[tuple[str, Any, SingleAgentEpisode]] = []
        for env_id, agents in _by_environment(self.single_agent_episode_iterator(episodes)).items():
            self._begin(env_id, agents)
            given = [data_of(env_id, agent, place) for place, agent in enumerate(agents)]
            made = self.pipeline(list(given))
            ids = [(each.env_id, each.agent_id) for each in made]
            expected = [(env_id, agent_id_of(agent)) for agent in agents]
            if ids != expected:
                raise ConnectorError(
                    f"{self.name} left data of {ids}, expected one item for each agent, in order: {expected}"
                )
            for agent, each in zip(agents, made, strict=True):
                added += self._written(agent, each.data)
        self._watch_states()
        return _with_columns(batch, added)

    def _begin(self, env_id: str, agents: list[SingleAgentEpisode]) -> None:
        """Reset an environment that has begun an episode, or pass on what the module chose at the step before."""
        episode_id = agents[0].multi_agent_episode_id or agents[0].id_
        if self._episodes.get(env_id) != episode_id:
            self._episodes[env_id], self._answered[env_id] = episode_id, {}
            self.pipeline.reset(env_id)
        answered = self._answered[env_id]
        for agent in agents:
            steps = agent.t
            if steps and answered.get(agent.agent_id) != steps:
                answered[agent.agent_id] = steps
                self.pipeline.on_policy_output(_output_of(env_id, agent))

    def _written(self, episode: SingleAgentEpisode, data: Any) -> list[tuple[str, Any, SingleAgentEpisode]]:
        """Write what connectors left to an episode; return the further columns of the policy's input."""
        columns = data.raw_dict if isinstance(data, AgentConnectorsOutput) else data
        if SampleBatch.NEXT_OBS not in columns:
            raise ConnectorError(
                f"{self.name} left data without 'new_obs', expected the observation; columns: {', '.join(columns)}"
            )
        observation = columns[SampleBatch.NEXT_OBS]
        rewrite_last(episode, observation, self.observation_space)
        reward = columns.get(SampleBatch.REWARDS)
        if episode.t and reward is not None and reward != episode.get_rewards(-1):
            episode.set_rewards(new_data=np.float32(reward), at_indices=-1)
        if not isinstance(data, AgentConnectorsOutput):
            return []
        items = {name: map_tree(lambda leaf: leaf[0], column) for name, column in data.sample_batch.items()}
        if SampleBatch.OBS in items and _are_equal(items[SampleBatch.OBS], observation):
            del items[SampleBatch.OBS]
        return [(name, item, episode) for name, item in items.items() if not name.startswith("state_in_")]

    def _complete_states(self, rl_module: Any) -> None:
        self._is_complete = True
        ctx: ConnectorContext | None = self.pipeline.ctx
        if ctx is not None and not ctx.initial_states and is_stateful(rl_module):
            states = ConnectorContext.from_policy(rl_module)
            ctx.initial_states, ctx.is_policy_recurrent = states.initial_states, True


class ActionConnectorPiece(_AlphaPiece):
    """Calls action connectors over a module's choices; what they leave becomes `actions_for_env`.

    connector    an `ActionConnector` or an `ActionConnectorPipeline`

    `actions` stay as the module chose them, so that they go with their log-probabilities. The connectors see the
    agent's observation as `obs` in the input, and the module's further outputs as fetches.
    """

    columnar = False
    changes_episodes = False

    def __init__(self, connector: ActionConnector) -> None:
        self._take(connector, ActionConnectorPipeline)
        super().__init__()

    def recompute_output_action_space(self, input_observation_space: Space, input_action_space: Space) -> Space:
        self._complete_context(input_observation_space, input_action_space)
        left: Space = self.pipeline.action_space_after(input_action_space)
        return left

    def __call__(self, *, batch: Batch, episodes: Episodes, **kwargs: Any) -> Batch:
        if Columns.ACTIONS not in batch:
            return batch
        made: dict[tuple[Any, ...], list[Any]] = {}
        for env_id, agents in _by_environment(self.single_agent_episode_iterator(episodes)).items():
            for agent in agents:
                key = episode_key(agent)
                columns = {name: items[key][0] for name, items in batch.items() if key in items}
                if Columns.ACTIONS not in columns:
                    continue
                state = columns.pop(Columns.STATE_OUT, None)
                action = columns.pop(Columns.ACTIONS_FOR_ENV, columns[Columns.ACTIONS])
                del columns[Columns.ACTIONS]
                given = {SampleBatch.OBS: agent.get_observations(-1)}
                output = (map_tree(np.array, action), [] if state is None else leaves_of(state), columns)
                result = self.pipeline(ActionConnectorDataType(env_id, agent_id_of(agent), given, output))
                made[key] = [result.output[0]]
        self._watch_states()
        batch[Columns.ACTIONS_FOR_ENV] = made
        return batch


def _by_environment(episodes: Iterator[SingleAgentEpisode]) -> dict[str, list[SingleAgentEpisode]]:
    """Environment id -> the episodes of its agents, in order; an episode built by hand is its own environment."""
    found: dict[str, list[SingleAgentEpisode]] = {}
    for episode in episodes:
        built = episode.lane is None or episode.slot is None
        alone = episode.multi_agent_episode_id or episode.id_
        found.setdefault(alone if built else f"env_{episode.lane}_{episode.slot}", []).append(episode)
    return found


def _output_of(env_id: str, episode: SingleAgentEpisode) -> ActionConnectorDataType:
    """Output of the module at an episode's last step."""
    outputs = {name: episode.get_extra_model_outputs(name, -1) for name in episode.extra_model_outputs}
    state = outputs.pop(Columns.STATE_OUT, None)
    for name in (Columns.ACTIONS_FOR_ENV, Columns.POLICY_VERSION):
        outputs.pop(name, None)
    states = [] if state is None else leaves_of(state)
    output = (episode.get_actions(-1), states, outputs)
    return ActionConnectorDataType(env_id, agent_id_of(episode), {}, output)


def _are_equal(one: Any, other: Any) -> bool:
    mine, theirs = leaves_of(one), leaves_of(other)
    return len(mine) == len(theirs) and all(map(np.array_equal, mine, theirs))


def _with_columns(batch: Batch, added: list[tuple[str, Any, SingleAgentEpisode]]) -> Batch:
    for name, item, episode in added:
        ConnectorV2.add_batch_item(batch, name, item, episode)
    return batch
