"""Blocks of environments' episodes in memory, with the steps of their agents by module."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.datasets.dataset_folder import ENV_T
from rollflow.sinks.datasets.env_episodes import EnvEpisodes, ModuleEpisodes
from rollflow.sinks.datasets.episode_index import ranges
from rollflow.sinks.datasets.stored_steps import Ints
from rollflow.stream.data.columns import Columns


class ModuleSteps:
    """Steps of one module's agents in a block, J episodes of agents one behind the other.

    module                 where they are stored
    place, slot            i64[J]    environment's episode in the block, ascending, and place in `module.agents`
    offset, length         i64[J]    first step, and how many
    columns                name -> tree of arrays any[n, ...]
    last_obs               tree of arrays any[J, ...]
    initial                states before the first steps: see `StoredSteps`
    seen, done             i64[n]    row of the block at which a step's observation came, and at which the next one did
    last_seen              i64[J]    row at which the last observation came
    t_started              i64[J]    steps of the agent's episode before the first
    terminated, truncated  bool[J]   agents that were cut count as truncated
    is_cut                 bool[J]
    """

    def __init__(self, module: ModuleEpisodes, places: Ints, starts: Ints) -> None:
        store, index = module.store, module.store.index
        mine = np.flatnonzero(places[module.piece] >= 0)
        mine = mine[np.lexsort((module.agent[mine], places[module.piece[mine]]))]
        self.module, self.episodes = module, mine
        self.place, self.slot = places[module.piece[mine]], module.agent[mine]
        self.length: Ints = index.num_steps[mine]
        stop = np.cumsum(self.length)
        self.offset: Ints = stop - self.length
        self.num_steps = int(self.length.sum())
        read = store.read(mine, [*store.columns, ENV_T], with_last=True)
        self.columns = {name: read.taken(name) for name in store.columns}
        env_t, self.last_obs, self.initial = read.taken(ENV_T), read.last_obs, read.initial
        begin = starts[self.place]
        self.seen: Ints = env_t + np.repeat(begin, self.length)
        self.last_seen: Ints = module.last_t[mine] + begin
        self.done = np.empty_like(self.seen)
        self.done[:-1] = self.seen[1:]
        self.done[stop - 1] = self.last_seen
        self.t_started: Ints = index.t_started[mine]
        self.terminated: NDArray[np.bool_] = index.terminated[mine]
        self.is_cut: NDArray[np.bool_] = ~(self.terminated | index.truncated[mine])
        self.truncated: NDArray[np.bool_] = index.truncated[mine] | self.is_cut
        self.columns[Columns.TRUNCATEDS][stop[self.is_cut] - 1] = True

    def until(self, first: int, last: int, row: int) -> Ints:
        """The step at which each episode in first … last - 1 stands at a row, i64[K]; behind its last: it is over."""
        offset, stop = self.offset[first:last], self.offset[first:last] + self.length[first:last]
        begin, end = (int(offset[0]), int(stop[-1])) if last > first else (0, 0)
        made = np.zeros(end - begin + 1, np.int64)
        np.cumsum(self.done[begin:end] <= row, out=made[1:])
        until: Ints = offset + made[stop - begin] - made[offset - begin]
        return until


class AgentsBlock:
    """Env steps of K environments' episodes, one behind the other; a row is a vector step of one environment.

    store, episodes    i64[K]
    ordinal            number of the first episode in the order of its pass
    start, stop        i64[K]    rows of each episode
    modules            steps of each module's agents
    """

    def __init__(self, store: EnvEpisodes, episodes: Ints, ordinal: int, rest: "AgentsRest | None" = None) -> None:
        if rest is not None:
            episodes, ordinal = np.concatenate([rest.episodes, episodes]), rest.ordinal
        lengths = store.num_steps[episodes]
        self.store, self.ordinal = store, ordinal
        self.episodes: Ints = episodes
        self.stop: Ints = np.cumsum(lengths)
        self.start: Ints = self.stop - lengths
        self.num_rows = int(self.stop[-1])
        places = np.full(len(store.num_steps), -1)
        places[episodes] = np.arange(len(episodes))
        self.modules = [ModuleSteps(each, places, self.start - store.t_started[episodes]) for each in store.modules]
        # One environment can't begin an episode in its midst behind another: such a one begins a fragment.
        self._heads: Ints = self.start[store.t_started[episodes] > 0]

    def ends(self, row: int, size: int, *, whole: bool) -> list[int]:
        """As of `EpisodeBlock`; an episode whose beginning is missing ends a fragment as well."""
        heads = [*self._heads[self._heads > row].tolist(), self.num_rows + size]
        found, head = [], 0
        while (end := min(row + size, heads[head])) <= self.num_rows:
            if end < heads[head] and whole:
                end = min(int(self.stop[np.searchsorted(self.stop, end)]), heads[head])
            found.append(end)
            head += end == heads[head]
            row = end
        return found

    def place_of(self, row: int) -> tuple[int, int]:
        """The episode that a row is of, as a number in the order of the pass, and the step in it."""
        at = int(np.searchsorted(self.stop, row, "right"))
        return self.ordinal + at, 0 if at == len(self.stop) else row - int(self.start[at])

    def rest(self, row: int, lookback: int) -> "AgentsRest | None":
        """What is there from a row on; None: nothing."""
        return AgentsRest(self, row) if row < self.num_rows else None


class AgentsRest:
    """Episodes at the end of a block, which the next one reads again.

    num_rows    of these episodes
    row         of the first env step that no fragment has
    episodes    i64[K]
    """

    def __init__(self, block: AgentsBlock, row: int) -> None:
        at = int(np.searchsorted(block.stop, row, "right"))
        begin = int(block.start[at])
        self.num_rows, self.row = block.num_rows - begin, row - begin
        self.episodes: Ints = block.episodes[at:]
        self.ordinal: int = block.ordinal + at


class FragmentSteps:
    """The steps of a module's agents that were made within some rows of a block, and where a fragment has them.

        steps       of the module
        first, last the environments' episodes that the rows are of, as places in the block
        begin, end  rows
        lookback    steps before an agent's first that are there as well

    K episodes of agents have a step in these rows, or wait at their end, slot by slot, in a slot by time:

        which           i64[K]    episode, as in `steps`
        start, stop     i64[K]    rows of the fragment; row `stop` has the observation behind the last step
        back            i64[K]    rows of lookback
        before          i64[K]    steps of the episode before `start`
        number          i64[K]    of the episode in its slot
        slot            i64[K]
        waits, acts     bool[K]   whether the observation behind the last step has an action, or gets one now
        is_over         bool[K]   whether the episode ends in these rows
        rows            number of rows, with the lookback and the row behind the last step
        source, to, at  i64[R]    steps that are copied, and the row and slot that each goes to
    """

    def __init__(self, steps: ModuleSteps, first: int, last: int, begin: int, end: int, lookback: int) -> None:
        low, high = (int(each) for each in np.searchsorted(steps.place, [first, last]))
        offset, stop = steps.offset[low:high], steps.offset[low:high] + steps.length[low:high]
        done, until = steps.until(low, high, begin), steps.until(low, high, end)
        seen = steps.seen[np.minimum(until, max(steps.num_steps - 1, 0))] if high > low else until
        pending = (until < stop) & (seen <= end)
        # Without a step in these rows an agent would show lookback that may not be stored.
        unseen = (until == done) & (steps.t_started[low:high] > 0) & (done - offset < lookback)
        kept = np.flatnonzero(((until > done) | pending) & ~unseen)
        kept = kept[np.argsort(steps.slot[low + kept], kind="stable")]
        self.which: Ints = kept + low
        self.slot: Ints = steps.slot[self.which]
        done, until, pending, seen = done[kept], until[kept], pending[kept], seen[kept]
        count = until - done
        heads = np.searchsorted(self.slot, self.slot)
        rows = np.cumsum(count + 1) - count - 1
        self.number: Ints = np.arange(len(kept)) - heads
        self.start: Ints = lookback + rows - rows[heads]
        self.stop: Ints = self.start + count
        self.back: Ints = np.minimum(done - offset[kept], lookback)
        self.before: Ints = steps.t_started[self.which] + done - offset[kept]
        self.waits, self.acts = pending & (seen < end), pending & (seen == end)
        self.is_over = until == stop[kept]
        self.rows = int(self.stop.max(initial=lookback)) + 1
        lengths = self.back + count + pending
        self.source: Ints = ranges(done - self.back, lengths)
        self.to: Ints = ranges(self.start - self.back, lengths)
        self.at: Ints = np.repeat(self.slot, lengths)

    def scattered(self, items: Any, slots: int) -> Any:
        """The steps' items, any[n, ...], where the fragment has them: a new array any[rows, slots, ...]."""
        array = np.zeros((self.rows, slots, *items.shape[1:]), items.dtype)
        array[self.to, self.at] = items[self.source]
        return array
