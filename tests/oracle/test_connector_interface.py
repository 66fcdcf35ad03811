"""Base class of a piece and edits of pipelines, beside Ray's."""

import copy
from functools import partial
from typing import Any

import numpy as np
from both import ask, assert_same, assert_same_answer
from episodes import numbers
from hypothesis import given, settings, strategies as st
from pieces import Setup, ids, in_items, pieces_named, setups
from property_examples import examples
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2 as RayPipeline
from ray.rllib.connectors.connector_v2 import ConnectorV2 as RayConnectorV2

from rollflow import ConnectorV2
from rollflow.nodes import ConnectorPipelineV2
from rollflow.stream.data.tree import stack_trees


@given(data=st.data(), setup=setups(numpy=st.just(False)))
@settings(max_examples=examples(150))
def test_items_are_added_to_a_batch(data: st.DataObject, setup: Setup) -> None:
    batches: list[dict[str, Any]] = [{}, {}]
    for _ in range(data.draw(st.integers(1, 6))):
        column, place = data.draw(ids), data.draw(st.none() | st.integers(0, len(setup.pairs) - 1))
        several: list[Any] = data.draw(st.lists(numbers, min_size=1, max_size=3))
        if data.draw(st.booleans()):
            several = [{"x": np.array([i]), "y": i} for i in several]
        as_array = data.draw(st.booleans())
        given_: Any = stack_trees(several) if as_array else several
        num_items = len(several) + (not as_array and data.draw(st.sampled_from([0, 0, 0, 1])))
        answers = [
            ask(partial(_add, connector, batch, column, several, given_, num_items, episode))
            for batch, connector, episode in zip(
                batches,
                (ConnectorV2, RayConnectorV2),
                (None, None) if place is None else (setup.pairs[place].ours, setup.pairs[place].theirs),
                strict=True,
            )
        ]
        assert_same_answer(*answers, told=batches)
        if answers[0].error is not None:
            return
        assert_same(*(in_items(batch) for batch in batches))


def _add(
    connector: Any, batch: Any, column: str, several: list[Any], given_: Any, num_items: int, episode: Any
) -> None:
    if given_ is several and len(several) == num_items == 1:
        connector.add_batch_item(batch, column, several[0], episode)
    else:
        connector.add_n_batch_items(batch, column, given_, num_items, episode)


@given(data=st.data(), columns=st.lists(ids, min_size=1, max_size=3, unique=True), form=st.integers(0, 3))
def test_a_function_changes_every_item(data: st.DataObject, columns: list[str], form: int) -> None:
    keys = data.draw(st.lists(st.tuples(*[ids] * form), min_size=1, max_size=3, unique=True)) if form in (1, 3) else []
    lengths = {key: data.draw(st.integers(0, 3)) for key in keys or [()]}
    column: Any = columns if len(columns) > 1 or data.draw(st.booleans()) else columns[0]

    def func(item: Any, *ids: Any) -> Any:
        told = hash(ids) % 97
        return tuple(each + told for each in item) if isinstance(item, tuple) else item + told

    batch: dict[str, Any] = {}
    for name in columns:
        lists = {key: [data.draw(numbers) for _ in range(length)] for key, length in lengths.items()}
        batch[name] = lists if keys else lists[()]
    batches = [copy.deepcopy(batch), copy.deepcopy(batch)]
    for each, connector in zip(batches, (ConnectorV2, RayConnectorV2), strict=True):
        connector.foreach_batch_item_change_in_place(each, column, func)
    assert_same(*batches)


@given(batch=st.dictionaries(ids, st.dictionaries(ids, numbers)))
def test_columns_and_modules_change_places(batch: dict[str, Any]) -> None:
    switch = ConnectorV2.switch_batch_from_column_to_module_ids
    assert_same(switch(batch), RayConnectorV2.switch_batch_from_column_to_module_ids(batch))


@given(setup=setups(numpy=st.just(False)), data=st.data(), keyed=st.booleans())
def test_episodes_are_gone_through_with_their_items(setup: Setup, data: st.DataObject, keyed: bool) -> None:
    column: Any = [data.draw(numbers) for _ in setup.pairs]
    if keyed:
        column = {(pair.ours.id_,): [item] for pair, item in zip(setup.pairs, column, strict=True)}
    walked = []
    for connector, which in ((ConnectorV2, "ours"), (RayConnectorV2, "theirs")):
        episodes = [getattr(pair, which) for pair in setup.pairs]
        pairs: Any = connector.single_agent_episode_iterator(episodes, zip_with_batch_column=column)
        walked.append([(episode.id_, item) for episode, item in pairs])
        assert list(connector.single_agent_episode_iterator(episodes)) == episodes
    assert_same(*walked)


# Pipelines


VERBS = ["append", "prepend", "insert_before", "insert_after", "remove"]


@given(edits=st.lists(st.tuples(st.sampled_from(VERBS), st.sampled_from("ABCD"), st.booleans()), max_size=8))
@settings(max_examples=examples(300))
def test_edits_leave_the_same_pieces_in_the_same_order(edits: list[tuple[str, str, bool]]) -> None:
    """Each class once: of a name that is not there, Ray inserts beside the last piece."""
    ours, theirs = pieces_named(ConnectorV2), pieces_named(RayConnectorV2)
    pipelines: Any = [ConnectorPipelineV2(), RayPipeline(connectors=[])]
    for place, (verb, name, by_class) in enumerate(edits):
        there = [type(piece).__name__ for piece in pipelines[0].connectors]
        new = next((each for each in "ABCD" if each not in there), None)
        if (verb != "remove" and new is None) or (verb not in ("append", "prepend") and name not in there):
            continue
        for pipeline, classes in zip(pipelines, (ours, theirs), strict=True):
            at = classes[name] if by_class else name
            args = {"remove": [at], "append": [], "prepend": []}.get(verb, [at])
            getattr(pipeline, verb)(*args, *([] if verb == "remove" else [classes[new]()]))
        told = [[type(piece).__name__ for piece in pipeline.connectors] for pipeline in pipelines]
        assert told[0] == told[1], edits[: place + 1]
