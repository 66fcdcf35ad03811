"""Through shared memory a trainer gets what it would get otherwise, where the rollout has it, as long as it likes."""

import gc
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import drawn_agents
import numpy as np
import pytest
from feeding_rollouts import SHORT, FeedProcess, feeding, graph_of, graph_over, in_lanes_order, running, sequences_of
from hypothesis import Phase, given, settings
from memory_lending import file_of, files_mapped, shared_address
from numpy.typing import NDArray
from property_examples import examples

from rollflow import Fragment, RemoteEnvs, Rollout, TrainerStream
from rollflow.nodes import EnvHost
from rollflow.sinks import TrainerSink
from rollflow.stream import WireError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.graph.channel import Inlet
from rollflow.stream.multi_agent.agent_fragment import AgentFragment
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

WHERE = ["inline", "threads", "processes", "rollouts"]
# Where the environments are, and how many agents each has; 0: one, which is not told by its name.
PLACES = pytest.mark.parametrize(("where", "agents"), [*((each, 0) for each in WHERE), ("inline", 2), ("processes", 2)])


@pytest.fixture
def address() -> Iterator[str]:
    with shared_address() as address:
        yield address


def trainer(address: str, **options: Any) -> TrainerStream:
    return TrainerStream(address, **{"limits": SHORT, "join_timeout": 60.0, **options})


def placed(where: str) -> dict[str, Any]:
    return {"where": where, "lanes": 2} | ({} if where in ("inline", "threads") else {"workers": 2})


def parts_of(fragment: Any) -> Sequence[Fragment]:
    """The fragments that it is made of: one, or one of each part of the agents."""
    return fragment.parts if isinstance(fragment, MultiAgentFragment) else [fragment]


def arrays_of(fragment: Any) -> list[NDArray[Any]]:
    parts = parts_of(fragment)
    columns = [leaf for part in parts for column in part.columns.values() for leaf in leaves_of(column.tree)]
    more = [array for part in parts if isinstance(part, AgentFragment) for array in (part.clock, part.module_of)]
    return [array for array in [*columns, *more] if array.nbytes]


class Keep:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.fragments: list[Fragment | MultiAgentFragment] = []

    async def run(self, fragments: Inlet[Fragment | MultiAgentFragment]) -> None:
        async for fragment in fragments:
            self.fragments.append(fragment)


@settings(max_examples=examples(8), phases=[Phase.explicit, Phase.generate])
@given(drawn=drawn_agents.drawn_settings)
def test_fragments_of_several_agents_are_those_of_the_rollout(drawn: drawn_agents.Drawn) -> None:
    here = drawn_agents.fragments_of(drawn)
    with shared_address() as address, trainer(address, yields="fragments", prefetch=8) as stream:
        _, rollout = drawn_agents.made(drawn, env=drawn_agents.makers_of(drawn), num_fragments=3)
        with running(*graph_over(rollout, stream.address)):
            there = list(stream)
        assert all(file_of(leaf) is not None for fragment in there for leaf in arrays_of(fragment))
    drawn_agents.assert_alike(in_lanes_order(there), here)


@pytest.mark.slow
@PLACES
def test_arrays_lie_where_the_rollout_has_them(where: str, agents: int, address: str) -> None:
    with trainer(address, yields="fragments") as stream:
        graph, rollout, sink = graph_of(address, range(4), agents=agents, num_fragments=3, **placed(where))
        keep = Keep()
        graph.add(keep=keep)
        graph.connect("rollout.fragments", "keep")
        with running(graph, rollout, sink):
            there = in_lanes_order(list(stream))
    kept = [part for fragment in in_lanes_order(keep.fragments) for part in parts_of(fragment)]
    for mine, theirs in zip(kept, [part for fragment in there for part in parts_of(fragment)], strict=True):
        for name, column in mine.columns.items():
            pairs = zip(leaves_of(column.tree), leaves_of(theirs.columns[name].tree), strict=True)
            # What no worker writes; of several agents all.
            is_copied = mine.sequence == 0 and (where == "processes" or agents > 0)
            for leaf, other in pairs:
                if is_copied and file_of(leaf) is None:
                    assert file_of(other) is not None
                else:
                    assert file_of(leaf) == file_of(other) is not None, (name, mine.sequence)


@pytest.mark.slow
@PLACES
def test_what_a_trainer_keeps_stays_as_it_was_while_the_rollout_goes_on(where: str, agents: int, address: str) -> None:
    kept, copies = [], []
    with trainer(address, yields="fragments") as stream:
        with feeding(address, agents=agents, num_fragments=12, **placed(where)):
            for number, fragment in enumerate(stream):
                if number % 5 < 2:
                    kept.append(fragment)
                    copies.append([leaf.copy() for leaf in arrays_of(fragment)])
                    places = [file_of(leaf) for leaf in arrays_of(fragment)]
                    assert None not in places
    for fragment, copied in zip(kept, copies, strict=True):
        for leaf, copy in zip(arrays_of(fragment), copied, strict=True):
            np.testing.assert_array_equal(leaf, copy)
    assert len({rewards_at(fragment) for fragment in kept}) == len(kept)


def rewards_at(fragment: Any) -> Any:
    """The memory that rewards of a fragment lie in."""
    return file_of(parts_of(fragment)[0].columns["rewards"].tree)


# Whoever is killed

_TRAINER = """
import sys; sys.path[:] = {path!r}
import os, torch
from feeding_rollouts import SHORT
from rollflow import TrainerStream
torch.set_num_threads(1)
with TrainerStream({address!r}, yields="fragments", limits=SHORT, join_timeout=60.0) as stream:
    for fragment in stream:
        rewards = sum(float(part.gather("rewards").sum()) for part in getattr(fragment, "parts", [fragment]))
        print(fragment.lane, fragment.sequence, rewards, flush=True)
        {then}
"""


def trainer_process(address: str, then: str) -> "subprocess.Popen[str]":
    program = _TRAINER.format(path=sys.path, address=address, then=then)
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "agents"), [("inline", 0), ("rollouts", 0), ("inline", 2), ("processes", 2)])
def test_a_trainer_that_is_killed_loses_nothing_and_leaves_nothing(where: str, agents: int, address: str) -> None:
    gc.collect()
    others, came = files_mapped(), []
    with feeding(address, agents=agents, num_fragments=20, **placed(where)) as feed:
        for moment in (1, 4, 9):
            with trainer_process(
                address, f"sys.stdin.read() if stream.handed and fragment.sequence == {moment} else 0"
            ) as process:
                assert process.stdout is not None
                lines = []
                while not lines or lines[-1][1] != str(moment):
                    lines.append(process.stdout.readline().split())
                process.kill()
            came.append(lines)
        with trainer_process(address, "") as process:
            assert process.stdout is not None
            came.append([line.split() for line in process.stdout])
        assert process.returncode == 0
        mapped = len(files_mapped() - others)
    whole = {}
    for lines in came:
        for lane, sequence, rewards in lines:
            assert whole.setdefault((int(lane), int(sequence)), rewards) == rewards
    assert sorted(whole) == [(lane, sequence) for lane in range(2) for sequence in range(20)]
    for before, after in pairwise(came):
        # All but the last were moved on from before the trainer was killed; nobody knows whether the rollout has heard.
        again = {tuple(line[:2]) for line in before} & {tuple(line[:2]) for line in after}
        assert len(again) <= 4
    assert mapped <= 2 * 2 * (2 + 2 + 2) * (2 if agents else 1)  # each part of the agents lies in blocks of its own
    assert not Path(address.removeprefix("shm:")).exists()
    del feed
    gc.collect()
    assert files_mapped() <= others


@pytest.mark.slow
@pytest.mark.parametrize("agents", [0, 2])
def test_a_rollout_that_is_killed_takes_nothing_with_it(agents: int, address: str) -> None:
    gc.collect()
    others, kept, copies = files_mapped(), [], []
    with trainer(address, yields="fragments") as stream:
        feed = FeedProcess(address, (0, 1, 2, 3), lanes=2, agents=agents)
        for fragment in stream:
            kept.append(fragment)
            copies.append([leaf.copy() for leaf in arrays_of(fragment)])
            if len(kept) == 10:
                break
        feed.kill()
    assert sequences_of(kept) == {lane: list(range(len(numbers))) for lane, numbers in sequences_of(kept).items()}
    for fragment, copied in zip(kept, copies, strict=True):
        for leaf, copy in zip(arrays_of(fragment), copied, strict=True):
            assert file_of(leaf) is not None
            np.testing.assert_array_equal(leaf, copy)
    del fragment, leaf, kept, stream  # which has others that came
    gc.collect()
    assert files_mapped() <= others


@pytest.mark.slow
def test_the_socket_of_a_trainer_that_was_killed_is_replaced(address: str) -> None:
    process = trainer_process(address, "")
    path = Path(address.removeprefix("shm:"))
    while not path.exists():
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert path.exists()
    with trainer(address, yields="fragments") as stream, feeding(address, num_fragments=2, lanes=1):
        assert len(list(stream)) == 2
    assert not path.exists()


# What is refused


def test_wrong_uses_are_refused() -> None:
    tls = ssl.create_default_context()
    rollout = Rollout("CartPole-v1", num_envs=1)
    for make in (lambda **more: TrainerStream("shm:/x", **more), lambda **more: TrainerSink("shm:/x", rollout, **more)):
        with pytest.raises(WireError, match=r"address 'shm:/x' with tls: memory is not encrypted, expected tls=None"):
            make(tls=tls)
    for address in ("shm:x", "shm:/" + "x" * 103, "shm:/\0"):
        with pytest.raises(WireError, match="expected an absolute path of at most 103 bytes behind 'shm:'"):
            TrainerStream(address)
    for other in (RemoteEnvs.listen, lambda text: EnvHost("CartPole-v1").connect(text)):
        with pytest.raises(WireError, match=r"address 'shm:/x', expected 'tcp://host:port'"):
            other("shm:/x")


@pytest.mark.parametrize("listens", ["shm", "unix"])
def test_only_one_end_that_shares_memory_is_refused(listens: str, address: str) -> None:
    path = address.removeprefix("shm:")
    dials = "unix" if listens == "shm" else "shm"
    told = "expected 'shm:/path' at both or neither"
    graph, rollout, sink = graph_of(f"{dials}:{path}", (0, 1), num_fragments=2)
    with trainer(f"{listens}:{path}", yields="fragments") as stream:
        stream._begin_next()
        with pytest.raises(WireError, match=told), running(graph, rollout, sink):
            pass
        assert told in stream._listener.refusals[0]
