"""Page of runs: what a browser shows of all runs, and what it puts in their place each second."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rollflow.stream.pictures import svg
from rollflow.stream.pictures.graph_picture import graph_picture
from rollflow.stream.pictures.html import preformatted, table
from rollflow.stream.pictures.run_html import figures_table
from rollflow.stream.pictures.timeline import timeline
from rollflow.stream.snapshots.history import RunHistory
from rollflow.stream.snapshots.rates import diagnosis_to_show, is_bad, last_errors, title_of

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>rollflow: runs</title>
<style nonce="{nonce}">
:root {{ color-scheme: light dark; }}
body {{ font-family: sans-serif; margin: 1rem; }}
section {{ border: 1px solid silver; border-radius: 6px; padding: 0 1rem; margin-bottom: 1rem; }}
section.bad {{ border-color: crimson; }}
.columns {{ display: flex; flex-wrap: wrap; gap: 2rem; }}
.picture {{ min-width: 26rem; }}
pre {{ white-space: pre-wrap; }}
td, th {{ text-align: left; padding: 0 1rem 0 0; }}
</style>
</head>
<body>
<main>{runs}</main>
<script nonce="{nonce}">
const main = document.querySelector("main");
async function look() {{
  try {{
    const answer = await fetch("runs");
    main.innerHTML = await answer.text();
  }} catch {{
    main.innerHTML = "<p>rollflow view has ended</p>";
  }}
  setTimeout(look, 1000);
}}
setTimeout(look, 1000);
</script>
</body>
</html>
"""
"""A page, to be formatted with a `nonce` and the `runs` that it begins with."""


def runs_html(runs: Sequence[Mapping[str, Any]], histories: Mapping[str, RunHistory], folder: str) -> str:
    """HTML of all runs.

    runs         snapshots with rates
    histories    what was seen of each run, by its path
    folder       where runs have their sockets
    """
    if not runs:
        return f"<p>no run of this user on this machine has a socket in {escape(folder)}</p>"
    return "".join(_section(run, histories[run["path"]]) for run in runs)


def _section(run: Mapping[str, Any], history: RunHistory) -> str:
    columns = [
        figures_table(run.get("figures", {})),
        _plots(history),
        timeline(history.busy, history.calls),
        _parties(run),
    ]
    if "tasks" in run:
        columns.insert(0, graph_picture(run, run["conclusion"]))
    for name, part in run.get("parts", {}).items():
        columns.append(f"<p>{escape(name)}: {escape(part['name'])}</p>{figures_table(part['figures'])}")
    said = [run.get("error"), *last_errors(run), run.get("conclusion"), diagnosis_to_show(run)]
    text = "\n".join(filter(None, said))
    return (
        f'<section class="{"bad" if is_bad(run) else ""}"><h2>{escape(title_of(run))}</h2>'
        f"<p>pid {run['pid']} {escape(run.get('command', ''))}</p>"
        f'<div class="columns">{"".join(f"<div>{column}</div>" for column in columns if column)}</div>'
        f"{preformatted(text)}</section>"
    )


def _plots(history: RunHistory) -> str:
    """A plot of each figure, with its last value."""
    plots = []
    for name, points in history.figures.items():
        times, values = zip(*points, strict=True)
        plots.append(f"<p>{escape(name)} {values[-1]:,.6g}<br>{svg.plot(values, name, times=times)}</p>")
    return "".join(plots)


def _parties(run: Mapping[str, Any]) -> str:
    rows = [(each["name"], each["doing"], f"{each['age_s']:.1f} s") for each in run.get("parties", ())]
    return table(("who", "does", "since"), rows) if rows else ""
