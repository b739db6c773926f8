"""Test the exit statuses of the commands, which the guide lists."""

from pathlib import Path

import numpy as np
import pytest

from jaxnorm.data import Normalizer
from jaxnorm.data.command import main as fit
from jaxnorm.data.convert import main as convert
from jaxnorm.data.show import main as show

COMMANDS = {"fit": fit, "show": show, "convert": convert}
TABLE = {
    "fit x.npz --out o.json": 0,
    "fit missing.npz": 1,
    "fit broken.npz": 1,
    "fit text.txt": 1,
    "fit folder": 1,
    "fit x.npz y.npz": 1,
    "fit nan.npz --out o.json": 1,
    "fit x.npz --out folder/none/o.json --resume": 1,
    "fit x.npz --out file/o.json": 1,
    "fit x.npz --format octo --out o.json": 1,
    "fit": 2,
    "fit x.npz --no": 2,
    "fit x.npz --format no": 2,
    "fit x.npz --pattern z=[n]": 2,
    "fit x.npz --rename z=a": 2,
    "fit x.npz --share a,z": 2,
    "fit x.npz --out o.txt": 2,
    "fit x.npz --out foreign.json": 2,
    "fit x.npz --out file --format makani": 2,
    "fit x.npz --out s3://a/o.json": 2,
    "fit interrupt.npz": 130,
    "show s.json": 0,
    "show missing.json": 1,
    "show broken.json": 1,
    "show foreign.json": 1,
    "show text.txt": 1,
    "show folder": 1,
    "show s.json --format openpi": 1,
    "show": 2,
    "show s.json --no": 2,
    "show s.json --format no": 2,
    "show s3://a/o.json": 2,
    "convert s.json o.json": 0,
    "convert missing.json o.json": 1,
    "convert broken.json o.json": 1,
    "convert foreign.json o.json": 1,
    "convert text.txt o.json": 1,
    "convert folder o.json": 1,
    "convert s.json o.json --from openpi": 1,
    "convert s.json none/o.json": 1,
    "convert s.json o.json --to octo": 1,
    "convert s.json": 2,
    "convert s.json o.json --to no": 2,
    "convert s.json o.json --rename z=a": 2,
    "convert s.json o.json --share a,z": 2,
    "convert s.json o.txt": 2,
    "convert s.json foreign.json": 2,
    "convert s.json file --to makani": 2,
    "convert s.json s3://a/o.json": 2,
    "convert s3://a/o.json o.json": 2,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = {"a": np.arange(6.0).reshape(3, 2)}
    np.savez("x.npz", **known)
    np.savez("y.npz", b=known["a"])
    np.savez("nan.npz", a=np.full((3, 2), np.nan))
    np.savez("interrupt.npz", a=np.full((3, 2), 7.0))
    Normalizer.fit([known]).save("s.json")
    for name, text in {
        "broken.npz": "PK",
        "broken.json": '{"jaxnorm": ',
        "foreign.json": '{"a": 1}',
        "text.txt": "text",
        "file": "",
    }.items():
        Path(name).write_text(text)
    Path("folder").mkdir()
    update = Normalizer.update

    def interrupted(self, batch, **options):
        if batch["a"][0, 0] == 7:
            raise KeyboardInterrupt
        return update(self, batch, **options)

    monkeypatch.setattr(Normalizer, "update", interrupted)


@pytest.mark.parametrize("line", TABLE)
def test_statuses(line, capsys):
    command, *arguments = line.split()
    try:
        status = COMMANDS[command](arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == TABLE[line]
    said = capsys.readouterr()
    # every failure is told, and nothing else was written as a result
    assert bool(said.err) == (status != 0)
    assert Path("foreign.json").read_text() == '{"a": 1}'
