"""What people are shown of snapshots: a title, rates between two of them, what went wrong, and the main figures."""

from collections.abc import Iterator, Mapping
from typing import Any

Snapshot = Mapping[str, Any]

_PARTS = ("busy", "idle", "blocked")
_MAIN = {  # beginning of a figure's name -> words
    "time/total_timesteps": "steps",
    "time/iterations": "updates",
    "rollout/ep_rew_mean": "return",
    "policy/version": "version",
    "policy/lag": "lag",
    "lost": "lost",
}


def with_rates(now: Snapshot, before: Snapshot | None) -> dict[str, Any]:
    """A snapshot with rates since an earlier one of the same run; None: since the run began.

    steps_per_s      environment steps per second, of all parts together; None: the run counts none
    nodes, edges     each also has `items_per_s`; the shares `busy`, `idle` and `blocked` of a node are since then
    """
    before = before or {}
    past_s = now.get("elapsed_s", 0.0) - before.get("elapsed_s", 0.0)
    if past_s <= 0.0:
        past_s, before = now.get("elapsed_s", 0.0), {}
    nodes_before, edges_before = before.get("nodes", {}), _edges(before)
    nodes = {name: _node(node, nodes_before.get(name, {}), past_s) for name, node in now.get("nodes", {}).items()}
    edges = [
        {**edge, "items_per_s": _rate(edge["items"], edges_before.get(key, {}).get("items", 0), past_s)}
        if "items" in edge
        else edge
        for key, edge in _edges(now).items()
    ]
    return {**now, "nodes": nodes, "edges": edges, "steps_per_s": _steps_per_s(now, before)}


def title_of(snapshot: Snapshot) -> str:
    """What kind of run it is, and its name, as far as it says so."""
    return f"{snapshot.get('kind', 'run')} {snapshot.get('name', '')}".strip()


def is_bad(snapshot: Snapshot) -> bool:
    """Whether the run stands still, or can't say how it does."""
    return "error" in snapshot or is_stalled(snapshot)


def is_stalled(snapshot: Snapshot) -> bool:
    """Whether the run stands still."""
    return bool(snapshot.get("diagnosis", {}).get("state") == "stalled")


def stall_text(snapshot: Snapshot) -> str:
    """The text of the diagnosis if the run stands still; else ""."""
    return snapshot["diagnosis"]["text"] if is_stalled(snapshot) else ""


def last_errors(snapshot: Snapshot) -> list[str]:
    """What went wrong last in each node that goes on all the same, a line each."""
    lines = []
    for name, node in snapshot.get("nodes", {}).items():
        if error := node.get("last_error"):
            when = "now" if error["age_s"] is None else f"{error['age_s']:,.0f} s ago"
            lines.append(f"{name}, {when}: {error['text']}")
    return lines


def main_figures(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    """Steps, return, versions, lag and losses of a run with rates: a name, and its value."""
    figures = snapshot.get("figures", {})
    if snapshot.get("steps_per_s") is not None:
        yield "steps/s", snapshot["steps_per_s"]
    for stem, name in _MAIN.items():
        for figure, value in figures.items():
            if figure == stem or figure.startswith(f"{stem}/"):
                label = figure.removeprefix(stem).removeprefix("/")
                yield f"{name} ({label})" if label else name, value


def _edges(snapshot: Snapshot) -> dict[tuple[str, str, str], Any]:
    return {(edge["source"], edge["port"], edge["target"]): edge for edge in snapshot.get("edges", ())}


def _node(node: Snapshot, before: Snapshot, past_s: float) -> dict[str, Any]:
    shares = {part: min(1.0, _rate(node[f"{part}_s"], before.get(f"{part}_s", 0.0), past_s)) for part in _PARTS}
    return {**node, **shares, "items_per_s": _rate(node["items"], before.get("items", 0), past_s)}


def _rate(now: float, before: float, past_s: float) -> float:
    return max(0.0, now - before) / max(past_s, 1e-9)


def _steps_per_s(now: Snapshot, before: Snapshot) -> float | None:
    """Steps by the figures of the run, or of its parts."""
    counted, earlier = _figures(now), _figures(before)
    rates = []
    for name, figures in counted.items():
        steps, since = figures["time/total_timesteps"], earlier.get(name, {})
        past_s = figures["time/time_elapsed"] - since.get("time/time_elapsed", 0.0)
        rates.append(_rate(steps, since.get("time/total_timesteps", 0), past_s))
    return sum(rates) if rates else None


def _figures(snapshot: Snapshot) -> dict[str, Any]:
    """Figures by the name of the part; those of the run itself have the name ""."""
    parts = {"": snapshot, **snapshot.get("parts", {})}
    return {name: part["figures"] for name, part in parts.items() if "figures" in part}
