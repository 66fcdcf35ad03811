"""Fragments made of stored episodes of several agents."""

from typing import Any

import numpy as np

from rollflow.sinks.datasets.agents_block import AgentsBlock, FragmentSteps, ModuleSteps
from rollflow.sinks.datasets.env_episodes import EnvEpisodes
from rollflow.sinks.datasets.stored_steps import Ints
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import RECORDED, ChunkIndex, FragmentLayout, Start
from rollflow.stream.multi_agent.agent_fragment import AgentFragment
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import EnvClock, MultiAgentFragment


class StoredAgents(MultiAgentFragment):
    """Fragment of stored env steps: one environment, whose episodes stand one behind the other.

    block       in which the rows lie
    begin, end  rows of the env steps
    lookback    steps of an agent before the first that its episode may show
    sequence    number of the fragment
    name        of the dataset, for errors

    dataset     that the steps are from
    runs        i64[M]    number of the run there of each environment's chunk

    Each module's agents are a part. What an agent has received since its last observation stands in its next step.
    """

    def __init__(self, block: AgentsBlock, begin: int, end: int, *, lookback: int, sequence: int, name: str) -> None:
        first, last = int(np.searchsorted(block.stop, begin, "right")), int(np.searchsorted(block.start, end))
        store, episodes = block.store, block.episodes[first:last]
        started = int(block.start[first] - store.t_started[episodes[0]])
        clock = EnvClock(begin, np.array([started]), np.zeros(1, np.int64))
        custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        environment = np.zeros(1, np.int64)
        for nth, (stop, episode) in enumerate(zip(block.stop[first:last].tolist(), episodes.tolist(), strict=True)):
            if stop <= end:
                terminated, truncated = store.index.terminated[episode], store.index.truncated[episode]
                clock.end(environment, stop, ~np.array([terminated]))
                if not terminated and not truncated:
                    custom_data[0, nth] = {"cut": True}
                if (reason := store.lost.get(episode)) is not None:
                    custom_data[0, nth] = {"lost": reason}
        ids = [*store.ids[episodes].tolist(), ""]  # one that begins with the last end has no step here
        super().__init__(
            0,
            sequence,
            [_part(each, (first, last), (begin, end), lookback, sequence, ids) for each in block.modules],
            num_envs=1,
            num_rows=end - begin,
            clock=clock,
            episode_id=lambda env, number: str(ids[number]),
            custom_data=custom_data,
        )
        self.dataset: EnvEpisodes = store
        self.runs: Ints = store.runs[episodes]
        self._name = name

    def __repr__(self) -> str:
        return f"<fragment of {self.num_rows} env steps of {self._name}>"


def _part(
    steps: ModuleSteps, places: tuple[int, int], rows: tuple[int, int], lookback: int, sequence: int, env_ids: list[str]
) -> AgentFragment:
    """The steps of one module's agents that were made in some rows of a block.

    places     environments' episodes in the block
    env_ids    their ids
    """
    made, module = FragmentSteps(steps, *places, *rows, lookback), steps.module
    slots, store, which = len(module.agents), module.store, made.which
    ids = {
        key: str(store.ids[each])
        for key, each in zip(
            zip(made.slot.tolist(), made.number.tolist(), strict=True), steps.episodes[which].tolist(), strict=True
        )
    }
    # A slot without an episode here has no id; nor is one asked for, but of the first, by which lanes are told apart.
    layout = FragmentLayout(
        slots,
        made.rows - 1 - lookback,
        lookback,
        store.action_space,
        False,
        lambda slot, number: ids.get((slot, number), ""),
    )
    trees = {name: map_tree(lambda leaf: made.scattered(leaf, slots), tree) for name, tree in steps.columns.items()}
    clock = made.scattered(steps.seen, slots)
    closed = np.flatnonzero(~(made.waits | made.acts))
    at = made.stop[closed], made.slot[closed]
    map_tree(lambda leaf, last: leaf.__setitem__(at, last[which[closed]]), trees[Columns.OBS], steps.last_obs)
    clock[at] = steps.last_seen[which[closed]]
    starts, heads = np.full(slots, lookback), made.number == 0
    starts[made.slot[heads]] = (made.start - made.before)[heads]
    part = AgentFragment(
        layout,
        0,
        sequence,
        {name: Column(name, tree) for name, tree in trees.items()},
        part=AgentPart(module.agents, store.observation_space, store.action_space),
        clock=clock,
        module_of=np.zeros((made.rows, slots), np.int16),
        episode_start=starts,
        episode_number=np.zeros(slots, np.int64),
    )
    part.observation_space = store.observation_space
    has_steps = np.flatnonzero(made.start < made.stop)
    kept, over = which[has_steps], made.is_over[has_steps]
    part.chunks = ChunkIndex(
        slot=made.slot[has_steps],
        number=made.number[has_steps],
        start=made.start[has_steps],
        stop=made.stop[has_steps],
        t_started=made.before[has_steps],
        lookback=made.back[has_steps],
        terminated=steps.terminated[kept] & over,
        truncated=steps.truncated[kept] & over,
    )
    extra = [name for name in store.columns if name not in (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)]
    part.module_ids, part.outputs = (module.module_id,), {module.module_id: {name: name for name in extra}}
    if steps.initial is not None:
        states, known = map_tree(lambda leaf: leaf[which], steps.initial)
        begins = np.flatnonzero((made.before == 0) & known)
        states = map_tree(lambda leaf: leaf[begins], states)
        part.starts = [Start(made.start[begins], made.slot[begins], states)]
    keys = list(ids)
    part.parents = {
        key: env_ids[place - places[0]] for key, place in zip(keys, steps.place[which].tolist(), strict=True)
    }
    part.waits, part.acts = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
    part.waits[made.slot[made.waits]] = part.acts[made.slot[made.acts]] = True
    for place in np.flatnonzero(made.is_over).tolist():
        key, episode = keys[place], int(which[place])
        part.ends[int(made.stop[place]) - 1, key[0]] = int(steps.last_seen[episode])
        if steps.is_cut[episode]:
            part.custom_data[key] = {"cut": True}
        if (reason := store.lost.get(int(steps.episodes[episode]))) is not None:
            part.custom_data[key] = {"lost": reason}
    stops = np.full(slots, lookback)
    stops[made.slot] = made.stop  # of the last in each slot
    part.restore_stops(stops)
    return part
