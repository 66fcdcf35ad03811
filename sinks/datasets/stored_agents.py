"""Fragments made of stored episodes of several agents."""

import copy
from typing import Any

import numpy as np

from rollflow.sinks.datasets.dataset_folder import ENV_EPISODES, ENV_EPS_ID, ENV_T, DatasetFolder, stored_ids
from rollflow.sinks.datasets.episode_block import (
    STEPS_AT_ONCE,
    EpisodeBlock,
    EpisodeRows,
    EpisodeSummary,
    Ints,
    mark_end,
    step_bytes,
    windows_of,
)
from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes, damaged, numbers_in, ranges
from rollflow.stream.data.column import Column
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.tree import map_tree
from rollflow.stream.fragments.fragment import RECORDED, ChunkIndex, FragmentLayout
from rollflow.stream.multi_agent.agent_fragment import AgentFragment, EnvClock
from rollflow.stream.multi_agent.agent_part import AgentPart
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

_STOPPED, _AGENT_STEPS, _RETURN = "env_t_stopped", "agent_steps", "return"


class ModuleEpisodes(ParquetEpisodes):
    """The A episodes of agents that one module has acted in.

    agents     ids of the agents that it has served
    agent      i64[A]    place in `agents`
    piece      i64[A]    number of the environment's episode
    last_t     i64[A]    steps of the environment's episode before the agent's last observation

    Raises DatasetError if one is of no environment's episode.
    """

    def __init__(self, module_id: Any, folder: DatasetFolder, envs: "EnvEpisodes") -> None:
        more = [Columns.AGENT_ID, _RETURN, _STOPPED, ENV_EPS_ID]
        super().__init__(folder, more=more, piece_of=lambda table: envs.pieces_of(folder, table))
        self.module_id = module_id
        head = self.order[self.first]
        texts = self.more[Columns.AGENT_ID].cast("string").dictionary_encode()
        by_text = {text: place for place, text in enumerate(stored_ids("agent", envs.agents))}
        found = [by_text.get(text, -1) for text in texts.dictionary.to_pylist()]
        if -1 in found:
            unknown = texts.dictionary[found.index(-1)]
            raise damaged(folder.path, f"it has the agent {unknown}, expected one of {envs.agents}")
        numbers, agent = np.unique(np.array(found, np.int64)[texts.indices.to_numpy()], return_inverse=True)
        self.agents = tuple(envs.agents[each] for each in numbers.tolist())
        self.agent: Ints = agent[head]
        self.piece: Ints = self.pieces[head]
        self.last_t: Ints = self.more[_STOPPED].to_numpy()[self.last]


class EnvEpisodes(ParquetEpisodes):
    """E episodes of environments, a row of numbers each, and the agents' episodes in them.

    agents                               all ids
    modules                              `ModuleEpisodes` of those that have acted
    columns                              module id -> name -> description
    observation_space, action_space      module id -> space

    The others are those of an `EpisodeStore`, in env steps. Raises DatasetError if there is no dataset, or one that
    is damaged.
    """

    def __init__(self, folder: DatasetFolder) -> None:
        # A sink describes runs and modules before it commits their files: those that are listed first are described.
        folder = DatasetFolder(folder.path, folder.numbers())
        super().__init__(folder, ENV_EPISODES, [_AGENT_STEPS])
        self.agents: list[Any] = self.description["agents"]
        keys = list(zip(self.runs.tolist(), self.ids.tolist(), strict=True))  # pieces of one episode have the same
        self._places = {key: place for place, key in enumerate(keys)}
        self._first_of: Ints = np.array([self._places[key] for key in keys], np.int64)  # a number for each run and id
        folders = [(each, folder.module(name, self.version)) for name, each in self.description["modules"].items()]
        self.modules = [ModuleEpisodes(module_id, each, self) for module_id, each in folders if each.numbers()]
        self.columns = {each.module_id: each.columns for each in self.modules}
        self.observation_space = {each.module_id: each.observation_space for each in self.modules}
        self.action_space = {each.module_id: each.action_space for each in self.modules}
        found = sum(int(each.chunk_steps.sum()) for each in self.modules)
        if (wanted := int(self.more[_AGENT_STEPS].to_numpy().sum())) != found:
            raise damaged(folder.path, f"its modules have {found} steps of agents, {ENV_EPISODES} says {wanted}")

    @property
    def step_nbytes(self) -> int:
        """Bytes of an env step in memory, with the steps of all agents in it, on average."""
        steps = [(int(each.num_steps.sum()), step_bytes(each.columns)) for each in self.modules]
        return 1 + sum(count * size for count, size in steps) // max(1, int(self.num_steps.sum()))

    def summary(self) -> EpisodeSummary:
        """Returns of all agents together, lengths in env steps, and the policy versions of all modules."""
        count = len(self.num_steps)
        returns, oldest, newest = np.zeros(count), np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
        for each in self.modules:
            np.add.at(returns, each.pieces, each.more[_RETURN].to_numpy())
            if Columns.POLICY_VERSION not in each.columns:
                continue
            for episodes in windows_of(each.num_steps, np.arange(len(each.piece)), STEPS_AT_ONCE):
                versions = each.read(episodes, [Columns.POLICY_VERSION], with_last=False).taken(Columns.POLICY_VERSION)
                pieces = np.repeat(each.piece[episodes], each.num_steps[episodes])
                np.minimum.at(oldest, pieces, versions)
                np.maximum.at(newest, pieces, versions)
        is_whole = (self.t_started == 0) & (self.terminated | self.truncated)
        return EpisodeSummary(returns, self.num_steps, self.runs, is_whole, np.minimum(oldest, newest), newest)

    def pieces_of(self, folder: DatasetFolder, table: Any) -> Ints:
        """The number of the environment's episode of each of a module's chunks, i64[P].

        If fragments are missing, an episode is there in pieces: a chunk is of the piece in which its last step ends.
        """
        stops, first_of = self.t_started + self.num_steps, self._first_of
        most = 1 + int(stops.max(initial=0))
        order = np.lexsort((stops, first_of))
        ends = first_of[order] * most + stops[order]
        texts = table.column(ENV_EPS_ID).combine_chunks().cast("string").to_pylist()
        keys = zip(numbers_in(table, "run").tolist(), texts, strict=True)
        mine = np.array([self._places.get(key, -1) for key in keys], np.int64)
        stopped = numbers_in(table, _STOPPED)
        at = np.searchsorted(ends, mine * most + np.minimum(stopped, most - 1))
        pieces: Ints = order[np.minimum(at, len(order) - 1)]
        wrong = (
            (mine < 0) | (first_of[pieces] != mine) | (stopped > stops[pieces]) | (stopped <= self.t_started[pieces])
        )
        if wrong.any():
            row = int(np.argmax(wrong))
            raise damaged(folder.path, f"its chunk {row} ends in no chunk of {ENV_EPISODES}")
        return pieces


class ModuleSteps(EpisodeBlock):
    """Steps of one module's agents in a block, J episodes of agents one behind the other.

    module                 where they are stored
    place, slot            i64[J]    environment's episode in the block, ascending, and place in `module.agents`
    seen, done             i64[R]    row of the block at which a step's observation came, and at which the next one did
    last_seen              i64[J]    row at which the last observation came
    t_started              i64[J]    steps of the agent's episode before the first
    """

    def __init__(self, module: ModuleEpisodes, places: Ints, starts: Ints) -> None:
        mine = np.flatnonzero(places[module.piece] >= 0)
        mine = mine[np.lexsort((module.agent[mine], places[module.piece[mine]]))]
        super().__init__(module, mine, 0, more=[ENV_T])
        self.module = module
        self.place, self.slot = places[module.piece[mine]], module.agent[mine]
        begin = starts[self.place]
        self.seen: Ints = self.steps.taken(ENV_T) + np.repeat(begin, self.stop - self.start)
        self.last_seen: Ints = module.last_t[mine] + begin
        self.done = np.empty_like(self.seen)
        self.done[:-1] = self.seen[1:]
        self.done[self.stop - 1] = self.last_seen
        self.t_started: Ints = module.t_started[mine]

    def until(self, first: int, last: int, row: int) -> Ints:
        """The step at which each episode in first … last - 1 stands at a row, i64[K]; behind its last: it is over."""
        start, stop = self.start[first:last], self.stop[first:last]
        begin, end = (int(start[0]), int(stop[-1])) if last > first else (0, 0)
        made = np.zeros(end - begin + 1, np.int64)
        np.cumsum(self.done[begin:end] <= row, out=made[1:])
        until: Ints = start + made[stop - begin] - made[start - begin]
        return until


class AgentsBlock(EpisodeRows):
    """Env steps of K environments' episodes, one behind the other; a row is a vector step of one environment.

    store      of the episodes
    front      those at the end of the block before, as its `rest` gave them
    modules    steps of each module's agents
    """

    def __init__(self, store: EnvEpisodes, episodes: Ints, ordinal: int, front: "AgentsBlock | None" = None) -> None:
        if front is not None:
            episodes, ordinal = np.concatenate([front.episodes, episodes]), front.ordinal
            self.row = front.row
        lengths = store.num_steps[episodes]
        self.store, self.ordinal, self.episodes = store, ordinal, episodes
        self.stop = np.cumsum(lengths)
        self.start = self.stop - lengths
        self.num_rows = int(self.stop[-1])
        places = np.full(len(store.num_steps), -1)
        places[episodes] = np.arange(len(episodes))
        self.modules = [ModuleSteps(each, places, self.start - store.t_started[episodes]) for each in store.modules]
        # One environment can't begin an episode in its midst behind another: such a one begins a fragment.
        self._heads = self.start[store.t_started[episodes] > 0]

    def rest(self, row: int, lookback: int) -> "AgentsBlock | None":
        """A block without steps, of the episodes from a row on, which are read again; None: there are none."""
        if row >= self.num_rows:
            return None
        at = int(np.searchsorted(self.stop, row, "right"))
        rest = copy.copy(self)
        rest.episodes, rest.ordinal, rest.modules = self.episodes[at:], self.ordinal + at, []
        rest.row = row - int(self.start[at])
        return rest


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
        ids = [*store.ids[episodes].tolist(), ""]  # one that begins with the last end has no step here
        ends: list[tuple[int, int, bool, bool]] = []
        custom_data: dict[tuple[int, int], dict[Any, Any]] = {}
        for nth, (stop, episode) in enumerate(zip(block.stop[first:last].tolist(), episodes.tolist(), strict=True)):
            if stop <= end:
                terminated, truncated = store.terminated[episode], store.truncated[episode]
                ends.append((stop, 0, not terminated, False))
                is_cut = not terminated and not truncated
                mark_end(custom_data, (0, nth), is_cut=is_cut, lost=store.lost.get(episode))
        clock = EnvClock(begin, np.array([started]), np.zeros(1, np.int64), lambda env, nth: str(ids[nth]), ends)
        super().__init__(
            0,
            sequence,
            [_part(each, (first, last), (begin, end), lookback, sequence, clock) for each in block.modules],
            num_rows=end - begin,
            clock=clock,
            custom_data=custom_data,
        )
        self.dataset: EnvEpisodes = store
        self.runs: Ints = store.runs[episodes]
        self._name = name

    def __repr__(self) -> str:
        return f"<fragment of {self.num_rows} env steps of {self._name}>"


def _part(
    steps: ModuleSteps,
    places: tuple[int, int],
    rows: tuple[int, int],
    lookback: int,
    sequence: int,
    env_clock: EnvClock,
) -> AgentFragment:
    """The steps of one module's agents that were made in some rows of a block.

    places       environments' episodes in the block
    env_clock    of the environment

    K episodes of agents have a step in these rows, or wait at their end, slot by slot, in a slot by time.
    """
    module, slots, (first_row, last_row) = steps.module, len(steps.module.agents), rows
    low, high = (int(each) for each in np.searchsorted(steps.place, places))
    done, until = steps.until(low, high, first_row), steps.until(low, high, last_row)
    seen = steps.seen[np.minimum(until, max(steps.num_rows - 1, 0))] if high > low else until
    pending = (until < steps.stop[low:high]) & (seen <= last_row)
    # Without a step in these rows an agent would show lookback that may not be stored.
    unseen = (until == done) & (steps.t_started[low:high] > 0) & (done - steps.start[low:high] < lookback)
    kept = np.flatnonzero(((until > done) | pending) & ~unseen)
    kept = kept[np.argsort(steps.slot[low + kept], kind="stable")]
    which = kept + low  # i64[K], as are the following ones
    slot, done, until, pending, seen = steps.slot[which], done[kept], until[kept], pending[kept], seen[kept]
    heads = np.searchsorted(slot, slot)
    number = np.arange(len(kept)) - heads
    begins_at = np.cumsum(until - done + 1) - (until - done) - 1
    start = lookback + begins_at - begins_at[heads]
    stop = start + until - done  # the row that has the observation behind the last step
    back = np.minimum(done - steps.start[which], lookback)
    before = steps.t_started[which] + done - steps.start[which]  # steps of the episode
    waits, acts = pending & (seen < last_row), pending & (seen == last_row)
    is_over = until == steps.stop[which]
    num_rows = int(stop.max(initial=lookback)) + 1
    lengths = back + until - done + pending
    source, to, at_slot = ranges(done - back, lengths), ranges(start - back, lengths), np.repeat(slot, lengths)

    def scattered(items: Any) -> Any:
        """Items of the steps that are copied, any[R, ...], where they go to: a new array any[rows, slots, ...]."""
        array = np.zeros((num_rows, slots, *items.shape[1:]), items.dtype)
        array[to, at_slot] = items
        return array

    keys = list(zip(slot.tolist(), number.tolist(), strict=True))
    ids = {key: str(module.ids[each]) for key, each in zip(keys, steps.episodes[which].tolist(), strict=True)}
    # A slot without an episode here has no id; nor is one asked for, but of the first, by which lanes are told apart.
    layout = FragmentLayout(
        slots,
        num_rows - 1 - lookback,
        lookback,
        module.action_space,
        False,
        lambda slot, number: ids.get((slot, number), ""),
    )
    trees = {name: map_tree(scattered, steps.steps.taken(name, source)) for name in module.columns}
    clock = scattered(steps.seen[source])
    closed = np.flatnonzero(~(waits | acts))
    at = stop[closed], slot[closed]
    map_tree(lambda leaf, last: leaf.__setitem__(at, last[which[closed]]), trees[Columns.OBS], steps.steps.last_obs)
    clock[at] = steps.last_seen[which[closed]]
    starts = np.full(slots, lookback)
    starts[slot[number == 0]] = (start - before)[number == 0]
    part = AgentFragment(
        layout,
        0,
        sequence,
        {name: Column(name, tree) for name, tree in trees.items()},
        starts,
        part=AgentPart(module.agents, module.observation_space, module.action_space),
        env_clock=env_clock,
        clock=clock,
        module_of=np.zeros((num_rows, slots), np.int16),
    )
    part.observation_space = module.observation_space
    has_steps = start < stop
    part.chunks = ChunkIndex(
        slot=slot[has_steps],
        number=number[has_steps],
        start=start[has_steps],
        stop=stop[has_steps],
        t_started=before[has_steps],
        lookback=back[has_steps],
        terminated=(steps.terminated[which] & is_over)[has_steps],
        truncated=(steps.truncated[which] & is_over)[has_steps],
    )
    extra = [name for name in module.columns if name not in (Columns.OBS, *RECORDED, Columns.POLICY_VERSION)]
    part.module_ids, part.outputs = (module.module_id,), {module.module_id: {name: name for name in extra}}
    if steps.steps.initial is not None:
        begins = np.flatnonzero(before == 0)
        states = map_tree(lambda leaf: leaf[which[begins]], steps.steps.initial)
        part.record_starts(start[begins], slot[begins], states)
    part.waits, part.acts = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
    part.waits[slot[waits]] = part.acts[slot[acts]] = True
    for place in np.flatnonzero(is_over).tolist():
        key, episode = keys[place], int(which[place])
        part.ends[int(stop[place]) - 1, key[0]] = int(steps.last_seen[episode])
        lost = module.lost.get(int(steps.episodes[episode]))
        mark_end(part.custom_data, key, is_cut=bool(steps.is_cut[episode]), lost=lost)
    stops = np.full(slots, lookback)
    stops[slot] = stop  # of the last in each slot
    part.seal_at(stops)
    return part
