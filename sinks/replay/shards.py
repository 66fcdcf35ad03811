"""Replay shards: several replay hosts that a client samples from as from one.

A batch is split among the hosts by chance, in proportion to their mass: the steps that each has, or the sum of their
priorities. A host draws its rows by itself. With N steps on all hosts, N_i on host i, which is drawn from with
probability q, and its own probability p for a step, the importance weight of the step is

    (N · q · p)**-beta = (N_i · p)**-beta · (N · q / N_i)**-beta

The host gives the first factor, and the second one is the same for all of its rows. So the weights are right even
where a host has changed since q was made of what it said. Of several agents, all of this holds for each module.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollflow.sinks.replay.host_link import HostLink
from rollflow.sinks.replay.rate import ReplayReport, StepCounts
from rollflow.sinks.replay.sample_server import POSITION_BITS
from rollflow.sinks.replay.sampled_steps import IDS, WEIGHTS
from rollflow.stream import wire
from rollflow.stream.data.errors import ReplayError
from rollflow.stream.data.tree import Tree, map_tree
from rollflow.stream.net.request_link import LinkLostError

logger = logging.getLogger(__name__)

_TURN_S = 0.2  # for which a host holds a sample back, before it is told again what the others have counted
_FRESH_S = 0.05  # for which a report is taken as it was; a sample renews those of the hosts that it comes from
_THREADS = 4  # for each host: calls of so many threads go side by side
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of a batch that one host has drawn; `factor` times their weights are importance weights over all hosts."""

    columns: Mapping[str, Tree]
    factor: float


class ReplayShards:
    """Several hosts, asked side by side.

    hosts      at least two, with the same arguments for their replays
    timeout    seconds that an answer is waited for
    """

    def __init__(self, hosts: Sequence[HostLink], timeout: float) -> None:
        self._hosts, self._timeout = hosts, timeout
        self._threads = ThreadPoolExecutor(_THREADS * len(hosts), "rollflow replay shards")
        self._generator = np.random.default_rng()
        self._away: set[HostLink] = set()
        self._has_begun = self._is_closed = False

    def sample(self, count: int | None, wait_s: float) -> dict[Any, Any]:
        """The columns of a batch; of several agents module id -> columns, of the modules that the rate lets be sampled.

        Raises ReplayError where no batch has all of its rows within `wait_s` seconds.
        """
        until, answered = monotonic() + wait_s, monotonic() + self._timeout
        pause = 0.0  # seconds that each of several modules is waited for: in the first round none
        while True:
            modules, batches, problem = self._module_ids(answered), {}, ""
            for each in modules:
                patience = wait_s if each is None else pause
                batch, held = self._batch_of(each, count, patience, until, answered)
                problem = problem or held
                if batch is not None:
                    batches[each] = batch
            if batches:
                return batches.get(None, batches)
            if monotonic() >= until:
                raise ReplayError(problem or f"no batch has come within {wait_s:g} s").see("replay")
            pause = 0.0 if None in modules else _TURN_S

    def _batch_of(
        self, module_id: Any, count: int | None, patience: float, until: float, answered: float
    ) -> tuple[dict[str, Tree] | None, str]:
        """The columns of a batch of a module, or None where no row has come in so many seconds; and why that was.

        Raises ReplayError where some rows have come by the time `until`, and not all.
        """
        parts: list[_Part] = []
        left, waits_until = count, monotonic() + patience
        while left is None or left > 0:
            hosts = self._reported(module_id, answered, _FRESH_S)
            if module_id not in self._module_ids(answered):  # the first steps have come, and are of several agents
                return None, ""
            left = int(hosts[0].known[module_id]["batch_size"]) if left is None else left
            turn_s = max(0.0, min(_TURN_S, (until if parts else waits_until) - monotonic()))
            got, problem = self._drawn(module_id, hosts, left, turn_s, answered)
            parts += got
            left -= sum(len(each.columns[IDS]) for each in got)
            if left and not parts and monotonic() >= waits_until:
                return None, problem
            if left and monotonic() >= until:
                raise ReplayError(problem or f"{left} rows of the batch have not come in time").see("replay")
        return _joined(parts), ""

    def _check_module(self, module_id: Any, until: float) -> None:
        """Raise ReplayError for a module that has no steps on any host."""
        if module_id not in self._module_ids(until) and module_id not in (known := self._module_ids(until, anew=True)):
            names = "one agent's alone are there" if known == [None] else f"expected one of {known}"
            raise ReplayError(f"there are no steps of module {module_id!r}, {names}").see("replay")

    def _module_ids(self, until: float, *, anew: bool = False) -> list[Any]:
        """The modules that have steps on any host; of one agent, or as long as nobody knows, None alone."""
        if anew or all(each.module_ids is None for each in self._hosts):
            self._asked_all(self._there(until), lambda host: host.report(until=until))
        ids = dict.fromkeys(each for host in self._hosts for each in host.module_ids or ())
        return list(ids) or [None]

    def update_priorities(self, ids: NDArray[np.int64], values: NDArray[Any], module_id: Any) -> None:
        """Set the priorities of steps of a module, each at the host that has given its id."""
        if ids.shape != values.shape or ids.ndim != 1:
            raise ReplayError(
                f"update_priorities: ids are {list(ids.shape)} and values {list(values.shape)}, expected one value for "
                "each row of a batch"
            ).see("replay")
        until = monotonic() + self._timeout

        def update(host: HostLink) -> None:
            is_its = ids >> POSITION_BITS == host.known[module_id]["first_id"] >> POSITION_BITS
            if is_its.any():
                arrays = {"ids": ids[is_its], "values": values[is_its]}
                host.asked("update_priorities", {"module_id": module_id}, arrays, until=until)
                host.known_at[module_id] = 0.0  # its mass is another one now

        there = self._there(until)
        self._check_module(module_id, until)
        self._asked_all([each for each in there if module_id in each.known], update)

    def publish(self, values: Mapping[str, Any], tensors: Mapping[str, Any]) -> int:
        """Send weights to all hosts that are there; the largest of their policy versions."""
        until = monotonic() + self._timeout
        answers = self._asked_all(
            self._there(until), lambda host: host.asked("publish", values, tensors, until=until).values["version"]
        )
        if not answers:
            raise ReplayError(self._nobody()).see("replay")
        return int(max(answers.values()))

    def report(self, module_id: Any) -> ReplayReport:
        """The counts of all hosts, of those that are away as they last were; waits are of those that are there.

        module_id    of several agents: the module; None: all together
        """
        until = monotonic() + self._timeout
        if module_id is not None:
            self._check_module(module_id, until)
        modules = self._module_ids(until) if module_id is None else [module_id]
        there = [self._reported(each, until) for each in modules][-1]
        counts, known = [self._counts(each) for each in modules], [host.known[modules[-1]] for host in there]
        beyond = sum(max(0, each.inserted - known[0]["min_size"]) for each in counts)
        sampled = sum(each.sampled for each in counts)
        return ReplayReport(
            inserted=sum(each.inserted for each in counts),
            removed=sum(each.removed for each in counts),
            sampled=sampled,
            ratio=sampled / beyond if beyond > 0 else 0.0,
            wanted=known[0]["wanted"],
            waiting=next((each["waiting"] for each in known if each["waiting"] is not None), None),
            insert_wait_s=sum(each["insert_wait_s"] for each in known),
            sample_wait_s=sum(each["sample_wait_s"] for each in known),
        )

    def close(self) -> None:
        """Say goodbye to the hosts, and end the threads; calls under way raise ReplayError."""
        self._is_closed = True
        for each in self._hosts:
            each.close()
        self._threads.shutdown()

    # Inside

    def _reported(self, module_id: Any, until: float, fresh_s: float = 0.0) -> list[HostLink]:
        """The hosts that are there, with reports of the last `fresh_s` seconds. Raises ReplayError where none is."""

        def report(host: HostLink) -> None:
            if module_id not in host.known or monotonic() - host.known_at[module_id] >= fresh_s:
                host.report(self._counts(module_id, but=host), until, module_id)

        there = list(self._asked_all(self._there(until), report))
        if not there:
            raise ReplayError(self._nobody()).see("replay")
        return there

    def _drawn(
        self, module_id: Any, hosts: Sequence[HostLink], count: int, wait_s: float, until: float
    ) -> tuple[list[_Part], str]:
        """Parts of a module's batch with at most `count` rows, and why the others have not come."""
        masses = np.array([each.known[module_id]["mass"] for each in hosts])
        shares = masses / masses.sum() if masses.sum() > 0 else np.full(len(hosts), 1 / len(hosts))
        counts = dict(zip(hosts, self._generator.multinomial(count, shares).tolist(), strict=True))

        def draw(host: HostLink) -> wire.Result:
            elsewhere = asdict(self._counts(module_id, but=host))
            values = {"count": counts[host], "wait_s": wait_s, "elsewhere": elsewhere, "module_id": module_id}
            answer = host.asked("sample", values, until=until)
            host.known_at[module_id] = 0.0  # where the rate has held it back
            return answer

        answers = self._asked_all([each for each in hosts if counts[each]], draw)
        num_held = sum(each.known[module_id]["held"] for each in hosts)
        parts, problem = [], ""
        for host, share in zip(hosts, shares.tolist(), strict=True):
            answer = answers.get(host)
            if answer is not None and answer.problem is not None:
                problem = f"{answer.problem}, at {host.address}"
            elif answer is not None:
                facts = answer.values
                host.note(facts, module_id)
                beside = (num_held * share / facts["held"]) ** -facts["beta"]
                parts.append(_Part(answer.columns, facts["scale"] * beside))
        return parts, problem

    def _asked_all(self, hosts: Sequence[HostLink], ask: Callable[[HostLink], T]) -> dict[HostLink, T]:
        """The hosts' answers, asked side by side; of hosts that are lost, none."""

        def answer(host: HostLink) -> tuple[T] | None:
            try:
                return (ask(host),)
            except LinkLostError as error:
                self._note_away(host, error)
                return None

        answers = zip(hosts, self._threads.map(answer, hosts), strict=True)
        return {host: each[0] for host, each in answers if each is not None}

    def _there(self, until: float) -> list[HostLink]:
        """The hosts with a connection: at first all of them, later on at least one."""
        if not self._has_begun:
            for host in self._hosts:
                host.wait_connected(until)
            self._has_begun = True
        while not (there := [each for each in self._hosts if each.is_connected]):
            if self._is_closed:
                raise ReplayError("this client is closed")
            left = until - monotonic()
            if left <= 0:
                raise ReplayError(self._nobody()).see("replay")
            self._hosts[0].connected_within(min(_TURN_S, left))
        for host in self._hosts:
            if host not in there:
                self._note_away(host, host.lost())
        for host in self._away.intersection(there):
            self._away.discard(host)
            logger.warning("the replay host at %s is there again", host.address)
        return there

    def _note_away(self, host: HostLink, error: LinkLostError) -> None:
        if host not in self._away:
            self._away.add(host)
            logger.warning("%s; samples come from the other hosts until it is there again", error)

    def _counts(self, module_id: Any, but: HostLink | None = None) -> StepCounts:
        """The counts of a module on all hosts but one, as they were told last."""
        known = [each.known[module_id] for each in self._hosts if each is not but and module_id in each.known]
        return StepCounts(*(sum(int(each[field.name]) for each in known) for field in fields(StepCounts)))

    def _nobody(self) -> str:
        return f"no replay host is there: {', '.join(str(each.address) for each in self._hosts)}"


def _joined(parts: Sequence[_Part]) -> dict[str, Tree]:
    """The columns of a whole batch, with weights over the largest in it."""
    names = parts[0].columns.keys()
    joined = {
        name: map_tree(lambda *leaves: np.concatenate(leaves), *(each.columns[name] for each in parts))
        for name in names
    }
    if WEIGHTS in joined:
        weights = np.concatenate([each.columns[WEIGHTS] * each.factor for each in parts])
        joined[WEIGHTS] = (weights / weights.max()).astype(np.float32)
    return joined
