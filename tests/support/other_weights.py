"""Modules that load other weights than they are given: half a unit more, without a word."""

import os
from pathlib import Path
from typing import Any

import numbered_module
import torch


class NumberedModule(numbered_module.NumberedModule):
    """Does so wherever it is."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_state_dict(state_dict, *args, **kwargs)
        if self._spoils():
            with torch.no_grad():
                self.weight += 0.5
        return loaded

    def _spoils(self) -> bool:
        return True


class SpoiltInOneWorker(NumberedModule):
    """Does so in the worker process that loads the first, and not where it was made."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.at_home, self.claim = os.getpid(), folder / "spoilt"

    def _spoils(self) -> bool:
        if os.getpid() == self.at_home:
            return False
        try:
            with self.claim.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            pass
        while not (claimed := self.claim.read_text()):  # it is being written
            pass
        return claimed == str(os.getpid())
