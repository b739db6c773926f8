"""Test the cell that installs the library on Colab, with pip and Colab's module simulated."""

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CELL = (NOTEBOOKS / "install.py").read_text()
HAS = {"jaxnorm": "0.1.0", "jax": "0.7.2", "jaxlib": "0.7.2", "flax": "0.11.2"}
WHEEL = "jaxnorm-0.1.0-py3-none-manylinux_2_28_x86_64.whl"


@pytest.fixture
def colab(monkeypatch, tmp_path):
    """``colab(pip=...)``: runs the cell where ``pip`` makes what is installed, or returns its
    status; gives the commands.
    """
    installed, commands = dict(HAS), []
    del installed["jaxnorm"]

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXNORM", raising=False)
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "distributions", lambda: [SimpleNamespace(name=name) for name in installed]
    )

    def start(address="", status=0, **makes):
        def run(command):
            commands.append(command[1:])
            installed.update(makes)
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr("subprocess.run", run)
        exec(CELL.replace('ADDRESS = ""', f"ADDRESS = {address!r}"), {})
        return commands

    start.installed = installed
    return start


def uploads(monkeypatch, **files):
    """Colab's module, whose user uploads these."""
    google, module = ModuleType("google"), ModuleType("google.colab")
    module.files = SimpleNamespace(upload=lambda: files)
    monkeypatch.setitem(sys.modules, "google", google)
    monkeypatch.setitem(sys.modules, "google.colab", module)


def test_where_it_is_installed_nothing_is(colab, capsys):
    colab.installed["jaxnorm"] = "0.1.0"
    assert colab() == []
    assert capsys.readouterr().out.startswith(
        "jaxnorm 0.1.0, jax 0.7.2, jaxlib 0.7.2, flax 0.11.2 on Python 3."
    )


def test_an_address(colab, capsys):
    (command,) = colab(f"https://host/{WHEEL}", jaxnorm="0.1.0", rich="13.9.4")
    assert command == ["-m", "pip", "install", "-q", f"jaxnorm[experiments] @ https://host/{WHEEL}"]
    assert capsys.readouterr().out.startswith("jaxnorm 0.1.0, jax 0.7.2")


def test_a_folder_of_that_name_is_not_an_installation(colab, monkeypatch, tmp_path):
    (tmp_path / "jaxnorm").mkdir()  # a clone beside the notebook
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jaxnorm", raising=False)
    (command,) = colab(WHEEL, jaxnorm="0.1.0")
    assert command[-1] == f"jaxnorm[experiments] @ {(tmp_path / WHEEL).as_uri()}"


def test_spaces_around_an_address(colab):
    assert (
        colab(f"  https://host/{WHEEL} \n", jaxnorm="0.1.0")[0][-1]
        == f"jaxnorm[experiments] @ https://host/{WHEEL}"
    )


def test_a_repository(colab):
    assert (
        colab("git+https://host/jaxnorm", jaxnorm="0.1.0")[0][-1]
        == "jaxnorm[experiments] @ git+https://host/jaxnorm"
    )


@pytest.mark.parametrize(
    "address", ["jaxnorm", "host/jaxnorm", "ftp://host/jaxnorm.whl", "jaxnorm-0.1.0.tar.gz"]
)
def test_what_is_neither_an_address_nor_a_wheel(colab, address):
    with pytest.raises(
        SystemExit,
        match=(
            f"ADDRESS must be an address that begins with .* in .whl: it is '{address}'. Correct it"
        ),
    ):
        colab(address)


def test_a_path_from_the_environment(colab, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXNORM", WHEEL)
    assert colab(jaxnorm="0.1.0")[0][-1] == f"jaxnorm[experiments] @ {(tmp_path / WHEEL).as_uri()}"


def test_an_upload_has_the_name_that_pip_reads(colab, monkeypatch):
    uploads(monkeypatch, **{WHEEL.replace(".whl", " (2).whl"): b"content"})
    place = colab(jaxnorm="0.1.0")[0][-1].removeprefix("jaxnorm[experiments] @ file://")
    assert (Path(place).name, Path(place).read_bytes()) == (WHEEL, b"content")


def test_no_upload(colab, monkeypatch):
    uploads(monkeypatch)
    with pytest.raises(SystemExit, match="Nothing was uploaded: run this cell again"):
        colab()


def test_elsewhere_it_asks_for_an_address(colab, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", None)
    with pytest.raises(
        SystemExit, match="Put the address or the path of a wheel of jaxnorm into ADDRESS"
    ):
        colab()


def test_what_pip_replaces_takes_a_restart(colab):
    with pytest.raises(
        SystemExit, match=r"Restart the session .*: pip has replaced jaxlib 0\.7\.2 by 0\.8\.1"
    ):
        colab(WHEEL, jaxnorm="0.1.0", jaxlib="0.8.1")


def test_pip_fails(colab):
    with pytest.raises(SystemExit, match=f"pip cannot install {WHEEL}: see pip's message above"):
        colab(WHEEL, status=1)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9c]*.py")), ids=lambda path: path.stem)
def test_every_notebook_has_the_cell(path):
    assert f"# %%\n{CELL.rstrip()}\n\n# %%" in path.read_text()
