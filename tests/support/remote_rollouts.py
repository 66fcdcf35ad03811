"""Rollouts over remote environments for tests, and the laws that hold whatever becomes of the hosts."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from ending_envs import lives_of, rewards_by_slot
from fragment_equality import in_time
from held_envs import Held, await_that, let_go
from lane_clock import LaneClock
from numbered_module import NumberedEnv, NumberedModule
from remote_hosts import BrokenWire, RawHost, hosting, listening

from rollflow import Fragment, RemoteEnvs, RemoteRollouts, Rollout
from rollflow.nodes import RolloutHost
from rollflow.nodes.env.workers.lane_status import LanePhase
from rollflow.stream.data.errors import WireError
from rollflow.stream.wire import Fragment as Answer, Limits, Reset, Turn, Welcome

Taken = TypeVar("Taken")
HASTY = Limits(heartbeat_s=0.3, grace_s=0.5, handshake_s=2.0)


def makers(*slots: int, **options: Any) -> list[Any]:
    return [partial(NumberedEnv, slot, **options) for slot in slots]


def told(*slots: int, **options: Any) -> list[Any]:
    """Return environments' arguments in plain form, for a host in another process."""
    return [((slot,), options) for slot in slots]


def rollout_over(envs: RemoteEnvs | RemoteRollouts, **options: Any) -> Rollout:
    return Rollout(envs, **{"module": NumberedModule(), "fragment_length": 8, "seed": 0, **options})


def slots_of(fragments: list[Fragment]) -> set[int]:
    return set(rewards_by_slot(fragments))


def taken_until(fragments: Iterator[Taken], enough: Callable[[list[Taken]], bool]) -> list[Taken]:
    taken: list[Taken] = []
    while not enough(taken):
        taken.append(next(fragments))
    return taken


def reset_of(raw: RawHost, fragments: Iterator[Fragment], taken: list[Fragment]) -> Reset:
    """A new host's first request. A rollout whose fragments nobody takes does not look who has come."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(raw.next_of, Reset)
        while not asked.done():
            taken.append(next(fragments))
        reset: Reset = asked.result()
    return reset


def check_laws(fragments: list[Fragment], lost: dict[str, int], slots_lost: int) -> None:
    """Steps of a life are there from the first on, without gap or repeat; chunks join; no more is lost than is told."""
    by_slot: dict[int, list[Any]] = {}
    for fragment in in_time(fragments):
        for chunk in fragment.episodes():
            by_slot.setdefault(int(chunk.get_observations(0)[0]), []).append(chunk)
    for steps in rewards_by_slot(fragments).values():
        lives_of(steps)
    for chunks in by_slot.values():
        for before, after in pairwise(chunks):
            assert (before.id_ == after.id_) == (not before.is_done)
            if before.id_ == after.id_:
                assert after.t_started == before.t_started + len(before)
        for chunk in chunks:
            observations = chunk.get_observations(slice(0, None))
            assert observations[:, 2].tolist() == list(range(chunk.t_started, chunk.t_started + len(chunk) + 1))
            np.testing.assert_array_equal(chunk.get_extra_model_outputs("seen"), observations[:-1])
    assert set(lost) <= {"workers", "closed"}
    assert lost.get("workers", 0) <= slots_lost


# Whole rollouts


def rollouts_on(address: Any, envs: Any, **options: Any) -> Any:
    """A host of whole rollouts in a thread, until it is left."""
    return hosting(address, envs, kind=RolloutHost, **{"module": NumberedModule(), **options})


@contextmanager
def hosted(envs: Any, *, on: Mapping[str, Any] = {}, **options: Any) -> Iterator[tuple[Rollout, RolloutHost]]:
    """A rollout with these options, and its host, with these environments and options `on`."""
    remote = listening(RemoteRollouts)
    with rollouts_on(remote.addresses[0], envs, **on) as host, rollout_over(remote, **options) as rollout:
        yield rollout, host


@contextmanager
def wired(
    envs: Any, drawn: Callable[[], int | None] = lambda: None, *, on: Mapping[str, Any] = {}, **options: Any
) -> Iterator[tuple[Rollout, RolloutHost, BrokenWire]]:
    """As `hosted`, through a wire that is cut after so many bytes, or by `cut_off`."""
    remote = listening(RemoteRollouts)
    with (
        closing(BrokenWire(remote.addresses[0], drawn)) as wire,
        rollouts_on(wire.address, envs, **on) as host,
        rollout_over(remote, **options) as rollout,
    ):
        yield rollout, host, wire


def cut_off(wire: BrokenWire, rollout: Rollout) -> None:
    """Have a rollout lose the connections to its hosts, until the wire is up again."""
    wire.go_down()
    hosts = rollout.environments.gateway.hosts  # type: ignore[attr-defined]
    await_that(lambda: all(each.lost_at is not None for each in hosts.values()))


def await_late(rollout: Rollout, clock: LaneClock, step_timeout: float = 0.3) -> None:
    """Have lane 0 be late, whose host has said how far it is and makes nothing more."""
    environments = rollout.environments
    [remote, *_] = environments.remotes
    clock.go_on(rollout, step_timeout + 0.1)
    # It had made something since it was last looked at.
    await_that(lambda: clock.has_looked(rollout, 0))
    clock.go_on(rollout, step_timeout + 0.1)
    await_that(lambda: remote.phase is LanePhase.LATE)


def check_counts(fragments: list[Fragment], rollout: Rollout) -> None:
    """Every transition that is told of was handed over, or is lost with a cause that is told."""
    handed = sum(fragment.num_steps for fragment in fragments)
    assert rollout.num_steps == handed + rollout.lost.get("closed", 0) + rollout.lost.get("max_lag", 0)


class RawRollouts(RawHost):
    """A host of whole rollouts made by hand: a lane gives fragments, which may be changed before they are sent.

    lane    as a real host has it
    """

    def __init__(self, address: Any, *, module: Any = None, connectors: Any = None, **said: Any) -> None:
        super().__init__(address, kind=RolloutHost, **said)
        self._host = RolloutHost(makers(900, 901), module=module or NumberedModule(), **connectors or {})
        [self.lane] = self._host._lanes

    def next_turn(self) -> Turn:
        """Wait for the next turn; what comes before it is for the lane."""
        while not isinstance(event := self.next_event(), Turn):
            assert not isinstance(event, WireError | None), event
            if isinstance(event, Welcome):
                self._host._welcomed(event)
            else:
                self._host._take_news(event)
        return event

    def next_turn_beside(self, fragments: Iterator[Fragment], taken: list[Fragment]) -> Turn:
        """Return the next turn while another thread takes fragments, so that the rollout goes on."""
        turns: list[Any] = []

        def wait() -> None:
            try:
                turns.append(self.next_turn())
            except BaseException as error:
                turns.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not turns:
            taken.append(next(fragments))
        waiting.join()
        assert isinstance(turns[0], Turn), turns
        return turns[0]

    def made(self, turn: Turn) -> Answer:
        """Return the lane's answer to a turn."""
        answer = self.lane.answer(turn, self.lane.session)
        assert isinstance(answer, Answer)
        return answer

    def answer(self, turn: Turn) -> None:
        """Answer a turn as it should be."""
        self.connection.answer(turn, self.made(turn))
        self.flush()

    def close(self) -> None:
        """Be gone without a word."""
        self._host.close()
        self.sock.close()


@contextmanager
def raw_host_of(
    folder: Path, *, module: Callable[[], Any] = NumberedModule, **options: Any
) -> Iterator[tuple[Rollout, RawRollouts]]:
    """A rollout that nobody reads, and a host of it made by hand, beside one that stands still in its first step."""
    envs = listening(RemoteRollouts)
    with rollouts_on(envs.addresses[0], [partial(Held, 0, folder, steps=[0])], module=module()):
        given: dict[str, Any] = {"module": module(), "fragment_length": 8, "seed": 0, "prefetch": 1, **options}
        try:
            with Rollout(envs, **given) as rollout, closing(RawRollouts(envs.addresses[0], module=module())) as raw:
                yield rollout, raw
        finally:
            let_go(folder, 0)
