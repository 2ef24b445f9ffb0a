"""Where the program begins. Until its modules are imported, Ctrl-C ends it without a traceback."""

import signal


def main() -> int:
    """The command line."""
    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is to be ignored
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from billfish.cli.main import main as run

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
