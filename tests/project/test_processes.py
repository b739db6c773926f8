"""Test that several processes of this machine train to the parameters of one.

They end when one of them is lost, and go on from a checkpoint.
"""

import signal

import pytest
from cases import long_sweep

from examples import processes

pytestmark = pytest.mark.usefixtures("ordinary_promotion")

ALL_DEVICES = [
    ("shard_map", 2, 1),
    ("jit", 2, 1),
    ("shard_map", 4, 1),
    ("jit", 4, 1),
    ("shard_map", 2, 2),
]
# the example's words; JAX's
LOST = (
    "another process ended or cannot be reached",
    "This most likely indicates that another task died",
)


@pytest.fixture(autouse=True)
def _quick_children(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # much as conftest.py has it here
    # by one process for the next
    monkeypatch.setenv(
        "JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled")
    )
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def shares_of(count):
    """All full; uneven; the last with padding alone."""
    return [
        [16] * count,
        [16 - 5 * number % 16 for number in range(count)],
        [*[16] * (count - 1), 0],
    ]


def arguments(shares, steps, *more):
    return [
        "--steps",
        str(steps),
        "--shares",
        *(",".join(map(str, row)) for row in shares),
        *map(str, more),
    ]


@pytest.mark.parametrize(("how", "count", "devices"), long_sweep(ALL_DEVICES, quick=()))
def test_parameters_are_those_of_one_process(how, count, devices, tmp_path):
    shares, steps = shares_of(count), 6
    more = "--how", how, "--devices", devices, "--record", tmp_path
    ended = processes.launch(count, arguments(shares, steps, *more), timeout=300)
    assert [process.code for process in ended] == [0] * count, ended
    assert len([*tmp_path.iterdir()]) == steps * count
    assert processes.difference(tmp_path, shares, steps) <= processes.BOUND
    # it would show if padding counted
    assert processes.difference(tmp_path, shares[:1], steps) > 100 * processes.BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 0), (2, 1), (4, 2)])
def test_after_a_kill_the_others_end_and_training_goes_on_from_the_checkpoint(
    count, victim, tmp_path
):
    shares, steps, record = shares_of(count), 8, tmp_path / "record"
    record.mkdir()
    usual = arguments(shares, steps, "--checkpoint", tmp_path / "saved", "--save-every", 4)
    ended = processes.launch(count, usual, timeout=300, of_one={victim: ["--stop-at", "6"]})
    assert ended[victim].code == -signal.SIGKILL
    for process in set(range(count)) - {victim}:
        code, seconds, text = ended[process]
        assert code in (1, -signal.SIGABRT), text
        assert any(words in text for words in LOST)
        assert seconds - ended[victim].seconds < 15  # a second at most on an idle machine
    again = processes.launch(count, [*usual, "--record", str(record)], timeout=300)
    assert [process.code for process in again] == [0] * count, again
    # saved after 0 and 4
    assert {int(file.stem.split("-")[0]) for file in record.iterdir()} == {5, 6, 7}
    assert processes.difference(record, shares, steps) <= processes.BOUND


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_halt_the_others_end(victim, monkeypatch):
    """A process that is alive and silent is lost after the heartbeat's timeout."""
    monkeypatch.setattr(processes, "PATIENCE", 1)  # for the halted one: nothing but a kill ends it
    usual = arguments(shares_of(2), 8, "--heartbeat", 5)
    ended = processes.launch(
        2,
        usual,
        timeout=300,
        of_one={victim: ["--stop-at", "3", "--stop-by", str(int(signal.SIGSTOP))]},
    )
    code, seconds, text = ended[1 - victim]
    assert code in (1, -signal.SIGABRT), text
    assert any(words in text for words in LOST)
    assert ended[victim].code == -signal.SIGKILL
    assert seconds < 200
