"""How commands end that are interrupted: quietly and at once, with status 130."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Timer, main_thread

INTERRUPTED = 130


def is_command() -> bool:
    """Whether this process was started as ``python -m jaxnorm`` or by the script ``jaxnorm`` that was installed with it."""
    arguments, given = getattr(sys, "argv", [""]), sys.orig_argv
    if arguments[:1] == ["-m"]:  # as long as Python looks for the module; its arguments are the last of those given
        return given[-len(arguments) :][:1] in (["jaxnorm"], ["-mjaxnorm"])
    folder, name = os.path.split(os.path.realpath("".join(arguments[:1])))
    return name == "jaxnorm" and folder == os.path.realpath(os.path.dirname(sys.executable))


def _end(number: int, frame: object) -> None:
    os._exit(INTERRUPTED)


def _again(dropped) -> None:
    """What Python drops, within callbacks of its garbage collector (JAX has one): an interrupt comes once more, a bit later."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        Timer(0.01, signal.pthread_kill, (main_thread().ident, signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(dropped)


def command(run: Callable[[], int]) -> int:
    """Runs what a process was started for; its exit status. Interrupted, by SIGTERM too, the process ends here.

    It then ends without Python shutting down, which crashes where another thread is within JAX's compiler.
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
        status = INTERRUPTED  # whatever was made of it: modules in C that are imported make it an ImportError
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once more would not end it sooner
        with suppress(OSError, ValueError):  # nobody may be there to read
            if sys.stdout.isatty():
                sys.stdout.write("\033[?25h")  # the cursor, which a display of progress hides
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(INTERRUPTED)
    return status


if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)  # until command() takes over: imports of a second would end in a traceback
