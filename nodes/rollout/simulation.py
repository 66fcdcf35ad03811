"""Simulation of a rollout's ring under virtual time: steps per second of a setting, by what its parts take.

Lanes are processes that go round as they do in a run: they step in a thread, in a worker process, or with their whole
rollout in one, and come by the ring's thread. Whoever works needs a core and the interpreter lock of his process; who
waits needs neither. A lock or core is passed on after `_SLICE_S`, as interpreters and kernels do, or
later in long work. Work takes longer the more of the other cores are at work when it begins.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count, cycle, repeat
from typing import Any

import numpy as np

from rollflow.nodes.rollout.step_costs import Machine, StepCosts

_SLICE_S = 5e-3  # for which a thread keeps the interpreter lock that others wait for
_SLICES = 8  # that one piece of work is cut into at most: more of them would change little
_STEPS = 512  # of lanes that a round has about: longer fragments are cut short, with all that is done for each
_LENGTH = 4  # of fragments that are cut short, and less only where a round had more than so many times its steps
_ROUNDS = 3  # that are measured at most, behind those that fill what runs ahead
_STEADY = 0.01  # by which two rounds' steps per second may differ: more of them would say the same
_DRAWS = 512  # times of a lane's steps, used again and again

Process = Generator[Any, None, None]  # yields seconds that pass, or a Pool of which it takes one


class Pool:
    """Units that processes take, in the order in which they ask for them.

    free    units that nobody has
    """

    def __init__(self, clock: "VirtualClock", free: int) -> None:
        self.free, self._clock = free, clock
        self.waiting: deque[Process] = deque()

    def give(self) -> None:
        """Give a unit back, or a new one, to who has waited longest."""
        if self.waiting:
            self._clock.go_on(self.waiting.popleft())
        else:
            self.free += 1


class VirtualClock:
    """Runs processes in virtual time, which jumps to whatever comes next.

    now    seconds since the beginning
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[Process] = deque()
        self._due: list[tuple[float, int, Process]] = []
        self._numbers = count()  # those that are due at the same time go on in their order

    def go_on(self, process: Process) -> None:
        """Have a process begin, or go on, at this time."""
        self._ready.append(process)

    def run(self, is_done: Callable[[], bool]) -> None:
        """Run until `is_done`, which is asked between two times, or until every process waits for another."""
        while not is_done():
            while self._ready:
                self._advance(self._ready.popleft())
            if not self._due:
                return
            self.now, _, process = heappop(self._due)
            self._advance(process)

    def _advance(self, process: Process) -> None:
        for wanted in process:  # goes on where it stood
            if not isinstance(wanted, Pool):
                heappush(self._due, (self.now + wanted, next(self._numbers), process))
                return
            if not wanted.free:
                wanted.waiting.append(process)
                return
            wanted.free -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers and places that a run may have; see `Rollout`.

    where          "inline", "threads", "processes" or "rollouts"
    workers        worker processes; where there are none it says nothing
    hosts          machines like this one, each with so many workers of whole rollouts; 0: all is here
    link_bytes_s   bytes per second that come from all of them together
    """

    where: str
    slots: int
    lanes: int = 1
    workers: int = 1
    prefetch: int = 0
    fragment_length: int = 128
    max_batch: int | None = None
    hosts: int = 0
    link_bytes_s: float = 125e6  # of a link of 1 Gbit/s

    @property
    def has_workers(self) -> bool:
        """True if it has worker processes, here or on hosts."""
        return self.where in ("processes", "rollouts")


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a simulated run gave.

    steps_per_s    float: transitions
    bottleneck     the stage that the others wait for, by its name in reports, or "link"
    busy           stage -> share of the time, 0 to 1, in which it is at work, or waits for a core
    lag            float: policy versions that a batch is old when it is handed out, where each batch makes one
    """

    steps_per_s: float
    bottleneck: str
    busy: dict[str, float]
    lag: float


@dataclass(slots=True, eq=False)
class _Lane:
    """A lane, where it is in its fragment, and what it waits for."""

    slots: int
    asked: Pool
    env_s: Iterator[float]
    row: int = 0
    version: int = 0  # of its fragment's first step
    is_prepared: bool = False
    may_begin: bool = False


def simulate(costs: StepCosts, setting: Setting, machine: Machine, *, steps: int = _STEPS, seed: int = 0) -> Simulated:
    """Run a setting in virtual time, by costs that were measured.

    steps    of lanes, in each round about, and one of each lane at the least
    """
    return _Ring(costs, setting, machine, steps, seed).run()


class _Ring:
    """The processes of one run: lanes, the ring's thread, and the reader."""

    def __init__(self, costs: StepCosts, setting: Setting, machine: Machine, steps: int, seed: int) -> None:
        self._costs, self._setting, self._machine = costs, setting, machine
        self._parts = costs.parts
        self._seconds = cache(lambda stage, rows: self._parts[stage](rows))
        self._slow_down = cache(machine.slow_down)
        self._clock = clock = VirtualClock()
        lanes = setting.lanes
        self._length = min(setting.fragment_length, max(1, min(_LENGTH, _LENGTH * steps // lanes), steps // lanes))
        self._scale = self._length / setting.fragment_length  # of what is done for each fragment
        self._main_lock, self._thread = Pool(clock, 1), Pool(clock, 1)
        self._cores = [Pool(clock, machine.cores) for _ in range(max(1, setting.hosts) + bool(setting.hosts))]
        self._here = self._cores[-1]
        self._link = Pool(clock, 1)
        self._arrived, self._queue = Pool(clock, 0), deque[_Lane]()
        self._fragments, self._versions, self._parked = Pool(clock, 0), deque[int](), deque[_Lane]()
        self._credits = lanes * (1 + setting.prefetch)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._env_s = self._turn_s = 0.0
        self._updates, self._rows, self._lag = 0, 0, 0.0
        rng = np.random.default_rng(seed)
        sizes = [setting.slots // lanes + (index < setting.slots % lanes) for index in range(lanes)]
        draws = {size: costs.draws(size, _DRAWS, rng) for size in set(sizes)}
        self._lanes = [_Lane(size, Pool(clock, 0), _from(draws[size], rng)) for size in sizes]

    def run(self) -> Simulated:
        """Run until enough rounds are over, or two of them were about as fast."""
        setting, clock = self._setting, self._clock
        (self._start_turns if setting.where == "rollouts" else self._start_steps)()
        clock.go_on(self._reader())
        clock.run(lambda: self._updates >= setting.prefetch)
        before = self._round()
        began, rows, lag, updates, self._env_s, self._turn_s = clock.now, self._rows, self._lag, self._updates, 0.0, 0.0
        self._busy.clear()
        for _ in range(_ROUNDS):
            rate = self._round()
            if abs(rate - before) <= _STEADY * rate:
                break
            before = rate
        elapsed = max(clock.now - began, 1e-12)
        busy = self._shares(elapsed)
        lag = (self._lag - lag) / max(1, self._updates - updates)
        return Simulated((self._rows - rows) / elapsed, max(busy, key=busy.__getitem__), busy, lag)

    def _round(self) -> float:
        """Run until the reader has had one more round; the steps per second meanwhile."""
        began, rows, updates = self._clock.now, self._rows, self._updates
        self._clock.run(lambda: self._updates > updates)
        return (self._rows - rows) / max(self._clock.now - began, 1e-12)

    def _shares(self, elapsed: float) -> dict[str, float]:
        """Stage -> share of the time in which it is at work: lanes' parts of all of them in the mean."""
        setting = self._setting
        if setting.where == "rollouts":  # each lane has its own stages, one after the other
            turns = {stage: seconds for stage, seconds in self._busy.items() if stage in self._parts}
            total = max(sum(turns.values()) + self._env_s, 1e-12)
            shares = {stage: seconds / total for stage, seconds in (turns | {"env": self._env_s}).items()}
            at_work = min(1.0, self._turn_s / elapsed / setting.lanes)  # turns that began before count as a whole
            shares = {stage: share * at_work for stage, share in shares.items()}
            rest = {stage: seconds / elapsed for stage, seconds in self._busy.items() if stage not in turns}
            return shares | rest
        env = self._env_s / elapsed / (1 if setting.where == "inline" else setting.lanes)
        return {"env": env} | {stage: seconds / elapsed for stage, seconds in self._busy.items()}

    # Processes

    def _work(self, lock: Pool, cores: Pool, seconds: float, releases: float = 0.0) -> Process:
        """Work for so many seconds, a share of them without the interpreter lock."""
        seconds *= 1.0 if lock is self._main_lock else self._machine.in_worker
        locked = seconds * (1 - releases)
        slice_s = max(_SLICE_S, locked / _SLICES)
        while locked > 0:
            part = min(locked, slice_s)
            for wanted in lock, cores:
                if wanted.free:  # as the clock would do it, which takes longer
                    wanted.free -= 1
                else:
                    yield wanted
            yield part * self._slow_down(self._machine.cores - 1 - cores.free)
            cores.give()
            lock.give()
            locked -= part
        if releases and seconds:
            yield cores
            yield seconds * releases * self._slow_down(self._machine.cores - 1 - cores.free)
            cores.give()

    def _env_step(self, lane: _Lane, lock: Pool, cores: Pool) -> Process:
        began, costs = self._clock.now, self._costs
        seconds = next(lane.env_s)
        yield from self._work(lock, cores, seconds * (1 - costs.waits), costs.env_releases)
        if costs.waits:
            yield seconds * costs.waits
        self._env_s += self._clock.now - began

    def _stage(self, stage: str, rows: int, lock: Pool, cores: Pool) -> Process:
        began = self._clock.now
        seconds, releases = self._seconds(stage, rows), 0.0
        if stage == "module":  # what a pass takes beyond that of one row is in kernels, which let the interpreter go
            releases = max(0.0, 1 - self._seconds(stage, 1) / max(seconds, 1e-12))
        yield from self._work(lock, cores, seconds, releases)
        self._busy[stage] += self._clock.now - began

    def _start_steps(self) -> None:
        where, clock = self._setting.where, self._clock
        workers = min(self._setting.workers, len(self._lanes))
        locks = [Pool(clock, 1) for _ in range(workers)] if where == "processes" else [self._main_lock]
        for index, lane in enumerate(self._lanes):
            lane.is_prepared = True  # by the reset
            if where != "inline":
                clock.go_on(self._lane_thread(lane, locks[index * len(locks) // len(self._lanes)]))
            self._arrive(lane)
        clock.go_on(self._ring_thread())

    def _lane_thread(self, lane: _Lane, lock: Pool) -> Process:
        """Steps a lane's environments whenever it is asked to."""
        while True:
            yield lane.asked
            yield self._machine.wake
            yield from self._env_step(lane, lock, self._here)
            yield from self._work(lock, self._here, self._machine.hand_over / 2)
            self._arrive(lane)

    def _arrive(self, lane: _Lane) -> None:
        self._queue.append(lane)
        self._arrived.give()

    def _ring_thread(self) -> Process:
        """Takes the lanes that have come back, one at a time or all that fit into a pass, and hands them over again."""
        setting, lock, here = self._setting, self._main_lock, self._here
        while True:
            yield self._arrived
            yield self._thread
            self._arrived.give()
            lanes: list[_Lane] = []
            while self._arrived.free and self._fits(lanes):
                self._arrived.free -= 1
                lane = self._queue.popleft()
                if not lane.is_prepared:
                    yield from self._prepare(lane)
                if self._is_admitted(lane):
                    lanes.append(lane)
            rows = sum(lane.slots for lane in lanes)
            for stage in ("module", "module_to_env") if lanes else ():
                if stage in self._parts:
                    yield from self._stage(stage, rows, lock, here)
            for lane in lanes:
                lane.is_prepared = False
                if setting.where == "inline":
                    self._arrive(lane)
                else:
                    yield from self._work(lock, here, self._machine.hand_over)
                    lane.asked.give()
            self._thread.give()

    def _fits(self, lanes: Sequence[_Lane]) -> bool:
        """True if one more lane goes into the pass."""
        most = self._setting.max_batch
        return not lanes or (most is not None and sum(lane.slots for lane in lanes) + lanes[0].slots <= most)

    def _prepare(self, lane: _Lane) -> Process:
        """What comes before the forward pass: inline also the environments' step; at its end a fragment may be full."""
        if self._setting.where == "inline":
            yield from self._env_step(lane, self._main_lock, self._here)
        if "env_to_module" in self._parts:
            yield from self._stage("env_to_module", lane.slots, self._main_lock, self._here)
        lane.is_prepared = True
        lane.row += 1
        self._rows += lane.slots
        if lane.row >= self._length:
            self._emit(lane)

    def _emit(self, lane: _Lane) -> None:
        lane.row, lane.may_begin = 0, False
        self._versions.append(lane.version)
        self._fragments.give()

    def _is_admitted(self, lane: _Lane) -> bool:
        """True if the lane may go on; else it is parked until the reader gives credits back."""
        if lane.row == 0 and not lane.may_begin:
            if not self._credits:
                self._parked.append(lane)
                return False
            self._credits -= 1
            lane.may_begin, lane.version = True, self._updates
        return True

    def _start_turns(self) -> None:
        hosts = max(1, self._setting.hosts)
        locks = [Pool(self._clock, 1) for _ in range(min(self._setting.workers * hosts, len(self._lanes)))]
        for index, lane in enumerate(self._lanes):
            place = index * len(locks) // len(self._lanes)
            self._clock.go_on(self._turns(lane, locks[place], self._cores[place * hosts // len(locks)]))
            self._ask(lane)

    def _ask(self, lane: _Lane) -> None:
        if self._is_admitted(lane):
            lane.asked.give()

    def _turns(self, lane: _Lane, lock: Pool, cores: Pool) -> Process:
        """A lane's whole rollout, fragment by fragment."""
        setting, machine = self._setting, self._machine
        while True:
            yield lane.asked
            began = self._clock.now
            for _ in repeat(None, self._length):
                yield from self._env_step(lane, lock, cores)
                for stage in self._parts:
                    yield from self._stage(stage, lane.slots, lock, cores)
                self._rows += lane.slots
            self._turn_s += self._clock.now - began
            if setting.hosts:
                yield self._link
                yield (seconds := self._costs.step_bytes * lane.slots * self._length / setting.link_bytes_s)
                self._link.give()
                self._busy["link"] += seconds
            yield from self._work(self._main_lock, self._here, machine.fragment * self._scale)
            lane.row = 0
            self._emit(lane)
            self._ask(lane)

    def _reader(self) -> Process:
        """Takes a round of fragments, works on them, and gives their credits back."""
        lanes, rows = len(self._lanes), self._setting.slots * self._setting.fragment_length
        seconds = self._costs.update(rows) * self._scale
        is_ring = self._setting.where != "rollouts"
        goes_on = self._arrive if is_ring else self._ask
        taking_s = self._machine.fragment * lanes * self._scale if is_ring and self._setting.prefetch else 0.0
        while True:
            for _ in range(lanes):
                yield self._fragments
            yield from self._work(self._main_lock, self._here, taking_s)
            self._lag += sum(self._updates - self._versions.popleft() for _ in range(lanes)) / lanes
            began = self._clock.now
            if not self._setting.prefetch:
                yield self._thread  # the ring stands still meanwhile
            yield from self._work(self._main_lock, self._here, seconds, self._costs.update_releases)
            if not self._setting.prefetch:
                self._thread.give()
            self._busy["caller"] += self._clock.now - began
            self._updates += 1
            self._credits += lanes
            for _ in range(len(self._parked)):
                goes_on(self._parked.popleft())


def _from(draws: Any, rng: np.random.Generator) -> Iterator[float]:
    """The draws again and again, from some one on."""
    return cycle(np.roll(draws, -rng.integers(len(draws))).tolist())
