"""Datasets: folders that a DatasetSink has written, or of Minari's."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollflow import DatasetSink, DatasetSource
from rollflow.cli import arguments
from rollflow.sinks.datasets.dataset_folder import DatasetFolder, environment_of, kind_difference, whole_folder
from rollflow.sinks.datasets.dataset_source import check_dataset
from rollflow.sinks.datasets.episode_block import EpisodeSummary
from rollflow.sinks.datasets.minari_episodes import minari_data_of, write_minari
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.space import describe_space

_BYTES_AT_ONCE = 256 << 20  # of steps in memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's actions."""
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="action")
    show = actions.add_parser("show", help="print spaces, runs, returns and lengths")
    show.add_argument("path", type=Path)
    check = actions.add_parser("check", help="read every byte, and name the files that are damaged; the status is 1")
    check.add_argument("path", type=Path)
    merge = actions.add_parser("merge", help="write the episodes of several datasets to one; their runs stay apart")
    merge.add_argument("paths", type=Path, nargs="+", metavar="path")
    merge.add_argument("--out", type=Path, required=True, help="its folder; a dataset that is there is added to")
    _add_filter(actions)
    convert = actions.add_parser("convert", help="write a dataset in another library's format")
    convert.add_argument("path", type=Path)
    convert.add_argument("--to", required=True, choices=["minari"], help="Minari's HDF5 files (extra minari)")
    convert.add_argument(
        "--id", required=True, help="by which minari.load_dataset finds it, such as cartpole/expert-v0"
    )
    convert.add_argument(
        "--out", type=Path, metavar="FOLDER", help="of all datasets of Minari's (default: where Minari keeps its own)"
    )


def _add_filter(actions: Any) -> None:
    parser = actions.add_parser("filter", help="write the episodes that are within some bounds to another dataset")
    parser.add_argument("path", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="its folder; a dataset that is there is added to")
    for name, kind in (("return", float), ("length", int), ("version", int)):
        what = "policy version of every step" if name == "version" else name
        parser.add_argument(f"--min-{name}", type=kind, metavar="N", help=f"the least {what}")
        parser.add_argument(f"--max-{name}", type=kind, metavar="N", help=f"the largest {what}")
    parser.add_argument(
        "--run", type=int, action="append", metavar="N", dest="runs", help="of this run; may come again"
    )
    parser.add_argument("--whole", action="store_true", help="with their beginning and their end")


def run(args: argparse.Namespace) -> int | None:
    """Do what the action says; the exit status."""
    actions = {"show": _show, "check": _check, "merge": _merge, "filter": _filter, "convert": _convert}
    return actions[args.action](args)


def _show(args: argparse.Namespace) -> None:
    source = DatasetSource(args.path)
    summary, runs = source.summary(), source.description["runs"]
    if source.agents is not None:
        print(f"agents        {', '.join(map(str, source.agents))}")
        for module_id in source.columns:
            print(f"module        {module_id}")
            kinds = source.observation_space, source.action_space, source.columns
            _show_kind(*(each[module_id] for each in kinds))
        print("of environments, whose returns are those of all their agents:")
    else:
        _show_kind(source.observation_space, source.action_space, source.columns)
    for number, run in enumerate(runs):
        mine = summary.runs == number
        size = f"{np.count_nonzero(mine)} episodes, {summary.lengths[mine].sum()} steps"
        print(f"run {number:<9} {size}; {'; '.join(_facts_of(run))}")
    print(f"episodes      {len(mine := summary.is_whole)}, {np.count_nonzero(~mine)} without beginning or end")
    print(f"steps         {summary.lengths.sum()}")
    for name, values in (("return", summary.returns), ("length", summary.lengths)):
        finite, count = values[np.isfinite(values)], len(values)
        text = f"all {count} are NaN or infinite"
        if len(finite):
            text = f"mean {finite.mean():.2f}, deviation {finite.std():.2f}, median {np.median(finite):.2f}"
            text += f" of {len(finite)}; NaN or infinite: {count - len(finite)}" if len(finite) < count else ""
        print(f"{name:<13} {text}")


def _show_kind(observation_space: Any, action_space: Any, columns: Iterable[str]) -> None:
    print(f"observations  {observation_space}")
    print(f"actions       {action_space}")
    print(f"columns       {', '.join(columns)}")


def _facts_of(run: dict[str, Any]) -> Iterator[str]:
    """What the record of a run says of it."""
    yield f"environment {environment_of(run) or 'not known'}"
    rollout = run["rollout"] or {}
    if "seed" in rollout:
        yield f"seed {rollout['seed']}"
    yield from (f"{name} {value}" for name, value in run["metadata"].items())


def _check(args: argparse.Namespace) -> int:
    if minari_data_of(args.path) is not None:
        raise DatasetError(f"{args.path} is Minari's, expected a dataset of rollflow's own")
    return arguments.print_checks(check_dataset(DatasetFolder(args.path)))


def _merge(args: argparse.Namespace) -> None:
    _check_apart(args.paths, args.out)
    sources = [_source(path) for path in args.paths]
    first = _kinds_of(sources[0])
    for path, source in zip(args.paths, sources, strict=True):
        if (source.agents is None) != (sources[0].agents is None):
            several, one = (path, args.paths[0]) if source.agents else (args.paths[0], path)
            raise DatasetError(f"{several} is of several agents, and {one} of one, expected one kind")
        sides = f"in {args.paths[0]}", f"in {path}"
        kinds = {of: (first.get(of, kind), kind) for of, kind in _kinds_of(source).items()}
        differences = {of: kind_difference(*pair, sides) for of, pair in kinds.items()}
        if told := "; ".join(f"{of}{text}" for of, text in differences.items() if text is not None):
            raise DatasetError(f"{path} does not go with {args.paths[0]}: {told}; expected datasets of one kind")
    _write(sources, args.out)


def _kinds_of(source: DatasetSource) -> dict[str, dict[str, Any]]:
    """The kind of a dataset's steps, by nothing, or of each module's, by text that names it."""
    names = ("observation_space", "action_space", "columns")
    parts: dict[str, Any] = {name: getattr(source, name) for name in names}
    if source.agents is None:
        kinds = {"": parts}
    else:
        kinds = {f"module {each}: ": {name: of[each] for name, of in parts.items()} for each in source.columns}
    return {
        of: {name: part if name == "columns" else describe_space(part) for name, part in kind.items()}
        for of, kind in kinds.items()
    }


def _filter(args: argparse.Namespace) -> None:
    _check_apart([args.path], args.out)
    if np.isnan([each for each in (args.min_return, args.max_return) if each is not None]).any():
        raise DatasetError("a bound of returns is NaN, expected a number, which returns can be held against")
    source = DatasetSource(args.path)
    summary, runs = source.summary(), len(source.description["runs"])
    if strange := [run for run in args.runs or () if not 0 <= run < runs]:
        raise DatasetError(f"there is no run {strange[0]} in {args.path}, expected 0 to {runs - 1}")
    chosen = np.flatnonzero(_within(summary, args))
    if not len(chosen):
        raise DatasetError(f"none of {len(summary.returns)} episodes of {args.path} is within the bounds")
    _write([_source(args.path, chosen)], args.out)


def _within(summary: EpisodeSummary, args: argparse.Namespace) -> NDArray[np.bool_]:
    """bool[E]: whether each episode is within the bounds of the arguments."""
    kept = summary.is_whole if args.whole else np.ones(len(summary.returns), np.bool_)
    lows = {"return": summary.returns, "length": summary.lengths, "version": summary.oldest_version}
    for name, values in lows.items():
        if (low := getattr(args, f"min_{name}")) is not None:
            kept = kept & (values >= low)
    for name, values in {**lows, "version": summary.newest_version}.items():
        if (high := getattr(args, f"max_{name}")) is not None:
            kept = kept & (values <= high)
    return kept if args.runs is None else kept & np.isin(summary.runs, args.runs)


def _convert(args: argparse.Namespace) -> None:
    source = _source(args.path)
    if source.agents is not None:
        raise DatasetError(f"{args.path} is of several agents, expected one, such as the folder of one of its modules")
    spaces = source.observation_space, source.action_space
    folder = write_minari(source.fragments(), spaces, source.description, args.id, args.out)
    print(f"{folder} has {source.num_episodes} episodes, {source.num_steps} steps")


def _check_apart(paths: list[Path], out: Path) -> None:
    """Raise DatasetError if a dataset would be written to itself."""
    if out.resolve() in [path.resolve() for path in paths]:
        raise DatasetError(f"--out {out} is read as well, expected another folder")


def _source(path: Path, episodes: Any = None) -> DatasetSource:
    """A source of whole episodes that keeps little in memory."""
    steps = max(1, _BYTES_AT_ONCE // DatasetSource(path).step_nbytes)
    return DatasetSource(
        path, episodes=episodes, window_steps=steps, batch_size=min(steps, 8192), complete_episodes=True
    )


def _write(sources: list[DatasetSource], out: Path) -> None:
    """Write the episodes of sources to a dataset, with a line on what it has now.

    After an error a new dataset is not there at all, and the error says what one that was there has more.
    """
    with nullcontext(out) if out.exists() else whole_folder(out) as folder:
        sink = DatasetSink(folder)
        try:
            with sink:
                for source in sources:
                    for fragment in source.fragments():
                        sink(fragment)
        except DatasetError as error:
            if folder == out:
                raise DatasetError(f"{out} has {sink.num_steps} steps more, but not all: {error}") from error
            raise
    of = "steps" if sources[0].agents is None else "agents' steps"
    new, there = sum(each.num_episodes for each in sources), DatasetSource(out).num_episodes
    in_all = f"; {there} in all" if there > new else ""
    print(f"{out} has {new} episodes more, of {sink.num_steps} {of}{in_all}")
