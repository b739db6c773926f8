"""dataset_statistics.json of OpenVLA: Octo's, with q01 and q99 as the names of quantiles.

The file is that of ``prismatic.vla.datasets.rlds.utils.data_utils``
(https://github.com/openvla/openvla), which holds the entries of each data set by its name. The
config.json of a model holds them as well, under ``norm_stats``.
"""

from pathlib import Path

from jaxnorm.data.formats import documents
from jaxnorm.data.formats.contents import Contents, Statistics
from jaxnorm.data.formats.octo import holds, read_keys, write_keys
from jaxnorm.data.formula import Formula

NAME = "openvla"
QUANTILES = {"q01": 0.01, "q99": 0.99}
# (x - mean) / (std + 1e-8), and clip(2 * (x - low) / (high - low + 1e-8) - 1, -1, 1)
FORMULA = Formula(added=1e-8, range_added=1e-8, range_clip=1.0, constant_is_zero=True)
NOTES = (
    "OpenVLA makes features whose minimum is their maximum 0 in its modes with a range, whatever "
    "x is; here such a feature is 0 where x is that constant.",
    "OpenVLA undoes a range without the 1e-8 that it adds to its width.",
    "OpenVLA writes zeros for the 'proprio' of data that has none.",
)


def recognizes(path: Path) -> bool:
    """Return whether a path is a JSON file of OpenVLA's statistics."""
    return documents.matches(path, lambda held: holds(held, QUANTILES))


def read(path: Path) -> Contents:
    """Read the statistics of data sets by their names, or of one without a name."""
    return read_keys(path, QUANTILES, FORMULA, NOTES)


def write(path: Path, leaves: dict[str, Statistics], notes: tuple[str, ...] = ()) -> None:
    """Write a file of data sets by their names, as in ``bridge_orig/action``, or of one."""
    write_keys(path, leaves, QUANTILES, "OpenVLA", notes)
