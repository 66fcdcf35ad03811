"""Pictures and tables: what a graph, a run, a report, a fragment and an episode show in a notebook."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rollflow import Fragment, Graph, Rollout, SingleAgentEpisode
from rollflow.stream.data.errors import GraphError
from rollflow.stream.graph.drawing import shape
from rollflow.stream.observe import svg
from rollflow.stream.observe.graph_picture import graph_parts
from rollflow.stream.observe.svg import preformatted, table


def keep(fragments: Fragment) -> None:
    """A sink."""


def drawn() -> Graph:
    rollout = Rollout("CartPole-v1", num_envs=2)
    graph = Graph("g")
    graph.add(rollout=rollout, keep=keep)
    graph.connect("rollout.fragments", "keep", capacity=5, overflow="drop_oldest")
    rollout.close()
    return graph


def words_in(html: str) -> list[str]:
    """Texts of a page, in order."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_data = found.append  # type: ignore[method-assign]
    parser.feed(html)
    return found


def test_a_graph_is_drawn_with_every_node_edge_and_bound() -> None:
    graph = drawn()
    parts, height, width = graph_parts(shape(graph))
    words = words_in("".join(parts))
    assert sorted(name for name in words if name in graph.nodes) == sorted(graph.nodes)  # each once
    assert "5, drop_oldest" in words
    assert sum("marker-end" in part for part in parts) == len(graph.edges) + len(graph.outputs)
    assert sum("stroke-dasharray" in part and "<rect" in part for part in parts) == 1  # the ring is one task
    assert width > 2 * height
    for x, words in re.findall(r'<text x="(\d+)"[^>]*>([^<]+)<', "".join(parts)):
        assert svg.width_of(words) < min(int(x), width - int(x)) * 2, words  # no letter is cut


def test_a_graph_is_written_as_svg_that_others_read(tmp_path: Path) -> None:
    drawn().draw(tmp_path / "graph.svg")
    root = ElementTree.parse(tmp_path / "graph.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["aria-label"] == "graph g"
    with pytest.raises(GraphError, match=r"drawn as .*graph.png, expected a file that ends in .svg"):
        drawn().draw(tmp_path / "graph.png")


def test_a_picture_of_a_run_has_shares_and_what_edges_hold() -> None:
    edge = {"source": "a", "target": "b", "port": "out", "feedback": False, "is_output": False}
    found: dict[str, Any] = {
        "tasks": [["a"], ["b"]],
        "nodes": {"a": {"busy": 0.25}, "b": {"busy": 1.0}, "caller": {"busy": 0.5}},
        "edges": [{**edge, "capacity": 4, "overflow": "block", "held": 3}],
    }
    parts, *_ = graph_parts(found)
    words = words_in("".join(parts))
    assert words == ["3/4, block", "a  25%", "b  100%", "busy", "blocked", "idle"]
    bars = (re.search(r'width="([\d.]+)" height="7" .*brand', part) for part in parts)
    busy = [float(found[1]) for found in bars if found]
    assert [round(width, 1) for width in busy] == [13.5, 60.0]


def test_a_rollout_shows_itself_before_its_run_and_while_it_runs_and_its_report_the_text() -> None:
    rollout = Rollout("CartPole-v1", num_envs=2, fragment_length=8, seed=0)
    assert words_in(rollout._repr_html_()) == [repr(rollout)]
    with rollout:
        next(rollout.batches())
        words = words_in(rollout._repr_html_())
        report = rollout.report()
    assert words_in(report._repr_html_()) == [str(report)]
    assert words[0].startswith("<Rollout running: ")
    assert [word.split()[0] for word in words if "%" in word][:4] == ["env", "env_to_module", "module", "module_to_env"]
    assert words[words.index("time/iterations") + 1] == "1"


def test_a_fragment_and_an_episode_show_their_columns_and_rewards() -> None:
    with Rollout("CartPole-v1", num_envs=3, fragment_length=8, seed=0) as rollout:
        fragment = next(rollout.fragments())
    words = words_in(fragment._repr_html_())
    assert words[0] == repr(fragment)
    assert words[words.index("obs") :][:3] == ["obs", "float32", "(10, 3, 4)"]
    assert words[words.index("rewards") :][:3] == ["rewards", "float32", "(9, 3)"]
    [episode, *_] = fragment.episodes()
    words = words_in(episode._repr_html_())
    assert words[0] == repr(episode)
    assert words[words.index("obs") :][:3] == ["obs", "float32", f"({len(episode) + 1}, 4)"]
    assert "polyline" in episode._repr_html_()


def test_an_episode_of_lists_and_one_of_nested_spaces_show_themselves() -> None:
    episode = SingleAgentEpisode()
    assert "reward" in episode._repr_html_()
    episode.add_env_reset({"at": np.zeros(3, np.float32), "pair": (1, 2)})
    episode.add_env_step({"at": np.ones(3, np.float32), "pair": (1, 2)}, 1, 0.5)
    words = words_in(episode._repr_html_())
    assert words[words.index("obs") :][:3] == ["obs", "list", "(2)"]
    episode.observation_space = gym.spaces.Dict(
        {"at": gym.spaces.Box(0, 1, (3,)), "pair": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Discrete(3)])}
    )
    words = words_in(episode.to_numpy()._repr_html_())
    assert words[words.index("obs.at") :][:3] == ["obs.at", "float32", "(2, 3)"]
    assert words[words.index("obs.pair.1") :][:3] == ["obs.pair.1", "int64", "(2,)"]


def test_texts_are_no_markup() -> None:
    assert "<b>" not in preformatted("<b>") + table(("<b>",), [("<b>",)]) + svg.text(0, 0, "<b>")


@pytest.mark.parametrize(
    ("values", "points"),
    [
        ([0.0, 1.0, 0.5], "0.0,38.0 120.0,2.0 240.0,20.0"),
        ([0.0, float("nan"), 1.0], "0.0,38.0 240.0,2.0"),
        ([3.0], "0.0,38.0"),
        ([2.0, 2.0], "0.0,38.0 240.0,38.0"),
    ],
)
def test_a_plot_goes_from_first_to_last_and_from_lowest_to_highest(values: list[float], points: str) -> None:
    assert f'points="{points}"' in svg.plot(values, "rewards")
    assert svg.plot([], "rewards") == svg.plot([float("nan")], "rewards") == ""
