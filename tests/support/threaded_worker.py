"""A worker module that begins a thread when it is imported: no process can be forked off one that has imported it."""

import threading

from asked_worker import main

__all__ = ["main"]
threading.Thread(target=threading.Event().wait, daemon=True).start()
