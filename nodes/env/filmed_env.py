"""Environments that are filmed: a video of each episode, of what `render()` gives."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from rollflow.stream.data.errors import DatasetError

_DEFAULT_FPS = 30


class FilmedEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Environment whose first episodes are written to `slot-S-episode-N.mp4`, with a frame before and after each step.

        make        makes the environment, whose `render_mode` is "rgb_array"
        folder      of the videos, which is made
        slot        number of the environment
        episodes    number of episodes that are filmed

    A file is there once its episode has ended. Raises DatasetError without the package av, for an environment that does
    not render, and where the folder has videos of this slot.
    """

    def __init__(self, make: Callable[[], gym.Env[Any, Any]], folder: Path, slot: int, episodes: int) -> None:
        super().__init__(make())
        if self.env.render_mode != "rgb_array":
            raise DatasetError(
                f"the environment's render_mode is {self.env.render_mode!r}, expected 'rgb_array' for videos"
            ).see("dataset")
        folder.mkdir(parents=True, exist_ok=True)
        if there := next(folder.glob(f"slot-{slot}-episode-*.mp4"), None):
            raise DatasetError(f"{there} is there already, expected another folder for videos").see("dataset")
        self._av = import_av()
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
        """What is shown, u8[H, W, 3]; without its last row or column where the number is odd."""
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


def import_av() -> Any:
    """The module `av`. Raises DatasetError where it is not installed."""
    try:
        import av
    except ImportError:
        raise DatasetError("videos take the package av, which is not installed: pip install 'rollflow[video]'").see(
            "dataset"
        ) from None
    return av
