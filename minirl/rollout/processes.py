"""For processes that rank 0 starts: what they import, and that they end with it."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1


@contextmanager
def main_module_stays_here() -> Iterator[None]:
    """Processes started inside do not import this program's main module, as multiprocessing would
    have it: they need nothing of it, and importing all of minirl takes seconds."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in kept:
        del main.__file__
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def visible_devices(device_ids: list[int]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that gets these of the devices that this one sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(max(device_ids) + 1)]
    return ",".join(names[i] for i in device_ids)


def end_with(pid: int, grace_s: float) -> None:
    """From now on this process gets SIGTERM when the process `pid` is gone, however that ended,
    and SIGKILL `grace_s` seconds later; also when it is stopped, if its parent goes with `pid`."""
    signal_at_end_of_parent(signal.SIGCONT)

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os.kill(os.getpid(), signal.SIGKILL)

    when_gone(pid, end)


def signal_at_end_of_parent(number: signal.Signals) -> None:
    """The kernel sends `number` to this process when the thread that started it is gone: SIGKILL
    and SIGCONT reach also a process that is stopped."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def when_gone(pid: int, then: Callable[[], None]) -> None:
    """Call `then`, in a thread, when the process `pid` is gone."""

    def wait() -> None:
        try:
            other = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # gone already
        else:
            select.select([other], [], [])
        then()

    threading.Thread(target=wait, name=f"end with {pid}", daemon=True).start()
