"""How commands end that are interrupted: quietly and at once, with status 130."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Timer, main_thread

INTERRUPTED = 130


def _again(dropped) -> None:
    """What Python drops, within callbacks of its garbage collector (JAX has one): an interrupt
    comes once more, a bit later.
    """
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def command(run: Callable[[], int]) -> int:
    """Runs what a process was started for; its exit status. Interrupted, by SIGTERM too, the
    process ends here.

    It then ends without Python shutting down, which crashes where another thread is within JAX's
    compiler.
    """
    interrupted = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as behind a shell's &
            signal.signal(number, interrupt)
    sys.unraisablehook = _again
    try:
        status = run()
    except BaseException:
        if not interrupted:
            raise
        # whatever was made of it: modules in C that are imported make it an ImportError
        status = INTERRUPTED
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once more would not end it sooner
        with suppress(OSError, ValueError):  # nobody may be there to read
            if sys.stdout.isatty():
                sys.stdout.write("\033[?25h")  # the cursor, which a display of progress hides
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(INTERRUPTED)
    return status
