"""Credits: the number of fragments that lanes may run ahead of their reader."""

from dataclasses import dataclass

from rollflow.nodes.stages.credits import FragmentCredits


@dataclass
class Lane:
    index: int
    sequence: int = 0
    at_start: bool = True


def test_in_rounds_no_lane_begins_its_second_fragment_before_all_have_begun_their_first() -> None:
    credits, asked = FragmentCredits(3, first=range(3)), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(Lane(1))
    assert not credits.admits(Lane(1, 1))  # the others are still being reset
    assert credits.admits(Lane(2))
    assert not credits.admits(Lane(1, 1))
    assert not asked
    assert credits.admits(Lane(0))
    assert len(asked) == 1  # whoever was refused is asked about again
    assert not credits.admits(Lane(1, 1))  # there are as many as there are lanes
    credits.release([0])
    assert credits.admits(Lane(1, 1))


def test_in_rounds_a_lane_that_is_lost_before_it_has_begun_is_not_waited_for() -> None:
    credits, asked = FragmentCredits(3, first=range(3)), list[None]()
    credits.watch(lambda: asked.append(None))
    assert credits.admits(Lane(1))
    credits.wait_no_more(0)
    credits.wait_no_more(0)  # again
    assert not credits.admits(Lane(1, 1))
    assert credits.admits(Lane(2))
    assert len(asked) == 1
    assert credits.admits(Lane(1, 1))  # its credit goes to another


def test_ahead_of_the_reader_a_fast_lane_takes_what_credits_there_are() -> None:
    credits = FragmentCredits(4)
    assert [credits.admits(Lane(1, sequence)) for sequence in range(5)] == [True, True, True, True, False]
    assert not credits.admits(Lane(0))
    credits.release([0])
    assert credits.admits(Lane(0))
    assert credits.admits(Lane(0))  # it had begun that one
