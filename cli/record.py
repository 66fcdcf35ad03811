"""Have a saved policy play whole episodes, and write them to a dataset.

The same seed gives the same steps. Ctrl-C ends it; what was played until then is in the dataset.
"""

import argparse
import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rollflow import DatasetSink, Policy
from rollflow.cli import arguments
from rollflow.nodes.rollout.rollout import Rollout, rollout_of
from rollflow.stream.data.errors import DatasetError
from rollflow.stream.data.system import require_packages
from rollflow.stream.fragments.fragment import ChunkIndex, Fragment

_DEFAULT_FPS = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--env", required=True, help=arguments.ENV_HELP)
    parser.add_argument("--policy", type=Path, required=True, metavar="PATH", help="a saved policy")
    parser.add_argument("--episodes", type=int, required=True, metavar="N", help="whole episodes")
    parser.add_argument("--out", type=Path, required=True, help="the dataset's folder; one that is there is added to")
    parser.add_argument("--num-envs", type=int, default=8, help="environments side by side, with equal shares (8)")
    parser.add_argument("--seed", type=int, help="of environments and sampling (a fresh one)")
    parser.add_argument(
        "--extra",
        nargs="*",
        metavar="NAME",
        help="outputs of the module to be written; none of them without a name (all)",
    )
    parser.add_argument(
        "--video", type=Path, metavar="FOLDER", help="write a video of each episode, from render() (extra video)"
    )
    arguments.add_allow(parser)
    parser.add_argument("--device", help="where forward passes are done")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.episodes < 1 or args.num_envs < 1:
        raise ValueError(f"--episodes {args.episodes} --num-envs {args.num_envs}, expected 1 or more of each")
    policy = Policy.load(args.policy, allow=args.allow, device=args.device)
    env, num_envs = arguments.environment_of(args.env), min(args.num_envs, args.episodes)
    if args.video is None:
        rollout = rollout_of(policy, env, num_envs=num_envs, seed=args.seed)
    else:
        require_packages("a video", "video", "av", error=DatasetError)
        make = env if callable(env) else partial(gym.make, env, render_mode="rgb_array")
        shares = enumerate(shares_of(args.episodes, num_envs).tolist())
        envs = [partial(FilmedEnv, make, args.video, slot, share) for slot, share in shares]
        rollout = rollout_of(policy, envs, seed=args.seed)
    metadata = {"policy": str(args.policy), "trained_on": policy.trained_on}
    try:
        with rollout, DatasetSink(args.out, rollout=rollout, extra=args.extra, metadata=metadata) as sink:
            try:
                for count in record_episodes(rollout, sink, args.episodes):
                    if sys.stderr.isatty():
                        print(f"\r{count} episodes", end="", file=sys.stderr, flush=True)
            finally:
                sink.close()
                if sys.stderr.isatty():
                    print(file=sys.stderr)  # behind the number of episodes
                if sink.num_steps:
                    print(f"{args.out} has {sink.num_steps} steps more, with seed {rollout.seed}", flush=True)
    finally:
        if lost := rollout.lost.get("failed"):
            print(f"{lost} steps of the fragment that was being made are not in it", file=sys.stderr, flush=True)


def record_episodes(rollout: Rollout, sink: DatasetSink, episodes: int) -> Iterator[int]:
    """Run a rollout of one lane, and write the first episodes of its slots to a sink, in equal shares.

    episodes    number, which is reached unless the rollout ends before

    Gives the number of whole episodes so far, after each fragment.
    """
    shares = shares_of(episodes, rollout.environments.num_envs)
    count = 0
    for fragment in rollout.fragments():
        chunks = fragment.chunks
        kept = chunks.number < shares[chunks.slot]
        if kept.any():
            sink(_with_chunks(fragment, kept))
        count += int(np.count_nonzero((chunks.terminated | chunks.truncated) & kept))
        yield count
        if count == episodes:
            break


def shares_of(episodes: int, slots: int) -> NDArray[np.int64]:
    """How many of some episodes each slot plays, i64[slots]: as equal as can be, the first ones one more."""
    shares = np.full(slots, episodes // slots)
    shares[: episodes % slots] += 1
    return shares


def _with_chunks(fragment: Fragment, kept: NDArray[np.bool_]) -> Fragment:
    """A fragment with some of another's chunks, and with all of its columns and last observations.

    kept    bool[C]
    """
    if kept.all():
        return fragment
    chosen = copy.copy(fragment)
    vars(chosen).pop("row_order", None)
    chosen.chunks = ChunkIndex(**{each.name: getattr(fragment.chunks, each.name)[kept] for each in fields(ChunkIndex)})
    return chosen


class FilmedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Environment whose first episodes are written to `slot-S-episode-N.mp4`, with a frame before and after each step.

        make        makes the environment, whose `render_mode` is "rgb_array"
        folder      of the videos, which is made
        slot        number of the environment
        episodes    number of episodes that are filmed

    A file is there once its episode has ended. It takes the package av. Raises DatasetError for an environment that
    does not render, and if the folder has videos of this slot.
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], folder: Path, slot: int, episodes: int) -> None:
        super().__init__(make())
        if self.env.render_mode != "rgb_array":
            raise DatasetError(
                f"the environment's render_mode is {self.env.render_mode!r}, expected 'rgb_array' for videos"
            )
        folder.mkdir(parents=True, exist_ok=True)
        if there := next(folder.glob(f"slot-{slot}-episode-*.mp4"), None):
            raise DatasetError(f"{there} is there already, expected another folder for videos")
        self._av = importlib.import_module("av")
        self._folder, self._slot, self._left, self._number = folder, slot, episodes, 0
        self._file: Any = None  # in H.264, of the episode that is filmed; it gets its name once it is whole

    def reset(self, **options: Any) -> Any:
        """Reset the environment, and begin the video of an episode that is to be filmed."""
        made = self.env.reset(**options)
        self._drop()
        if self._number < self._left:
            self._path = self._folder / f"slot-{self._slot}-episode-{self._number}.mp4"
            self._partial = self._path.with_name(f".{self._path.name}")
            self._file = self._av.open(str(self._partial), "w", format="mp4")
            fps = Fraction(self.env.metadata.get("render_fps") or _DEFAULT_FPS).limit_denominator(1000)
            self._stream = self._file.add_stream("libx264", rate=fps)
            self._stream.pix_fmt = "yuv420p"
            picture = self._picture()
            self._stream.height, self._stream.width = picture.shape[:2]
            self._add(picture)
        self._number += 1
        return made

    def step(self, action: Any) -> Any:
        """Step the environment; an episode's end ends its video."""
        made = self.env.step(action)
        if self._file is not None:
            self._add(self._picture())
            if made[2] or made[3]:
                self._file.mux(self._stream.encode())  # the rest
                self._file.close()
                self._partial.replace(self._path)
                self._file = None
        return made

    def close(self) -> None:
        """Close the environment; the video of an episode that goes on is removed."""
        self._drop()
        self.env.close()

    def _picture(self) -> Any:
        """What is shown, u8[H, W, 3]; without its last row or column if the number is odd."""
        picture: Any = self.env.render()
        height, width = (size - size % 2 for size in picture.shape[:2])
        return np.ascontiguousarray(picture[:height, :width])

    def _add(self, picture: Any) -> None:
        self._file.mux(self._stream.encode(self._av.VideoFrame.from_ndarray(picture, format="rgb24")))

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)  # it is made with the first frame that is coded
            self._file = None
