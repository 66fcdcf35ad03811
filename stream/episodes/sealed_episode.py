"""SealedEpisode: a read-only chunk of a fragment, and its buffer over infos."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.stream.data.errors import EpisodeError
from rollflow.stream.data.infos import info_of
from rollflow.stream.episodes.buffer import LookbackBuffer
from rollflow.stream.episodes.single_agent import SingleAgentEpisode, refusal


class SealedEpisode(SingleAgentEpisode):
    """A chunk of a fragment, read-only, since the fragment's columns are shared.

    To change or continue it, copy it: `SingleAgentEpisode.from_state(chunk.get_state())`.
    """

    add_env_step = concat_episode = refusal(
        "a fragment's chunk is read-only; write to a copy: SingleAgentEpisode.from_state(episode.get_state())"
    )


class InfosWindow(LookbackBuffer):
    """Buffer of one slot's info dicts, taken from gymnasium's vector infos of some rows.

    rows     vector infos of L + n rows
    last     vector infos of the last item; None: the last row's
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], slot: int, lookback: int, last: Mapping[str, Any] | None
    ) -> None:
        super().__init__([], lookback, name="infos")
        self._rows = [*rows[:-1], last] if last is not None else rows
        self._slot = slot

    def total(self) -> int:
        return len(self._rows)

    def item(self, position: int) -> Any:
        return info_of(self._rows[position], self._slot)

    def items(self, where: Any) -> Any:
        positions = range(*where.indices(self.total())) if isinstance(where, slice) else where
        return [self.item(position) for position in positions]

    def write(self, position: int, item: Any) -> None:
        raise EpisodeError("infos of a fragment are read-only")
