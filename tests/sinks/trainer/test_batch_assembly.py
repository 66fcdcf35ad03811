"""Which items go together, and that none is lost between those that have come and those that are handed over."""

from taken_batches import taken_of

from rollflow.sinks.trainer.intake import ArrivalOrder
from rollflow.sinks.trainer.rollout_peer import ArrivedItem, PeerLife, RolloutPeer
from rollflow.stream.wire import TrainerSession


def test_what_is_left_of_a_rollout_that_has_gone_is_not_waited_to_be_more() -> None:
    supply = ArrivalOrder(None)
    large, small = RolloutPeer(TrainerSession(bytes(16))), RolloutPeer(TrainerSession(bytes(range(16))))
    large.lanes, small.lanes = set(range(8)), {0}
    large.life, small.life = PeerLife.LEFT, PeerLife.HERE
    one, *others = ArrivedItem(large, 1, {}, None), *(ArrivedItem(small, number, {}, None) for number in range(1, 5))
    supply.waiting = supply.joined([one])
    assert taken_of(supply, [small]) == []
    supply.waiting = supply.joined(others)
    assert [taken_of(supply, [small]) for _ in range(4)] == [[[one, others[0]]], *([[other]] for other in others[1:])]


def test_as_many_sets_are_taken_as_are_whole() -> None:
    supply, source = ArrivalOrder(2), RolloutPeer(TrainerSession(bytes(16)))
    items = [ArrivedItem(source, number, {}, None) for number in range(1, 8)]
    supply.waiting = supply.joined(items[:5])
    assert taken_of(supply, [source]) == [items[:2], items[2:4]]
    assert taken_of(supply, [source]) == []
    supply.waiting = supply.joined(items[5:])
    assert taken_of(supply, [source]) == [items[4:6]]
    assert [taken_of(supply, []), taken_of(supply, [])] == [[items[6:]], []]  # nothing more comes
