"""Modules, connectors and environments of several agents that are held in a call, once for a folder.

As `Held`, of slot 0: `await_held(folder, 0)` waits until one is there, and `let_go(folder, 0)` has it go on.
"""

from pathlib import Path
from typing import Any

from held_envs import await_file
from numbered_agents import NumberedAgents
from numbered_module import NumberedModule

from rollflow import ConnectorV2


class HeldCall:
    """Is held in its third call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def call(self) -> None:
        self.calls += 1
        if self.calls == 3 and not (self.folder / "held 0 0").exists():
            (self.folder / "held 0 0").touch()
            await_file(self.folder / "go 0 0")


class Holding:
    """Mixed into what is held in a call."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.held = HeldCall(folder)


class HeldModule(Holding, NumberedModule):
    """Is held in its third forward pass."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        self.held.call()
        return super()._forward(batch, **kwargs)


class HeldPiece(Holding, ConnectorV2):
    """Is held in its third call."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.held.call()
        return batch

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}  # nothing has to last


class HeldAgents(NumberedAgents):
    """Is held in its third step, or its third reset."""

    def __init__(self, folder: Path, method: str) -> None:
        super().__init__(0, nested=0)
        self.held, self.method = HeldCall(folder), method

    def step(self, actions: Any) -> Any:
        if self.method == "step":
            self.held.call()
        return super().step(actions)

    def reset(self, **kwargs: Any) -> Any:
        if self.method == "reset":
            self.held.call()
        return super().reset(**kwargs)
