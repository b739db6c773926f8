"""End commands quietly: at once when interrupted, and when nobody reads what they print."""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Timer, main_thread

# 128 + SIGINT, the status that shells report for an interrupted command
INTERRUPTED = 130


def _repeat_interrupt(dropped) -> None:
    """Repeat an interrupt that Python has dropped.

    Python drops what is raised within a callback of its garbage collector, and JAX has
    such a callback.
    """
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        # raised in this callback it would be dropped again: send it when the callback
        # is over
        Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def _is_output_unread() -> bool:
    """Return whether the reader of standard output is gone, such as a ``head`` that has enough."""
    # tell by the pipe: another one may be broken
    output = select.poll()
    output.register(sys.stdout, 0)
    if not output.poll(0):
        return False
    # what is left would be written, and fail, when Python ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def command(run: Callable[[], int]) -> int:
    """Run the command of this process, and return its exit status.

    After an interrupt, by SIGINT or SIGTERM, the process ends here. It leaves without
    the shutdown of Python, which crashes while another thread runs JAX's compiler. The
    status is 1 if the reader of standard output is gone.
    """
    interrupted = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        # a shell starts commands with & so that they ignore interrupts: leave them so
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    sys.unraisablehook = _repeat_interrupt
    try:
        status = run()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException as error:
        if not interrupted:
            if isinstance(error, BrokenPipeError) and _is_output_unread():
                return 1
            raise
        # modules in C turn an interrupt during their import into an ImportError, so
        # that the kind of the exception does not tell
        status = INTERRUPTED
    if status == INTERRUPTED:
        # a second interrupt could only break off what follows, and would not end it
        # sooner
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # the reader of a pipe may be gone
        with suppress(OSError, ValueError):
            if sys.stdout.isatty():
                # show the cursor, which a display of progress hides
                sys.stdout.write("\033[?25h")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(INTERRUPTED)
    return status
