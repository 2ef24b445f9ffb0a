"""Where the program begins. Until its modules are imported, Ctrl-C ends it without a traceback."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

SOON = 0.01  # seconds between looks at a thread


def main() -> int:
    """The command line."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from billfish.cli.main import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = interrupt_again
    return run()


def interrupt_again(lost: UnraisableHookArgs) -> None:
    """Send Ctrl-C again that came within a destructor or the callback of a weak reference: Python prints a traceback
    and goes on."""
    if lost.exc_type is KeyboardInterrupt:
        _thread.start_new_thread(interrupt, ())  # `threading` would wait here, where another one is lost, too
    else:
        sys.__unraisablehook__(lost)


def interrupt() -> None:
    """Send SIGINT to the main thread, when it has left `interrupt_again`."""
    main = threading.main_thread().ident or 0
    while is_within(interrupt_again, main):
        time.sleep(SOON)
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        signal.pthread_kill(main, signal.SIGINT)


def is_within(function: Any, thread: int) -> bool:
    """Whether a thread is in a function, or in one that it has called."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None
