"""Numbered items of a source or a sampler: what each end takes, and what it refuses."""

import pytest
from wire_ends import StreamEnds, asking, check_broken, error_of, frame_as, refusing
from wire_messages import EXAMPLES, TOKEN, hello

from rollflow.stream import wire


class Ends(StreamEnds):
    """Both ends of a stream."""

    def give(self, number: int) -> list[wire.Event]:
        self.source.send(fragment(number))
        return self.to_trainer()


def fragment(number: int) -> wire.Fragment:
    return wire.Fragment(number % 3, number, {}, {})


@pytest.mark.parametrize("kind", ["settings", "weights", "metrics"])
def test_an_end_is_told_what_is_for_it(kind: str) -> None:
    ends, news = Ends(), EXAMPLES[kind]
    end, carry = (ends.trainer, ends.to_source) if kind in ("settings", "weights") else (ends.source, ends.to_trainer)
    end.tell(news)
    assert [type(event) for event in carry()] == [type(news)]


@pytest.mark.parametrize(
    ("taken", "done", "kept", "known"), [(0, 4, 2, (3, 2, 0)), (2, 4, 4, (5, 4, 2))], ids=["nothing", "an older state"]
)
def test_a_trainer_that_knows_little_gets_what_is_kept_and_is_told_what_it_missed(
    taken: int, done: int, kept: int, known: tuple[int, int, int]
) -> None:
    ends = Ends(given=5)
    for number in range(1, 6):
        ends.give(number)
    for each in (wire.Done(done, kept), wire.Done(1, 0)):  # it does not go back
        ends.session.take(each)
        assert (ends.session.done, ends.session.kept) == (done, kept)
    again = Ends(ends.session, wire.ReceiverSession(TOKEN, taken=taken))
    assert (again.source.next, again.session.done) == (kept + 1, kept)
    assert isinstance(again.give(kept + 1)[0], wire.Fragment)
    assert (again.known.taken, again.known.done, again.known.missed) == known


def test_fragments_that_jump_come_twice_or_too_early_are_refused() -> None:
    for numbers, window, told, code in (
        ((1, 3), None, "fragment 3, expected 2", "number"),
        ((1, 1), None, "fragment 1, expected 2", "number"),
        ((1, 2, 3), 2, "fragment 3, expected at most 2: 2 beyond the last that is done", "credit"),
    ):
        ends = Ends(given=9)
        ends.known.window = window
        events: list[wire.Event] = []
        for number in numbers:
            events = ends.trainer.receive(frame_as(fragment(number)), 0.0)
        check_broken(events, code, told)


@pytest.mark.parametrize(
    ("message", "told", "code"),
    [
        (EXAMPLES["rows"], "rows from a rollout, expected one of fragment, metrics", "order"),
        (wire.Done(1, 0), "done 1, of which 0 are kept, expected kept <= done < 1, the next to be sent", "number"),
        (wire.Done(0, 2), "done 0, of which 2 are kept", "number"),
        (fragment(1), "fragment from a trainer, expected one of settings, weights, done", "order"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_an_end_refuses_what_must_not_come(message: wire.Message, told: str, code: str) -> None:
    ends = Ends(given=2)
    end = ends.trainer if " from a rollout" in told else ends.source
    check_broken(end.receive(frame_as(message), 0.0), code, told)


def query(number: int, done: int = 0) -> wire.Fragment:
    return wire.Fragment(0, number, {}, {"done": done})


def test_an_answer_that_was_given_up_is_dropped() -> None:
    ends = asking()
    ends.source.session.drop(3)
    assert ends.source.receive(frame_as(query(3)), 0.0) == []
    check_broken(ends.source.receive(frame_as(query(9)), 0.0), "number", "fragment 9, expected an answer to a query")


@pytest.mark.parametrize(
    ("number", "done", "told", "code"),
    [
        (3, 0, "query 3 with done 0, expected more than 3", "number"),
        (4, 4, "query 4 with done 4, expected more than 4", "number"),
        (12, 3, "fragment 12, expected at most 11: 8 beyond the last that is done", "credit"),
    ],
)
def test_queries_that_come_twice_or_too_early_are_refused(number: int, done: int, told: str, code: str) -> None:
    ends = asking()
    assert [type(event) for event in ends.to_trainer()] == [wire.Fragment]
    check_broken(ends.trainer.receive(frame_as(query(number, done)), 0.0), code, told)


def test_requests_beyond_the_window_are_not_made() -> None:
    session = wire.SenderSession(TOKEN)
    session.window = 2
    for number in (1, 2):
        session.ask(query(number))
    assert not session.may_ask
    assert session.drop(2)  # the oldest is still under way
    assert not session.may_ask
    session.drop(1)
    assert session.query({}, {}).rest == {"done": 2}


def test_an_end_of_another_version_is_refused() -> None:
    told = "hello.software is 'rollflow 0.2', expected 'rollflow 0.1', as this trainer is"
    check_broken(Ends(software="rollflow 0.2").events, "version", told)


def test_a_welcome_that_has_more_than_was_given_is_refused() -> None:
    ends = Ends(given=2, known=wire.ReceiverSession(TOKEN, taken=7))
    assert "the trainer has 7 items of this stream, expected at most 2" in str(error_of([ends.welcome]))


@pytest.mark.parametrize(
    ("accepts", "told"), [("source", "'source': this is a trainer"), ("sampler", "'sampler': this is a replay host")]
)
def test_a_host_is_no_source(accepts: str, told: str) -> None:
    connection = wire.ReceiverConnection(accepts=accepts, secret=None, limits=wire.Limits(), now=0.0)
    with refusing("role", f"hello.role is 'env', expected {told}"):
        connection._check(hello())
