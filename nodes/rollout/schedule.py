"""Recorded runs: what a seed does not determine, and a rollout in one thread that does the same again.

A file is a first line, `MAGIC`, and blocks of [bytes, checksum, zlib of a packed dict]; a checksum counts those before.
The first block has the settings of the run. Each of the others has, since the one before:

    events       i64[...]  lanes as they come to env_to_module, forward passes, weights that they load
    reasons      of those losses
    fragments    of each that the loop took, as `entry_of` gives it
    is_last      there if the run was ended by its program
    ended_by     the error that ended it, in words, if one did

An event is a lane's number n, when the lane comes, or ~n, when it is in a forward pass; JOINTLY + count, before the
lanes of a pass over several; LOADS + the number of a module, and two more: the version, the weights' checksum; or
LOST + a lane's number, before it comes whose worker was lost, and how often it was begun, 0 if it is not any more.
"""

import copy
import logging
import math
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from rollflow.nodes.env.lane_source import LaneSource
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.nodes.env.workers.worker_node import WorkerNode
from rollflow.nodes.stages.ring import JOINTLY, JointForward
from rollflow.nodes.stages.rounds import FragmentCredits
from rollflow.stream.data.columns import Columns
from rollflow.stream.data.errors import CheckpointError, ModuleError, RunError
from rollflow.stream.data.packing import pack, unpack
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.episodes.single_agent import SingleAgentEpisode
from rollflow.stream.fragments.fragment import Fragment
from rollflow.stream.fragments.lane import Lane

logger = logging.getLogger(__name__)
MAGIC = b"rollflow schedule 1\n"
LOST, LOADS = 1 << 29, 1 << 30
EVERY_S = 0.1  # between two blocks, at least: each costs as much as some vector steps
_BLOCK = struct.Struct("<II")  # bytes of the payload, and the checksum
_MOST = 8192  # numbers of a row of a column that count, of those that have more
_SHOWN = 5  # steps of an episode


# Checksums


def entry_of(fragment: Any) -> list[Any]:
    """What a schedule has of a fragment: lane, number, names of columns, their checksums, and those of its steps."""
    names, all_rows, begins, width = list[str](), list[NDArray[np.uint8]](), list[int](), 0
    parts = getattr(fragment, "parts", (fragment.host,))
    for part in parts:
        whose = f" of agents {list(part.part.agents)}" if parts[1:] else ""
        for name, column in part.columns.items():
            for rows in map(_bytes_of, leaves_of(column.rows(part.first_row, part.last_row))):
                if not part.is_even:  # what is behind a slot's last step has no meaning
                    is_made = np.arange(part.first_row, part.last_row)[:, None] < part.stops
                    rows = rows * is_made.repeat(rows.shape[1] // is_made.shape[1], 1)
                names.append(f"'{name}'{whose}")
                all_rows.append(rows)
                begins.append(width)
                width += max(1, -(-rows.shape[1] // 8))
    table = np.zeros((max(map(len, all_rows)), width), np.uint64)
    for begin, rows in zip(begins, all_rows, strict=True):
        table.view(np.uint8)[: len(rows), 8 * begin : 8 * begin + rows.shape[1]] = rows
    mixed = np.bitwise_xor.reduceat(table, begins, 1) * _factors(len(begins))  # u64[T, C]
    sums = (mixed * _factors(len(mixed))[:, None]).sum(0) >> 32
    steps = np.bitwise_xor.reduce(mixed, 1) >> 56
    return [fragment.lane, fragment.sequence, names, sums.astype("<u4").tobytes(), steps.astype("u1").tobytes()]


@cache
def _factors(count: int) -> NDArray[np.uint64]:
    """Odd numbers, u64[count], the same in every process."""
    return np.random.default_rng(0).integers(1 << 63, 1 << 64, count, np.uint64) | np.uint64(1)


def _bytes_of(rows: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each row of any[T, ...], u8[T, B]; of long rows some."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    if flat.shape[1] > _MOST:
        flat = flat[:, :: flat.shape[1] // _MOST + 1].copy()
    return flat.view(np.uint8)


def difference(before: list[Any], now: list[Any], fragment: Any) -> str:
    """The lane, the step and the columns in which the entry of a fragment differs from another."""
    if before[:2] != now[:2]:
        return f"fragment {before[1]} of lane {before[0]} comes next, and {fragment!r} has come"
    if before[2] != now[2]:
        return f"lane {now[0]} has the columns {', '.join(now[2])}, and had {', '.join(before[2])}"
    of_columns = zip(now[2], *(np.frombuffer(each[3], "<u4") for each in (before, now)), strict=True)
    names = ", ".join(name for name, one, other in of_columns if one != other)
    row = next((row for row, (one, other) in enumerate(zip(before[4], now[4], strict=False)) if one != other), None)
    row = min(len(before[4]), len(now[4])) if row is None else row
    step = f"step {row} of agents in its fragment {now[1]}"
    if isinstance(fragment, Fragment):
        step = f"vector step {now[1] * fragment.layout.num_rows + row}"
    return f"lane {now[0]}, {step}: {names or 'the number of steps'} differ"


def sum_of_weights(weights: Mapping[str, Any]) -> int:
    """A checksum of a `state_dict()`; of large tensors some numbers count."""
    total = 0
    for value in weights.values():
        if torch.is_tensor(value):
            numbers = value.detach().reshape(-1)
            some = numbers[:: len(numbers) // _MOST + 1].contiguous().cpu()
            total = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), total)
    return total


# Recording


class Recording:
    """Writes the schedule of a run to a file: events in the thread of the ring, the rest in that of the loop.

    path    of the file
    """

    def __init__(self, path: Any) -> None:
        self.path = Path(path)
        self.events = array("q")
        self._fragments: list[Any] = []
        self._starts: dict[int, int] = {}  # of lanes in workers
        self._reasons: list[str] = []
        self._file: BinaryIO | None = None
        self._sum = 0
        self._last = 0.0  # when a block was written

    def begin(self, settings: Mapping[str, str], first: Mapping[str, Any]) -> None:
        """Begin the file, with what a replay begins with. Raises CheckpointError if it can't be written.

        What an earlier run has written stays.
        """
        if self.path.is_file() and self.path.stat().st_size:
            raise CheckpointError(
                f"the run can't be recorded in {self.path}: there is such a file; expected another path, or replay="
            )
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"the run can't be recorded in {self.path}: {error}; expected a file") from None
        self._file.write(MAGIC)
        self._write({"settings": settings, **first})

    def take(self, modules: Mapping[Any, tuple[Any, Any]], environments: Any, prepare: Any, forward: Any) -> None:
        """Note the versions that modules load, the copies that act and what is published, and lanes at two stages."""
        for number, (_, weights) in enumerate(modules.values()):
            weights.loads = partial(self._note_load, number)
        prepare.note = forward.note = self.events.append
        if isinstance(environments, WorkerNode):
            prepare.note = partial(self._note_lane, environments.remotes)

    def _note_lane(self, remotes: Sequence[Any], index: int) -> None:
        remote = remotes[index]
        if remote.starts != self._starts.get(index, 1) or remote.phase is LanePhase.ASIDE:
            self._starts[index] = remote.starts
            self._reasons.append(remote.reason)
            self.events.extend((LOST + index, 0 if remote.phase is LanePhase.ASIDE else remote.starts))
        self.events.append(index)

    def _note_load(self, number: int, version: int, weights: Mapping[str, Any]) -> None:
        self.events.extend((LOADS + number, version, sum_of_weights(weights)))

    def see(self, fragment: Any) -> None:
        """Note a fragment that the loop has taken."""
        self._fragments.append(entry_of(fragment))

    def flush(self) -> None:
        """Write what has come, if the last block is old enough. In the thread of the loop."""
        if self._file is not None and monotonic() - self._last >= EVERY_S:
            self._last = monotonic()
            self._write_news({})

    def end(self, error: BaseException | None) -> None:
        """Write the rest, and what ended the run: an error, or its program. Once it is over."""
        if self._file is not None:
            try:
                self._write_news({"is_last": True} if error is None else {"ended_by": _told(error)})
            finally:
                self._file.close()
                self._file = None

    def explained(self, error: Exception) -> Exception:
        """The error that ended the ring, as it is."""
        return error

    def _write_news(self, last: Mapping[str, Any]) -> None:
        events, fragments = self.events[:], self._fragments
        reasons = self._reasons[:]  # those of the events, and maybe more
        del self.events[: len(events)]  # the ring may add to them meanwhile
        self._fragments = []
        del self._reasons[: len(reasons)]
        if events or fragments or last:
            self._write({"events": events.tobytes(), "reasons": reasons, "fragments": fragments, **last})

    def _write(self, block: Mapping[str, Any]) -> None:
        payload = zlib.compress(pack(block), 1)
        self._sum = zlib.crc32(payload, self._sum)
        assert self._file is not None
        self._file.write(_BLOCK.pack(len(payload), self._sum) + payload)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


# Replaying


def found(until: Any, episode: Any) -> str:
    """What a replay is to stop for in an episode; "": nothing."""
    if callable(until):
        return "until says True" if until(episode) else ""
    if until == "nan":
        columns = {Columns.OBS: episode.get_observations(), Columns.ACTIONS: episode.get_actions()}
        columns |= {name: episode.get_extra_model_outputs(name) for name in episode.extra_model_outputs}
        numbers = [
            (name, leaf) for name, tree in columns.items() for leaf in leaves_of(tree) if leaf.dtype.kind in "fc"
        ]
        numbers.append((Columns.REWARDS, episode.get_rewards()))
        return next((f"'{name}' is NaN" for name, leaf in numbers if np.isnan(leaf).any()), "")
    if isinstance(until, str):
        return "the episode has ended" if episode.is_done and episode.id_ == until else ""
    reward = episode.get_rewards().max()
    return f"a reward is {reward:g}" if reward > until else ""


def place_of(episode: Any, step: int) -> str:
    """The place of a step of an episode, in words."""
    return f"lane {episode.lane}, slot {episode.slot}, step {step} of its episode"


def stopped_at(episode: Any, text: str, at: int) -> RunError:
    """The error of a replay that stops at a step of an episode, which it shows: its last steps."""
    error = RunError(f"{place_of(episode, at)}: {text}")
    error.episode = episode
    error.add_note(f"episode {episode.id_}, {episode.t} steps so far")
    for step in range(max(0, len(episode) - _SHOWN), len(episode)):
        values = episode.get_observations(step), episode.get_actions(step), episode.get_rewards(step)
        told = list(map(_in_short, values))
        error.add_note(f"step {episode.t_started + step}: obs {told[0]}, action {told[1]}, reward {told[2]}")
    if at == episode.t:  # before it has an action
        error.add_note(f"step {episode.t}: obs {_in_short(episode.get_observations(-1))}")
    return error


def _in_short(value: Any) -> str:
    return " ".join(np.array2string(np.asarray(value), threshold=8, precision=4).split())


class ReplayedRun:
    """The schedule of a recorded run, by which a ring in one thread goes once more.

    path     of the file
    until    what to stop for: see `Watch`

    first    what `Recording.begin` was given
    group    lanes of the next pass that have not been let in, in their order
    lost     lane that comes next, if its worker was lost -> how often it was begun, and the reason

    Raises CheckpointError for anything but a whole file, of this version; one that was cut short is taken up to its
    last whole block.
    """

    def __init__(self, path: Any, until: Any = None) -> None:
        self.path = Path(path)
        self._until = until
        self.group: deque[int] = deque()
        self.parked: set[int] = set()
        self.lost: dict[int, tuple[int, str]] = {}
        self._reasons: deque[str] = deque()
        self._under_way: dict[int, Any] = {}  # lanes that were let in, and have no actions yet
        self._at = self._seen = 0  # the next event, and fragment
        self._weights: list[tuple[Any, Any]] = []
        self._events, self._fragments, self.is_whole, self._ended_by = array("q"), list[Any](), False, ""
        self.first: dict[str, Any] = {}
        for block in _blocks(self.path):
            self.first = self.first or block
            self._events.frombytes(block.get("events", b""))
            self._fragments += block.get("fragments", ())
            self._reasons += block.get("reasons", ())
            self.is_whole, self._ended_by = "is_last" in block, block.get("ended_by", "")
        if not self.first:
            raise CheckpointError(f"{self.path} has no whole block: its run was killed before it began")

    def begin(self, settings: Mapping[str, str], first: Mapping[str, Any]) -> None:
        """Begin like the run. Raises CheckpointError for other settings than it had, naming those that differ."""
        before = self.first["settings"]
        differ = [name for name in before | settings if before.get(name) != settings.get(name)]
        if differ:
            told = "; ".join(f"{name} was {before.get(name)}, and is {settings.get(name)}" for name in differ)
            raise CheckpointError(f"{self.path} is of a run with other settings: {told}; expected the same program")

    def take(self, modules: Mapping[Any, tuple[Any, Any]], *of_the_ring: Any) -> None:
        """Have versions of what is published be let in as they were loaded: of the copies that act, by id."""
        self._weights = [(module, weights) for module, (_, weights) in modules.items()]
        for _, weights in self._weights:
            weights.keep_all(each=True)

    # For the ring

    def lets_pass(self, lane: Any) -> bool:
        """True if a lane's forward pass is next. One that begins a fragment is held back until it is asked for again.

        The reader gets the fragment before, and may publish weights.
        """
        index, is_new = lane.index, lane.index not in self.parked
        self.parked.add(index)
        if is_new and lane.at_start:
            return False
        if is_new and self._until is not None and isinstance(lane, Lane):
            so_far = copy.copy(lane.fragment)
            so_far.num_rows, so_far.observation_space = lane.row - lane.layout.lookback, lane.observation_space
            self._look(so_far)
        if not self._under_way:
            self._form_group()
        if not self.group or self.group[0] != index:
            return False
        self.parked.remove(self.group.popleft())
        self._under_way[index] = lane
        return True

    def acts(self, lane: int) -> None:
        """Take note that a lane has its actions."""
        del self._under_way[lane]

    def coming(self, step_rest: Callable[[], None]) -> int | None:
        """The lane that comes next; None: a pass is next. Raises RunError at the end of the recording.

        step_rest    steps the lanes that are to be stepped: the one whose step ended the run never came
        """
        if not self._under_way:
            self._form_group()
        if self.group or self._under_way:
            return None
        if self._at == len(self._events):
            if self._ended_by:
                step_rest()
            raise self._ended()
        if self._events[self._at] >= LOST:
            lane, starts = self._events[self._at] - LOST, self._events[self._at + 1]
            self.lost[lane], self._at = (starts, self._reasons.popleft()), self._at + 2
            if not starts:
                why = f"lane {lane} was set aside: {self.lost[lane][1]}"
                raise RunError(f"{self.path} can't be replayed further: {why}").see("recorded run")
        self._at += 1
        return self._events[self._at - 1]

    def _form_group(self) -> None:
        if self.group or self._at == len(self._events):
            return
        event, count = self._events[self._at], 1
        if JOINTLY <= event < LOST:
            count, self._at = event - JOINTLY, self._at + 1
        if event < 0 or JOINTLY <= event < LOST:
            self.group.extend(~each for each in self._events[self._at : self._at + count])
            self._at += count
        while self._at < len(self._events) and self._events[self._at] >= LOADS:
            number, version, total = self._events[self._at : self._at + 3]
            self._at += 3
            self._let_in(number - LOADS, version, total)

    def _let_in(self, number: int, version: int, total: int) -> None:
        module, weights = self._weights[number]
        fresh = weights.let_in(version)
        if fresh is None or fresh[0] != version:
            raise self._departed(f"version {version} of the weights was acted with, and {weights.version} is published")
        if sum_of_weights(fresh[1]) != total:
            whose = f" of module {module!r}" if self._weights[1:] else ""
            raise self._departed(
                f"the weights{whose} that were published as version {version} differ, though all fragments before are "
                "the same; expected a program that draws from seeded generators, and computes the same in every run"
            )

    def see(self, fragment: Any) -> None:
        """Compare a fragment that the loop has taken. Raises RunError, which names the first departure."""
        if self._seen < len(self._fragments):
            before, now = self._fragments[self._seen], entry_of(fragment)
            self._seen += 1
            if before != now:
                raise self._departed(difference(before, now, fragment))
        elif not self._ended_by:  # else the error came before the loop took it
            raise self._ended()
        for part in getattr(fragment, "parts", (fragment,)) if self._until is not None else ():
            self._look(part)

    def _look(self, fragment: Fragment) -> None:
        """Raise RunError, which shows the episode, if the replay is to stop here."""
        for episode in fragment.episodes():
            step = episode.t - 1
            try:
                text = found(self._until, episode)
            except Exception as error:
                error.add_note(f"in until, {place_of(episode, step)}")
                raise
            if text:
                raise stopped_at(episode, text, step)

    def flush(self) -> None:
        """Do nothing: a replay writes nothing."""

    def explained(self, error: Exception) -> Exception:
        """The error that ended the ring, or one that shows the episode, if it is for a NaN for which it is to stop."""
        if self._until != "nan" or not isinstance(error, ModuleError) or not error.nan_slots:
            return error
        for lane in self._under_way.values():
            if isinstance(lane, Lane) and lane.where in error.__notes__:
                live = lane.live(error.nan_slots[0])
                episode = SingleAgentEpisode.from_state(live.get_state())
                episode.lane, episode.slot = live.lane, live.slot
                return stopped_at(episode, str(error), episode.t)
        return error

    def end(self, error: BaseException | None) -> None:
        """Log a warning if it was to stop at the end of an episode that has not ended."""
        has_stopped = isinstance(error, RunError) and error.episode is not None
        if isinstance(self._until, str) and self._until != "nan" and not has_stopped:
            logger.warning("the replay of %s has ended, and no episode '%s' has ended in it", self.path, self._until)

    def _departed(self, text: str) -> RunError:
        return RunError(f"the run departs from the one that {self.path} has: {text}").see("recorded run")

    def _ended(self) -> RunError:
        why = "its program left it" if self.is_whole else "it was killed, or its file was cut short"
        why = f"its run was ended by {self._ended_by}" if self._ended_by else why
        fragments = len(self._fragments)
        return RunError(f"{self.path} ends here, behind {fragments} fragments: {why}").see("recorded run")


def _blocks(path: Path) -> Iterator[dict[str, Any]]:
    """The blocks of a file, up to the last whole one. Raises CheckpointError for anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"there is no recorded run at {path}: {error}") from None
    if not data.startswith(MAGIC):
        raise CheckpointError(f"{path} is no recorded run: it begins with {data[:20]!r}, expected {MAGIC!r}")
    at, total = len(MAGIC), 0
    while at + _BLOCK.size <= len(data):
        size, expected = _BLOCK.unpack_from(data, at)
        payload = data[at + _BLOCK.size : at + _BLOCK.size + size]
        if len(payload) < size:
            return
        total = zlib.crc32(payload, total)
        if total != expected:
            raise CheckpointError(f"{path} was altered: the checksum of a block from byte {at} on is another")
        yield unpack(zlib.decompress(payload))
        at += _BLOCK.size + size


class ReplayedEnvironments(LaneSource):
    """A node that steps each lane's environments in the loop's thread, when the schedule says that it comes back."""

    patience = 0.0

    def __init__(self, env: Any, *, replay: ReplayedRun, **options: Any) -> None:
        self._replay, self._env = replay, env
        self._waiting: dict[int, Any] = {}
        self._fresh: set[int] = set()  # those to be reset
        super().__init__(env, **options)

    @property
    def in_flight(self) -> int:
        """Lanes that are to be stepped, and those that stand at the gate."""
        return len(self._waiting) + len(self._replay.parked)

    def fileno(self) -> int:
        """None: nothing is waited for."""
        return -1

    def start(self) -> Iterator[Any]:
        """Have every lane reset when it comes."""
        self._waiting = {lane.index: lane for lane in self.begin_lanes()}
        self._fresh = set(self._waiting)
        return iter(())

    def hand_over(self, lane: Any) -> None:
        """Have a lane be stepped when it comes."""
        self._replay.acts(lane.index)
        self._waiting[lane.index] = lane

    def completed(self) -> Iterator[Any]:
        """The lane that comes next; none: a forward pass is next."""
        index = self._replay.coming(self._step_rest)
        if index is None:
            return
        lane = self._waiting.pop(index)
        if (lost := self._replay.lost.pop(index, None)) is not None:
            self._begin_again(lane, *lost)
        else:
            self._step(lane)
        self._fresh.discard(index)
        yield lane

    def _step(self, lane: Any) -> None:
        if lane.index in self._fresh:
            self.reset_lane(lane)
        else:
            super().hand_over(lane)

    def _step_rest(self) -> None:
        for lane in self._waiting.values():
            self._step(lane)

    def _begin_again(self, lane: Any, starts: int, reason: str) -> None:
        """Have a lane's environments be made and begun once more, as a worker did that took the place of another."""
        index = lane.index
        if index not in self._fresh:
            self.lost_steps += lane.lose(reason)
        maker = self.kind.makers(self._env, self.num_envs, self.num_lanes, self._autoreset_mode)[index]
        made = replace(maker, first_slot=self.first_slots()[index]).lane_env(self.deviations, f"lane {index}, ")
        self._opened.append((f"the environments of lane {index}", made))
        self._here = [*self._here[:index], made, *self._here[index + 1 :]]
        lane.reset(*made.reset(self.seeds_of_lane(index, starts - 1)))


class ReplayedCredits(FragmentCredits):
    """Credits that let lanes pass in the order of a schedule."""

    def __init__(self, *of_credits: Any, replay: ReplayedRun, by_lane: bool) -> None:
        super().__init__(*of_credits, by_lane=by_lane)
        self._replay = replay

    def admits(self, lane: Any) -> bool:
        return self._replay.lets_pass(lane)

    def shut(self) -> Any:
        raise RunError("a replay can't be saved; expected save() in the run that it replays")


class ReplayedForward(JointForward[Any]):
    """Forward passes over the lanes that a schedule has in each."""

    def __init__(self, forward: Any, replay: ReplayedRun) -> None:
        super().__init__(forward, max_batch=1)
        self._replay = replay

    def _due(self) -> list[Any]:
        return [] if self._replay.group else list(self._ready)
