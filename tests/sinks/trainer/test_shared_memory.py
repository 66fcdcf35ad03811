"""Through shared memory a trainer gets what it would get otherwise, where the rollout has it, as long as it likes."""

import gc
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeding_rollouts import feeding, graph_of, running, sequences_of, trainer
from fragment_equality import in_time
from killable_trainer import FeedChild, received, trainer_process
from memory_lending import arrays_of, file_of, files_mapped, parts_of, shared_address
from numpy.typing import NDArray
from remote_rollouts import await_that

from rollflow import Fragment
from rollflow.stream import WireError
from rollflow.stream.data.tree import leaves_of
from rollflow.stream.graph.channel import Inlet
from rollflow.stream.multi_agent.multi_agent_fragment import MultiAgentFragment

WHERE = ["inline", "threads", "processes", "rollouts"]
# Where the environments are, and how many agents each has; 0: one, which is not told by its name.
PLACES = pytest.mark.parametrize(("where", "agents"), [(where, agents) for where in WHERE for agents in (0, 2)])


@pytest.fixture
def address() -> Iterator[str]:
    with shared_address() as address:
        yield address


def placed(where: str) -> dict[str, Any]:
    return {"where": where, "lanes": 2} | ({} if where in ("inline", "threads") else {"workers": 2})


class Keep:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.fragments: list[Fragment | MultiAgentFragment] = []

    async def run(self, fragments: Inlet[Fragment | MultiAgentFragment]) -> None:
        async for fragment in fragments:
            self.fragments.append(fragment)


@pytest.mark.slow
@PLACES
def test_arrays_lie_where_the_rollout_has_them(where: str, agents: int, address: str) -> None:
    with trainer(address, yields="fragments") as stream:
        graph, rollout, sink = graph_of(address, range(4), agents=agents, num_fragments=3, **placed(where))
        keep = Keep()
        graph.connect("rollout.fragments", keep)
        with running(graph, rollout, sink):
            there = in_time(list(stream))
    kept = [part for fragment in in_time(keep.fragments) for part in parts_of(fragment)]
    for mine, theirs in zip(kept, [part for fragment in there for part in parts_of(fragment)], strict=True):
        # What no worker process writes.
        is_copied = mine.sequence == 0 and where != "rollouts"
        for name, column in mine.columns.items():
            for leaf, other in zip(leaves_of(column.tree), leaves_of(theirs.columns[name].tree), strict=True):
                place = file_of(leaf)
                assert file_of(other) is not None
                assert place == file_of(other) or (is_copied and place is None), (name, mine.sequence)


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
    check_same(kept, copies)
    assert len({file_of(parts_of(fragment)[0].columns["rewards"].tree) for fragment in kept}) == len(kept)


# Whoever is killed


@pytest.mark.slow
@pytest.mark.parametrize(("where", "agents"), [("inline", 0), ("rollouts", 0), ("inline", 2), ("processes", 2)])
def test_a_trainer_that_is_killed_loses_nothing_and_leaves_nothing(where: str, agents: int, address: str) -> None:
    gc.collect()
    others, came = files_mapped(), []
    with feeding(address, agents=agents, num_fragments=20, **placed(where)) as feed:
        for moment in (1, 4, 9):
            with trainer_process(address, moment) as (process, told):
                lines = [told.recv()]
                while lines[-1][1] != moment:
                    lines.append(told.recv())
                process.kill()
            came.append(lines)
        with trainer_process(address) as (process, told):
            came.append(list(iter(partial(received, told), None)))
        assert process.exitcode == 0
        mapped = len(files_mapped() - others)
    whole = {}
    for lines in came:
        for lane, sequence, rewards in lines:
            assert whole.setdefault((lane, sequence), rewards) == rewards
    assert sorted(whole) == [(lane, sequence) for lane in range(2) for sequence in range(20)]
    for before, after in pairwise(came):
        # All but the last were moved on from before the trainer was killed; nobody knows whether the rollout has heard.
        again = {line[:2] for line in before} & {line[:2] for line in after}
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
    others = files_mapped()
    with trainer(address, yields="fragments") as stream:
        feed = FeedChild(address, [0, 1, 2, 3], lanes=2, agents=agents)
        kept = list(islice(stream, 10))
        copies = [[leaf.copy() for leaf in arrays_of(fragment)] for fragment in kept]
        feed.kill()
    assert sequences_of(kept) == {lane: list(range(len(numbers))) for lane, numbers in sequences_of(kept).items()}
    check_same(kept, copies)
    del kept, stream  # which has others that came
    gc.collect()
    assert files_mapped() <= others


def check_same(kept: Sequence[Any], copies: Sequence[list[NDArray[Any]]]) -> None:
    """The arrays of fragments are in shared memory, and as they were when they were copied."""
    for fragment, copied in zip(kept, copies, strict=True):
        for leaf, copy in zip(arrays_of(fragment), copied, strict=True):
            assert file_of(leaf) is not None
            np.testing.assert_array_equal(leaf, copy)


@pytest.mark.slow
def test_the_socket_of_a_trainer_that_was_killed_is_replaced(address: str) -> None:
    path = Path(address.removeprefix("shm:"))
    with trainer_process(address) as (process, _):
        await_that(path.exists)
        process.kill()
    assert path.exists()
    with trainer(address, yields="fragments") as stream, feeding(address, num_fragments=2, lanes=1):
        assert len(list(stream)) == 2
    assert not path.exists()


# What is refused


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
