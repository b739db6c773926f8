"""Test runs made several at a time: what is kept, in which order, and who stops when."""

import io
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace

import pytest
from rich.console import Console

import jaxnorm
from jaxnorm.experiments import report
from jaxnorm.experiments.command import main
from jaxnorm.experiments.runs import carry_out


@dataclass(frozen=True)
class Settings:
    numbers: tuple[int, ...]

    def runs(self):
        return [SimpleNamespace(number=number) for number in self.numbers]


def carried_out(tmp_path, measure, numbers=(0, 1, 2, 3), jobs=2, resume=False, summarize=str):
    console = Console(file=io.StringIO())
    try:
        return carry_out(
            Settings(numbers),
            ("number",),
            measure,
            summarize,
            tmp_path,
            console,
            resume=resume,
            jobs=jobs,
        )
    finally:
        tmp_path.joinpath("shown").write_text(console.file.getvalue())


def numbers_of(results):
    return [(run["number"], run["square"]) for run in results["runs"]]


def test_so_many_runs_are_made_at_a_time(tmp_path):
    together = Barrier(2, timeout=60)  # passed by two at a time only

    def measure(run, on_progress):
        together.wait()
        return {"square": run.number**2}

    results = carried_out(tmp_path, measure)
    assert numbers_of(results) == [(0, 0), (1, 1), (2, 4), (3, 9)]
    assert results["jobs"] == 2


def test_results_are_in_the_order_of_the_settings_whatever_finishes_first(tmp_path):
    second_is_done = Event()

    def measure(run, on_progress):
        if run.number == 0:
            assert second_is_done.wait(60)
        if run.number == 3:
            second_is_done.set()
        return {"square": run.number**2}

    assert numbers_of(carried_out(tmp_path, measure)) == [(0, 0), (1, 1), (2, 4), (3, 9)]
    shown = (tmp_path / "shown").read_text().splitlines()
    assert shown[-1].startswith("0: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, report.ResultsError])
def test_where_one_fails_the_others_stop_and_the_finished_are_kept(tmp_path, error):
    first_is_kept, stopped = Event(), Event()

    def measure(run, on_progress):
        if run.number == 0:
            return {"square": 0}
        if run.number == 1:
            assert first_is_kept.wait(60)
            raise error
        if run.number == 3:
            pytest.fail("begun though the one before had failed")
        while not report.read(tmp_path)["runs"]:
            on_progress(0, 1)
        first_is_kept.set()
        try:
            while True:
                on_progress(1, 2)
        finally:
            stopped.set()

    with pytest.raises(error):
        carried_out(tmp_path, measure)
    # at their next step, for which nobody waits: it may be compiled for long
    assert stopped.wait(60)
    assert numbers_of(report.read(tmp_path)) == [(0, 0)]
    assert ("Stopped. 1 of 4 runs are in" in (tmp_path / "shown").read_text()) == (
        error is KeyboardInterrupt
    )

    def go_on(run, on_progress):
        return {"square": run.number**2}

    resumed = carried_out(tmp_path, go_on, jobs=3, resume=True)
    assert numbers_of(resumed) == [(0, 0), (1, 1), (2, 4), (3, 9)]
    assert resumed["jobs"] == 3
    assert carried_out(tmp_path, go_on, jobs=4, resume=True) == resumed  # nothing was left to do


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_drops_still_stops(tmp_path, monkeypatch, number, jobs):
    """As it drops all errors within callbacks of its garbage collector, of which JAX has one."""
    dropped, sent = [], Event()
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))

    class Dropping:
        def __del__(self):
            signal.raise_signal(number)

    def measure(run, on_progress):
        if run.number > 0:
            assert sent.wait(60)
            on_progress(1, 2)
        return {"square": run.number**2}

    def summarize(found):  # in the main thread, the one that gets signals
        Dropping()
        sent.set()
        return "told"

    before = signal.signal(number, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            carried_out(tmp_path, measure, jobs=jobs, summarize=summarize)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert dropped == [KeyboardInterrupt]
    assert numbers_of(report.read(tmp_path)) == [(0, 0)]


@pytest.mark.usefixtures("ordinary_promotion")
@pytest.mark.slow
def test_numbers_do_not_depend_on_how_many_run_at_a_time(tmp_path):
    small = [
        "compare",
        "sequential",
        "--epochs",
        "1",
        "--train-examples",
        "64",
        "--batch-sizes",
        "32",
        "--variants",
        "rnn-rows",
    ]
    for jobs in "12":
        assert (
            main([*small, "--norms", "none,layer", "--jobs", jobs, "--out", str(tmp_path / jobs)])
            == 0
        )
    one, two = (report.read(tmp_path / jobs) for jobs in "12")
    assert (one["jobs"], two["jobs"]) == (1, 2)
    for run in one["runs"] + two["runs"]:
        del run["steps_per_second"]
    assert one["runs"] == two["runs"]


def ended(*command, path=()):
    """A process of its own that interrupts are not hidden from, as they are from what a shell runs
    beside others.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(map(str, [*path, Path(jaxnorm.__file__).parents[1]])),
    }
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_command_ends_without_python_shutting_down(name):
    """Which crashes while JAX compiles; what was printed is kept, though it is not a line yet."""
    code = f"""
import atexit, signal
from jaxnorm.experiments.interrupts import command
def run():
    atexit.register(print, "shutting down")
    print("kept", end="")
    signal.raise_signal(signal.{name})
raise SystemExit(command(run))
"""
    found = ended(sys.executable, "-c", code)
    assert (found.returncode, found.stdout, found.stderr) == (130, "kept", "")


DROPPED = """
    class Dropping:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)
    Dropping()
    time.sleep(100)
"""
TURNED = """
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("initialization failed")
"""


@pytest.mark.parametrize("lines", [DROPPED, TURNED], ids=["dropped", "turned"])
def test_an_interrupt_that_is_dropped_or_turned_into_an_error_ends_a_command(lines):
    """By Python within callbacks of its garbage collector; by modules written in C, while they are
    imported.
    """
    code = (
        "import signal, time\nfrom jaxnorm.experiments.interrupts import command\n"
        f"def run():{lines}\nraise SystemExit(command(run))"
    )
    found = ended(sys.executable, "-c", code)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_a_command_that_is_not_interrupted_ends_as_usual():
    code = """
import atexit
from jaxnorm.experiments.interrupts import command
atexit.register(print, "shutting down")
raise SystemExit(command(lambda: 1))
"""
    found = ended(sys.executable, "-c", code)
    assert (found.returncode, found.stdout, found.stderr) == (1, "shutting down\n", "")


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "while it prints"])
def test_a_command_whose_output_nobody_reads_ends_quietly(lines):
    code = f"""
import sys
from jaxnorm.experiments.interrupts import command
sys.stdin.read()
raise SystemExit(command(lambda: print("line\\n" * {lines}) or 0))
"""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    process.stdout.close()
    process.stdin.close()
    assert (process.stderr.read(), process.wait()) == (b"", 1)
    process.stderr.close()


@pytest.fixture
def interrupting(tmp_path):
    """A folder with a ``jax`` that is interrupted while it is imported."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\n"
    )
    return tmp_path


def test_an_interrupt_while_modules_are_imported_is_quiet(interrupting):
    script = interrupting / "bin" / "jaxnorm"  # as installers write it
    script.parent.mkdir()
    script.write_text("from jaxnorm.__main__ import main\nraise SystemExit(main())\n")
    for command in (
        [sys.executable, "-m", "jaxnorm", "compare"],
        [sys.executable, "-mjaxnorm"],
        [sys.executable, script, "compare"],
    ):
        found = ended(*command, path=[interrupting])
        assert (found.returncode, found.stdout, found.stderr) == (130, "", ""), command


def test_importing_the_library_leaves_interrupts_alone(interrupting):
    script = interrupting / "jaxnorm"  # the name alone does not make it the command
    script.write_text("import jaxnorm.norms.axes\n")
    for command in (
        [sys.executable, "-c", "import jaxnorm.norms.axes", "-m", "jaxnorm"],
        [sys.executable, script],
    ):
        found = ended(*command, path=[interrupting])
        assert found.returncode == -signal.SIGINT, command
        assert found.stderr.endswith("KeyboardInterrupt\n"), command


def test_nobody_waits_for_what_is_compiled_when_interrupted(tmp_path):
    begun, interrupted, compiled = Event(), Event(), Event()

    def measure(run, on_progress):
        if run.number == 0:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        interrupted.wait(10)  # within JAX's compiler, as it were
        compiled.set()
        return {"square": run.number**2}

    with pytest.raises(KeyboardInterrupt):
        carried_out(tmp_path, measure, numbers=(0, 1))
    assert not compiled.is_set()
    interrupted.set()
