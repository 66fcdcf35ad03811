"""The modules of a multi-agent rollout as they act: copies, their weights, and which agent each serves."""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rollflow.nodes.default_module import DefaultModule
from rollflow.nodes.given import acting_copy, module_for
from rollflow.nodes.module_forward import ModuleForward
from rollflow.nodes.multi_agent.multi_rl_module import MultiRLModule
from rollflow.nodes.multi_agent.random_module import RandomModule
from rollflow.nodes.policy_weights import PolicyWeights, Weights
from rollflow.stream.episode_ids import EpisodeIds
from rollflow.stream.errors import EnvError, ModuleError
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent_episode import DEFAULT_MODULE_ID, MultiAgentEpisode
from rollflow.stream.seeding import seed_for

_PROBES, _MOST_PROBES = EpisodeIds("probe"), 16

AgentToModule = Mapping[Any, Any] | Callable[..., Any] | None


@dataclass(slots=True)
class Acting:
    """One module as it acts.

    module     the copy that acts
    weights    what is published for it
    forward    a pass
    """

    module: Any
    weights: PolicyWeights
    forward: ModuleForward


class ModuleSet:
    """The modules of a rollout.

        given      one module, or a mapping of them by id, or None: a `DefaultModule` for all agents, "default_policy"
        mapping    agent id -> module id, as a mapping, or a function of the agent's id and the episode; None: an
                   agent's own module where there is one with its id, else "default_policy"
        parts      the agents by their spaces
        seen       of each part, the space that the module sees observations in
        acting     how forward passes are done: what `ModuleForward` takes beside module and weights

    modules    those that are trained, by id: adding one to the set has it act from then on
    acting     those that act, by id

    Raises ModuleError for what are no modules.
    """

    def __init__(
        self,
        given: Any,
        mapping: AgentToModule,
        parts: tuple[AgentPart, ...],
        seen: tuple[Any, ...],
        *,
        model_config: Any,
        device: Any,
        seed: int,
        acting: Mapping[str, Any],
    ) -> None:
        self._mapping = mapping
        self._parts, self._seen = parts, seen
        self._model_config, self._device, self._seed = model_config, device, seed
        self._how = dict(acting)
        self._flat = self._how.pop("flat")
        self.acting: dict[Any, Acting] = {}
        if given is None and len(parts) > 1:
            raise ModuleError(
                f"the agents have {len(parts)} different pairs of spaces, of which one module can serve one; expected "
                "module={id: module, ...}, and agent_to_module_mapping_fn where ids are not the agents'"
            )
        named = given if isinstance(given, Mapping) else {DEFAULT_MODULE_ID: given}
        self._first_ids = frozenset(named)
        self.modules = MultiRLModule({module_id: self._made(module_id, module) for module_id, module in named.items()})
        for module_id, module in self.modules.items():
            self._have_act(module_id, module)

    def add(self, module_id: Any, module: Any) -> None:
        """Have a module act from now on, for agents whose episodes begin. From any thread."""
        self.modules.check_new(module_id)
        made = self._made(module_id, module)
        self._have_act(module_id, made)  # before an agent can be mapped to it: lanes may go on meanwhile
        self.modules.add_module(module_id, made)

    def remove(self, module_id: Any) -> None:
        """Have no agent that begins served by a module: those that it serves keep it until their episodes end."""
        self.modules.remove_module(module_id)

    def module_of(self, agent: Any, episode_id: str) -> Any:
        """The id of the module that serves an agent in an episode. Raises EnvError for one that does not exist."""
        mapping = self._mapping
        if mapping is None:
            module_id = agent if agent in self.modules else DEFAULT_MODULE_ID
        elif callable(mapping):
            module_id = mapping(agent, MultiAgentEpisode(episode_id))
        elif agent in mapping:
            module_id = mapping[agent]
        else:
            raise EnvError(f"agent_to_module_mapping_fn has no agent '{agent}', expected every agent: {list(mapping)}")
        if module_id not in self.modules or module_id not in self.acting:
            there = [each for each in self.modules if each in self.acting]
            raise EnvError(
                f"agent '{agent}' is mapped to module '{module_id}', which does not exist: expected one of {there}"
            )
        return module_id

    def publish(self, weights: Mapping[Any, Weights]) -> dict[Any, int]:
        """Have the next pass of each module named use its weights; the policy versions that they get.

        Raises ModuleError for a module that does not exist, and for weights that are not its own; then none is used.
        """
        for module_id, state in weights.items():
            if module_id not in self.modules:
                raise ModuleError(
                    f"there is no module '{module_id}' to publish weights for, expected module id -> state_dict(), "
                    f"with ids among {list(self.modules)}"
                )
            self.acting[module_id].weights.check(state)
        return {module_id: self.acting[module_id].weights.publish(state) for module_id, state in weights.items()}

    def versions(self) -> dict[Any, int]:
        """Module id -> the policy version that was published last."""
        return {module_id: self.acting[module_id].weights.version for module_id in self.modules}

    def _made(self, module_id: Any, module: Any) -> Any:
        part = self._part_for(module_id, module)
        if part is None:
            return module
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for(self._seed, f"weights/{module_id}"))
            config = self._model_config if module is None else None
            return module_for(module, config, self._seen[part], self._parts[part].action_space)

    def _part_for(self, module_id: Any, module: Any) -> int | None:
        """The part whose agents a module serves, as far as that can be told before any episode."""
        if len(self._parts) == 1:
            return 0
        for place, part in enumerate(self._parts):
            if any(module_id in self._may_serve(agent) for agent in part.agents):
                return place
        if module is None or isinstance(module, type) or inspect.isfunction(module):
            raise ModuleError(
                f"module '{module_id}': which agents it serves, and so its spaces, can't be told before their episodes "
                "begin; expected an instance, or agent_to_module_mapping_fn to be a dict"
            )
        return None

    def _may_serve(self, agent: Any) -> set[Any]:
        """Modules that the mapping names for an agent in one episode or another."""
        mapping = self._mapping
        if mapping is None:
            return {agent if agent in self._first_ids else DEFAULT_MODULE_ID}
        if not callable(mapping):
            return {mapping.get(agent)}
        with contextlib.suppress(Exception):  # it is asked again, and may say so, when an agent begins
            return {mapping(agent, MultiAgentEpisode(_PROBES(0, number))) for number in range(_MOST_PROBES)}
        return set()

    def _have_act(self, module_id: Any, module: Any) -> None:
        copy = acting_copy(module, self._device)
        if isinstance(copy, RandomModule):
            copy.seed(seed_for(self._seed, f"actions/{module_id}"))
        weights = PolicyWeights(copy)
        flat = type(copy) is DefaultModule if self._flat is None else self._flat
        self.acting[module_id] = Acting(copy, weights, ModuleForward(copy, weights, flat=flat, **self._how))
