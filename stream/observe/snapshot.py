"""Rates between two snapshots, and what people are shown of one: in words and in numbers."""

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


def shown(snapshot: Snapshot) -> dict[str, Any]:
    """What people are shown of a snapshot with rates, whatever they look with.

    title, sentence, texts    what it is, how it does, and what is wrong, in words
    errors     those of the texts that say what went wrong last in a node that goes on all the same
    is_bad     whether it stands still, or can't say how it does
    tiles      steps, return, versions, lag and losses, of its parts, too: name and value
    """
    parts, diagnosis = snapshot.get("parts", {}), snapshot.get("diagnosis", {})
    is_stalled = diagnosis.get("state") == "stalled"
    tiles = dict(_main_figures(snapshot))
    for part, its in parts.items():
        tiles |= {name if len(parts) == 1 else f"{part} {name}": value for name, value in _main_figures(its)}
    errors = []
    for name, node in snapshot.get("nodes", {}).items():
        if error := node.get("last_error"):
            when = "now" if error["age_s"] is None else f"{error['age_s']:,.0f} s ago"
            errors.append(f"{name}, {when}: {error['text']}")
    texts = [diagnosis["text"], *errors] if is_stalled else [*errors]
    texts += [f"{name}: {part['name']}" for name, part in parts.items()]
    texts += [f"fed by {', '.join(snapshot['sources'])}"] if snapshot.get("sources") else []
    return {
        "title": f"{snapshot.get('kind', 'run')} {snapshot.get('name', '')}".strip(),
        "is_bad": "error" in snapshot or is_stalled,
        "sentence": snapshot.get("error") or snapshot.get("conclusion", ""),
        "texts": texts,
        "errors": errors,
        "tiles": list(tiles.items()),
    }


def _main_figures(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
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
