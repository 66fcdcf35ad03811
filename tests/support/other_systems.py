"""A program for a child process that has no names of the system which macOS, or Windows, has not."""

_PROGRAM = """
import functools, importlib.abc, os, select, selectors, signal, socket, sys
import asyncio, multiprocessing, subprocess, tempfile  # as other systems have them, of which these use their own names

import anyio, cloudpickle, gymnasium, msgpack, numpy, optree, torch


class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


for name in {modules}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Blocked())
socket.socketpair = functools.partial(socket.socketpair, getattr(socket, "AF_UNIX", None))
selectors.DefaultSelector = {selector}
for module, names in {names}.items():
    for name in names.split():
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
"""

_MACOS = {
    "select": "epoll EPOLLIN EPOLLOUT EPOLLERR EPOLLHUP",
    "os": "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING pidfd_open eventfd sched_getaffinity posix_fadvise",
    "signal": "pidfd_send_signal SIGRTMIN SIGRTMAX",
}
_WINDOWS = {
    "select": f"{_MACOS['select']} poll POLLIN POLLOUT POLLERR POLLHUP POLLNVAL POLLPRI",
    "os": f"{_MACOS['os']} register_at_fork sysconf fork getuid geteuid getpgrp setsid killpg waitid uname getloadavg",
    "signal": f"{_MACOS['signal']} SIGUSR1 SIGUSR2 SIGKILL SIGSTOP SIGCONT SIGHUP SIGQUIT SIGALRM pthread_kill",
    "socket": "AF_UNIX send_fds recv_fds SCM_RIGHTS",
}
SYSTEMS = {
    "macos": _PROGRAM.format(modules="set()", selector="selectors.PollSelector", names=_MACOS),
    "windows": _PROGRAM.format(
        modules={"fcntl", "grp", "pwd", "resource", "termios", "tty"},
        selector="selectors.SelectSelector",
        names=_WINDOWS,
    ),
}
