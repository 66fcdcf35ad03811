"""How far lanes may run ahead of whoever takes their fragments."""

from dataclasses import dataclass

from rollflow.nodes.pace import FragmentCredits


@dataclass
class Lane:
    index: int
    sequence: int = 0
    at_start: bool = True


def test_in_rounds_no_lane_begins_its_second_fragment_before_all_have_begun_their_first() -> None:
    credits, asked = FragmentCredits(3, in_rounds=True), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(Lane(1))
    assert not credits.admits(Lane(1, 1))  # the others are still being reset
    assert credits.admits(Lane(2))
    assert not credits.admits(Lane(1, 1))
    assert not asked
    assert credits.admits(Lane(0))
    assert len(asked) == 1  # whoever was refused is asked about again
    assert not credits.admits(Lane(1, 1))  # there are as many as there are lanes
    credits.release(1)
    assert credits.admits(Lane(1, 1))


def test_in_rounds_a_lane_that_has_left_is_not_waited_for() -> None:
    credits = FragmentCredits(2, in_rounds=True)
    assert credits.admits(Lane(1))
    credits.release(1)
    assert not credits.admits(Lane(1, 1))
    credits.add(-1)  # the other has gone before it began
    assert credits.admits(Lane(1, 1))


def test_in_rounds_a_lane_that_is_set_aside_is_not_waited_for() -> None:
    credits, asked = FragmentCredits(2, in_rounds=True), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(Lane(1))
    assert not credits.admits(Lane(1, 1))
    credits.gone(0, 0)
    assert asked
    assert credits.admits(Lane(1, 1))


def test_ahead_of_the_reader_a_fast_lane_takes_what_credits_there_are() -> None:
    credits = FragmentCredits(4)
    assert [credits.admits(Lane(1, sequence)) for sequence in range(5)] == [True, True, True, True, False]
    assert not credits.admits(Lane(0))
    credits.release(1)
    assert credits.admits(Lane(0))
    assert credits.admits(Lane(0))  # it had begun that one
