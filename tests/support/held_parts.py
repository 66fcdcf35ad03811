"""Modules, connectors and environments that come to a place and wait there for a file, once for a folder."""

from pathlib import Path
from typing import Any

from held_envs import await_file
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule

from rollflow import ConnectorV2


class HeldCall:
    """Hangs in its third call, which the file `hangs` says, until the file `go` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def call(self) -> None:
        self.calls += 1
        if self.calls == 3 and not (self.folder / "hangs").exists():
            (self.folder / "hangs").touch()
            await_file(self.folder / "go")


class HeldModule(NumberedModule):
    """Hangs in its third forward pass."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.held = HeldCall(folder)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.held.call()
        return super()._forward(batch, **kwargs)


class HeldPiece(ConnectorV2):
    """Hangs in its third call."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.held = HeldCall(folder)

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.held.call()
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}  # nothing has to last


class HeldAgents(NumberedAgents):
    """Hangs in its third step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0, nested=0)
        self.held = HeldCall(folder)

    def step(self, actions: Any) -> Any:
        self.held.call()
        return super().step(actions)
