"""A rollout with up to a thousand hosts: what a fragment costs as they become more.

The hosts are simulated, see `simulated_hosts`: those of whole rollouts answer every turn with a fragment that was made
before, those of environments every step with rows. In one line all answer; in the other ten do, beside those that only
keep their connection. The time is the processor's, of the rollout's own process, with its graph and a reader that drops
what it gets. The last line has one host with many lanes: what one connection for all hosts of a machine could save.

    python -m benchmarks.many_rollout_hosts [--quick]
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.command import run
from benchmarks.envs import NoopEnv
from benchmarks.feeder import description_of
from benchmarks.pairs import Record, Sizes, in_turns, record
from benchmarks.policies import Noop, Zeros
from benchmarks.simulated_hosts import SimulatedPeer, allowed, beside_fewest, per_second_of_processor, simulated
from rollflow import RemoteEnvs, RemoteRollouts, Rollout, Timeouts
from rollflow.nodes.offloaded.fragment_message import message_of
from rollflow.stream import wire
from rollflow.stream.data.space import describe_space

HOSTS, ACTIVE = (10, 100, 1000), 10
_GATHERED = 64  # lanes of one host
_SLOTS, _ROWS, _WIDTH = 8, 32, 9  # a fragment of 17 kB
_ENV = NoopEnv(_SLOTS, _WIDTH)


def measure(sizes: Sizes, hosts: Sequence[int] = HOSTS) -> list[Record]:
    """Lines for each kind of hosts and each number of them, all and ten of them at work."""
    hosts, seconds = allowed(hosts), max(1.0, sizes.seconds)
    kinds: tuple[tuple[str, Any, Any, tuple[int, ...]], ...] = (
        ("whole rollouts", RemoteRollouts, fragment_host, (max(hosts), ACTIVE)),
        ("environments", RemoteEnvs, env_host, (ACTIVE,)),
    )
    lines = []
    for kind, remote, maker, working in kinds:
        for most in working:
            lines += beside_fewest(
                hosts,
                lambda number, kind=kind, most=most: (
                    f"fragments of {number} hosts of {kind}, {min(most, number)} at work (per CPU s)"
                ),
                lambda number, remote=remote, maker=maker, most=most: fragments_given(
                    remote, maker, number, min(most, number), seconds
                ),
            )
    return [*lines, _gathered(sizes.rounds, seconds)]


def _gathered(rounds: int, seconds: float) -> Record:
    """Line of one host with many lanes, beside as many hosts with one lane each."""

    def rate(hosts: int, lanes: int) -> float:
        return fragments_given(RemoteRollouts, lambda active: fragment_host(active, lanes), hosts, hosts, seconds)

    pairs = in_turns(lambda: rate(1, _GATHERED), lambda: rate(_GATHERED, 1), rounds)
    name = f"fragments of one host with {_GATHERED} lanes (per CPU s)"
    return record(name, _GATHERED, pairs, aim=None, where="remote", beside_name=f"{_GATHERED} hosts")


def _introduction(role: str, slots: tuple[int, ...], number: int) -> wire.Hello:
    spaces = {"observation_space": _ENV.single_observation_space, "action_space": _ENV.single_action_space}
    told: dict[str, Any] = {name: describe_space(space) for name, space in spaces.items()}
    told |= {"autoreset": "NEXT_STEP", "metadata": {}}
    return description_of(os.urandom(wire.SESSION_BYTES), told, role=role, name=f"host {number}", slots=slots)


@dataclass
class FragmentHost:
    """A host of whole rollouts, which answers every turn, or none.

    number      among all
    columns     of the fragment that it answers with
    rest        other fields of it
    answers     whether it does
    lanes       how many it has
    """

    number: int
    columns: Any
    rest: dict[str, Any]
    answers: bool
    lanes: int
    _starts: Counter[int] = field(default_factory=Counter)

    def hello(self) -> wire.Hello:
        """Its introduction."""
        return _introduction("rollout", (_SLOTS,) * self.lanes, self.number)

    def take(self, message: wire.Message) -> Iterable[wire.Message]:
        """The fragment that a turn asks for."""
        if not isinstance(message, wire.Turn) or not self.answers:
            return
        made = self._starts[message.lane]
        self._starts[message.lane] += 1
        steps = {"sequence": made, "steps": (made + 1) * _SLOTS * _ROWS}
        yield wire.Fragment(message.lane, message.number, self.columns, self.rest | steps)


@dataclass
class EnvHost:
    """A host of one lane of environments, which answers every step, or the reset alone.

    number     among all
    answers    whether it answers steps
    """

    number: int
    answers: bool

    def hello(self) -> wire.Hello:
        """Its introduction."""
        return _introduction("env", (1,), self.number)

    def take(self, message: wire.Message) -> Iterable[wire.Message]:
        """Rows, where they are asked for."""
        rows = np.zeros((1, _WIDTH), np.float32)
        if isinstance(message, wire.Reset):
            yield wire.Rows(message.lane, message.number, rows, None, None, None, (), None, {}, {})
        elif isinstance(message, wire.Step) and self.answers:
            ended = np.zeros(1, np.bool_)
            yield wire.Rows(message.lane, message.number, rows, np.zeros(1), ended, ended, (), None, {}, {})


def fragment_host(active: int, lanes: int = 1) -> Callable[[int], SimulatedPeer]:
    """Maker of hosts of whole rollouts with so many lanes each; so many of the hosts answer."""
    with Rollout(_ENV, module=Noop(_SLOTS), fragment_length=_ROWS, num_fragments=2, seed=0) as rollout:
        fragment = list(rollout.fragments())[1]
    more = {"start": 0, "seed": 0, "lost_steps": 0, "nodes": []}
    spaces = [rollout.environments.observation_space, *rollout.env_to_module.observation_spaces]
    made = message_of(1, fragment, spaces, more)
    return lambda number: FragmentHost(number, made.columns, dict(made.rest), number < active, lanes)


def env_host(active: int) -> Callable[[int], SimulatedPeer]:
    """Maker of hosts of environments, so many of which answer."""
    return lambda number: EnvHost(number, number < active)


def fragments_given(kind: Any, maker: Any, hosts: int, active: int, seconds: float) -> float:
    """Fragments that a rollout over such hosts gives in a second of its processor's time.

    kind    `RemoteRollouts` or `RemoteEnvs`
    """
    remote = kind.listen("tcp://127.0.0.1:0", hosts=hosts)
    options: dict[str, Any] = {"timeouts": Timeouts(step=None, reset=None), "prefetch": 1, "seed": 0}
    with (
        simulated(remote.addresses[0], hosts, maker(active)),
        Rollout(remote, module=Zeros(), fragment_length=_ROWS, **options) as rollout,
    ):
        return per_second_of_processor(iter(rollout.fragments()), 4 * active, seconds)


if __name__ == "__main__":
    run(measure)
