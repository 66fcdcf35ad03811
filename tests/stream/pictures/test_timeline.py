"""The time line of a run, and plots of many points: worked by hand."""

import re

from rollflow.stream.pictures import svg
from rollflow.stream.pictures.timeline import timeline


def paths(picture: str) -> dict[str, str]:
    """Path of each row, by its name."""
    return {name: path for path, name in re.findall(r'd="([^"]+)" [^>]*><title>([^<]+)</title>', picture)}


def test_the_area_is_the_busy_share_since_the_point_before() -> None:
    found = timeline({"env": [(0.0, 0.9), (133.0, 0.5), (266.0, 1.0)]}, {})
    assert paths(found) == {"env": "M0.0 14V7.0H133.0V0.0H266.0V14z"}
    assert ">4 min ago</text>" in found
    assert timeline({"env": [(5.0, 0.9)]}, {}) == ""
    assert timeline({}, {}) == ""


def test_calls_are_bars_and_those_within_half_a_pixel_are_one() -> None:
    busy = {"env": [(100.0, 0.0), (366.0, 0.0)]}  # a pixel a second
    found = timeline(busy, {"lane 1": [(50.0, 110.0), (120.0, 120.0), (120.9, 121.5)], "lane 0": [(300.0, 366.0)]})
    assert paths(found) == {
        "env": "M0.0 14V14.0H266.0V14z",
        "lane 0": "M200.0 0H266.0v14H200.0z",
        "lane 1": "M0.0 0H10.0v14H0.0zM20.0 0H21.5v14H20.0z",
    }


def test_of_many_parties_those_with_the_longest_calls_are_shown() -> None:
    busy = {"env": [(0.0, 0.0), (10.0, 0.0)]}
    found = timeline(busy, {f"lane {number:02}": [(0.0, number / 10)] for number in range(20)})
    assert list(paths(found)) == ["env", *(f"lane {number:02}" for number in range(4, 20))]


def test_an_hour_of_looks_is_drawn_with_two_points_a_pixel_that_keep_the_peaks() -> None:
    values = [float(number % 7) for number in range(5000)]
    values[2500] = 100.0
    [points] = re.findall(r'points="([^"]+)"', svg.plot(values, "steps/s"))
    assert len(points.split()) <= 2 * 241
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert min(heights) == 2.0
    assert max(heights) == 38.0
    assert svg.thinned([(0.1, 1.0), (0.2, 5.0), (0.3, 2.0), (0.4, 0.0), (1.5, 3.0)]) == [
        (0.2, 5.0),
        (0.4, 0.0),
        (1.5, 3.0),
    ]
