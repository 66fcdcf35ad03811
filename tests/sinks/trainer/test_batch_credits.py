"""Fragments are begun no sooner than the train batches that they go into may be."""

from collections import deque
from typing import Any

from hypothesis import given, settings, strategies as st
from property_examples import examples

from rollflow.sinks.learner.learner_pipeline import FragmentGatherer
from rollflow.sinks.trainer.pace_gate import BatchCredits

BATCHES = 8


class Counted(FragmentGatherer[Any]):
    """Makes batches of numbers."""

    def __call__(self, fragments: Any) -> Any:
        return self._take(fragments).batches

    def _batch_of(self, fragments: Any) -> dict[str, Any]:
        return {} if all(fragment.is_in_vain for fragment in fragments) else {"of": fragments}


class Begun:
    """A fragment that was begun when so many batches were done with."""

    def __init__(self, lane: int, sequence: int, done: int, num_steps: int, is_in_vain: bool) -> None:
        self.lane, self.sequence, self.done = lane, sequence, done
        self.num_steps, self.is_in_vain = num_steps, is_in_vain


@settings(max_examples=examples(60))
@given(
    data=st.data(),
    lanes=st.integers(1, 4),
    fragments_per_batch=st.integers(1, 5),
    ahead=st.integers(1, 4),
    may_be_empty=st.booleans(),
)
def test_whatever_is_late_no_fragment_is_in_a_batch_beyond_its_bound_and_all_goes_on(
    data: Any, lanes: int, fragments_per_batch: int, ahead: int, may_be_empty: bool
) -> None:
    gathering = Counted(fragments_per_batch, None)
    credits = BatchCredits(gathering)
    making: dict[int, Begun] = {}
    sequences, going = [0] * lanes, list(range(lanes))
    coming: deque[Begun] = deque()  # on their way to where batches are made
    batches: list[Any] = []
    done = 0
    while done < BATCHES:
        free = [lane for lane in going if lane not in making]
        moves: list[Any] = [("begin", lane) for lane in free if credits.admits(done, ahead)]
        moves += [("leave", lane) for lane in making]
        moves += [("leave for good", lane) for lane in making] if len(going) > 1 else []
        moves += [("gather", 0)] if coming else []
        moves += [("move on", 0)] if done < len(batches) else []
        assert moves, "it stands still"
        move, lane = data.draw(st.sampled_from(moves))
        if move == "begin":
            steps, in_vain = data.draw(st.tuples(st.integers(0, 1), st.booleans())) if may_be_empty else (1, False)
            making[lane] = Begun(lane, sequences[lane], done, steps, in_vain)
            credits.begin(lane, sequences[lane], done)
            sequences[lane] += 1
        elif move == "leave":
            coming.append(making.pop(lane))
            credits.come(lane, coming[-1].sequence)
        elif move == "leave for good":
            going.remove(lane)
            del making[lane]
            credits.leave(lane)
        elif move == "gather":
            batch = gathering(coming.popleft())
            if batch is not None:
                batches.append(batch["of"])
                assert all(len(batches) <= fragment.done + ahead for fragment in batches[-1])
        else:
            done += 1


def test_a_fragment_that_was_lost_is_waited_for_no_more() -> None:
    gathering = Counted(1, None)
    credits = BatchCredits(gathering)
    for sequence in range(2):
        assert credits.admits(0, 2)
        credits.begin(0, sequence, 0)
    assert not credits.admits(0, 2)
    credits.come(0, 1)
    assert credits.admits(0, 2)


def test_what_is_left_out_is_told() -> None:
    told: list[int] = []
    gathering = Counted(2, None)
    gathering.watch(lambda: told.append(gathering.left_out))
    for steps, is_in_vain in [(0, False), (1, True), (1, True), (1, False), (1, True)]:
        gathering(Begun(0, 0, 0, steps, is_in_vain))
    assert told == [1, 3]
