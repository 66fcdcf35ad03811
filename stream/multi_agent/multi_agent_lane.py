"""MultiAgentLane: environments with several agents each that step together, and the fragment that they fill."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.stream.data.errors import EnvError
from rollflow.stream.fragments.fragment import EpisodeIds, FragmentLayout
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.agent_lane import AgentLane
from rollflow.stream.multi_agent.agent_part import AgentPart, Observed, VectorStep
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

Infos = Mapping[Any, Mapping[str, Any]]


class MultiAgentLane:
    """N environments that step together, with several agents each.

    index          number of this lane
    parts          the agents by their spaces
    num_envs       N
    first_env      number of the lane's first environment in the rollout
    num_rows       vector steps in a fragment (T)
    lookback       agent steps of lookback at the head of a fragment (H)
    name           prefix of episode ids, unique to this lane
    mapping        gives the module that serves an agent in an episode, `module_of(agent, episode_id)`, asked when the
                   agent begins; `is_by_agent` if it is the same in every episode that begins now
    shared_data    makes the data that the connector pieces of a module share
    is_shared      whether columns of all fragments but the first lie in shared memory

    modules         modules that serve or have served agents, by place: each with a `module_id`
    vector_steps    vector steps since the first reset
    first_step      vector steps that the run had made when this lane began
    turns           of the modules that have agents to act for, between the stages
    is_set_aside    whether the environments are gone for good
    is_restored     whether it goes on from another one: its batches are made
    """

    dead: NDArray[np.bool_] = np.zeros(0, np.bool_)  # no step only resets

    def __init__(
        self,
        index: int,
        parts: Sequence[AgentPart],
        num_envs: int,
        *,
        first_env: int = 0,
        num_rows: int,
        lookback: int,
        name: str,
        mapping: Any,
        shared_data: Callable[[Any], dict[str, Any]],
        is_shared: bool = False,
    ) -> None:
        self.index, self.num_envs, self.num_rows = index, num_envs, num_rows
        self.lookback = lookback
        self.modules: list[Any] = []
        self.vector_steps = self.first_step = 0
        self.turns: list[Any] = []
        self.actions: list[tuple[NDArray[np.int64] | None, Any]] = []
        self.custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        self.just_ended = np.zeros(0, np.int64)
        self.is_set_aside = self.is_restored = False
        self._shared_data: dict[int, dict[str, Any]] = {}
        self._first_env = first_env
        self._mapping, self._make_shared_data = mapping, shared_data
        self._part_of: dict[Any, tuple[int, Any]] = {}  # module id -> its part, and the first agent that it served
        self._place_of_agent = {
            agent: (i, place) for i, part in enumerate(parts) for place, agent in enumerate(part.agents)
        }
        self.episode_ids = EpisodeIds(name)
        self.clock = EnvClock(0, np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64), self.episode_ids)
        self.parts = [self._part(i, part, is_shared=is_shared) for i, part in enumerate(parts)]
        self.sequence = 0

    @property
    def step(self) -> int:
        """The run's vector step that the lane stands at, by which schedules go."""
        return self.first_step + self.vector_steps

    @property
    def where(self) -> str:
        """The lane and its vector step, for errors."""
        return f"lane {self.index}, vector step {self.vector_steps}"

    def reset(self, observed: Sequence[Observed], infos: Sequence[Infos]) -> None:
        """Take the first observations of every environment, part by part, and the infos by environment."""
        self._begin(observed, infos, range(self.num_envs))

    def record_step(self, step: VectorStep) -> None:
        """Take the results of one vector step."""
        parts, ended, truncated, first, infos, first_infos = step
        self.vector_steps = now = self.vector_steps + 1
        self.just_ended = ended
        for lane, part in zip(self.parts, parts, strict=True):
            self._assign(lane, lane.record_step(part, now))
        if len(infos):
            self._record_infos(infos, range(self.num_envs))
        if len(ended):
            self.clock.end(ended, now, truncated)
            self._begin(first, first_infos, ended.tolist())

    def lose(self, reason: str, *, is_under_way: bool = True) -> int:
        """End every episode: the environments were lost.

        is_under_way    whether the environments had got the newest actions

        Recorded steps stay. The episodes' chunks are truncated, with `reason` in `custom_data["lost"]`. New episodes
        begin by `reset`. Returns the number of agent steps under way.
        """
        for env in range(self.num_envs):
            key = env, self.clock.number(env, self.vector_steps)
            self.custom_data.setdefault(key, {})["lost"] = reason
        self.clock.lose(self.vector_steps, reason)
        self.just_ended = self.just_ended[:0]
        return sum(part.lose(reason, is_under_way=is_under_way) for part in self.parts)

    def shared_data_of(self, module: int) -> dict[str, Any]:
        """The data that the connector pieces of a module share."""
        made = self._shared_data.get(module)
        if made is None:
            made = self._shared_data[module] = self._make_shared_data(self.modules[module])
        return made

    # Fragments

    @property
    def is_full(self) -> bool:
        """True if the fragment has its T vector steps."""
        return self.vector_steps - self.clock.first == self.num_rows

    @property
    def layouts(self) -> list[FragmentLayout]:
        """The layouts of its fragments, part by part."""
        return [part.layout for part in self.parts]

    @property
    def at_start(self) -> bool:
        """True if the next vector step is the first of a fragment."""
        return self.vector_steps == self.clock.first

    @property
    def has_begun_again(self) -> bool:
        """True if an environment's first episode was followed by another."""
        return bool(self.clock.ends) or bool(self.clock.numbers.any())

    @property
    def num_steps(self) -> int:
        """Agent steps recorded since the first reset."""
        return sum(lane.num_steps for lane in self.parts)

    @property
    def steps_under_way(self) -> int:
        """Number of agents that have acted and have no observation since: the next vector step may end their steps."""
        return sum(int(np.count_nonzero(part.waits)) for part in self.parts)

    def cut(self) -> MultiAgentFragment:
        """Return the fragment, read-only, and begin the next one."""
        clock, self.clock = self.clock, self.clock.next(self.vector_steps)
        fragment = self._fragment([lane.cut(self.clock) for lane in self.parts], clock)
        going = set(enumerate(self.clock.numbers.tolist()))
        self.custom_data = {key: data for key, data in self.custom_data.items() if key in going}
        self.sequence += 1
        return fragment

    def leave(self) -> MultiAgentFragment:
        """Return the last fragment, and release all memory: no more steps are made."""
        last = self.cut()
        last.is_last = True
        self.release()
        return last

    def release(self) -> None:
        """Release all memory: no more steps are made. Drops the unfinished fragment, and the live episodes over it."""
        for lane in self.parts:
            lane.release()
        by_module: Sequence[Any] = self.modules, self._part_of, self._shared_data
        for each in (*by_module, self.turns):
            each.clear()

    # A lane that goes on from another one's state

    def so_far(self) -> MultiAgentFragment:
        """The fragment as it is so far: its arrays are the lane's."""
        return self._fragment([lane.so_far() for lane in self.parts], self.clock)

    def get_state(self) -> dict[str, Any]:
        """What another lane needs beside the fragment so far, to go on from this one."""
        return {
            "modules": [module.module_id for module in self.modules],
            "served": [[module_id, *served] for module_id, served in self._part_of.items()],
            "sampled": list(self._shared_data),
            "vector_steps": self.vector_steps,
            "parts": [lane.get_state() for lane in self.parts],
        }

    def go_on(self, begun: MultiAgentFragment, modules: Sequence[Any], state: Mapping[str, Any]) -> None:
        """Go on with the fragment that another lane had begun, and from what its `get_state` gave.

        modules    by place. Before the first step of this lane
        """
        self.modules[:] = modules
        self._part_of = {module_id: (part, agent) for module_id, part, agent in state["served"]}
        self.clock, self.sequence, self.vector_steps = begun.clock, begun.sequence, state["vector_steps"]
        self.custom_data = {key: dict(data) for key, data in begun.custom_data.items()}
        for lane, part, each in zip(self.parts, begun.parts, state["parts"], strict=True):
            lane.go_on(part, each)
        self.is_restored = True

    def begin_anew(self, reason: str) -> None:
        """End the open episodes of a lane that was to go on, and can't."""
        self.lose(reason, is_under_way=False)
        self.is_restored = False

    # Inside

    def _fragment(self, parts: Sequence[AgentFragment], clock: EnvClock) -> MultiAgentFragment:
        """The fragment that is filled now, of these parts."""
        num_rows, custom_data = self.vector_steps - clock.first, copy.deepcopy(self.custom_data)
        return MultiAgentFragment(
            self.index, self.sequence, parts, num_rows=num_rows, clock=clock, custom_data=custom_data
        )

    def _part(self, index: int, part: AgentPart, *, is_shared: bool) -> AgentLane:
        layout = FragmentLayout(
            num_slots=self.num_envs * len(part.agents),
            num_rows=self.num_rows,
            lookback=self.lookback,
            action_space=part.recorded_space,
            resets_next_step=False,
            episode_id=self.episode_ids.of_agents(index),
        )
        return AgentLane(self.index, layout, part, self.clock, self.modules, self._first_env, is_shared=is_shared)

    def _begin(self, observed: Sequence[Observed], infos: Sequence[Infos], envs: Sequence[int]) -> None:
        for lane, first in zip(self.parts, observed, strict=True):
            self._assign(lane, lane.begin(first, self.vector_steps))
        if len(infos):
            self._record_infos(infos, envs, are_first=True)

    def _assign(self, lane: AgentLane, slots: NDArray[np.int64]) -> None:
        """Ask the mapping for the modules of the agents that begin, and assign them."""
        if not len(slots):
            return
        envs, agents = np.divmod(slots, len(lane.part.agents))
        now = self.vector_steps + 1
        ids = {env: self.episode_ids(env, self.clock.number(env, now)) for env in np.unique(envs).tolist()}
        if self._mapping.is_by_agent:
            _, first, each = np.unique(agents, return_index=True, return_inverse=True)
            modules = np.array([self._module_for(lane, slot, ids) for slot in slots[first].tolist()])[each]
        else:
            modules = np.array([self._module_for(lane, slot, ids) for slot in slots.tolist()])
        lane.assign(slots, modules)

    def _module_for(self, lane: AgentLane, slot: int, episode_ids: Mapping[int, str]) -> int:
        """Place of the module that serves a slot from now on."""
        env, place = divmod(slot, len(lane.part.agents))
        agent, part = lane.part.agents[place], self.parts.index(lane)
        try:
            module = self._mapping.module_of(agent, episode_ids[env])
        except Exception as error:
            error.add_note(f"environment {self._first_env + env}, agent '{agent}', vector step {self.vector_steps}")
            raise
        other_part, served = self._part_of.setdefault(module.module_id, (part, agent))
        if other_part != part:
            other = self.parts[other_part].part
            raise EnvError(
                f"environment {self._first_env + env}, agent '{agent}', vector step {self.vector_steps}: module "
                f"'{module.module_id}' serves agent '{served}', with observations in "
                f"{other.observation_space} and actions in {other.action_space}, but this one's are in "
                f"{lane.part.observation_space} and {lane.part.action_space}: expected the same spaces under one module"
            )
        if module not in self.modules:
            self.modules.append(module)
        return self.modules.index(module)

    def _record_infos(self, infos: Sequence[Infos], envs: Sequence[int], *, are_first: bool = False) -> None:
        of_parts: list[dict[int, Mapping[str, Any]]] = [{} for _ in self.parts]
        for env, of_agents in zip(envs, infos, strict=True):
            for agent, info in of_agents.items():
                if info and agent in self._place_of_agent:
                    part, place = self._place_of_agent[agent]
                    of_parts[part][env * len(self.parts[part].part.agents) + place] = info
        for lane, of_slots in zip(self.parts, of_parts, strict=True):
            lane.record_infos(of_slots, are_first=are_first)
