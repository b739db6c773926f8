"""Fill the norms into the pages of the reference, in the order of the table of norms.

In such a page NORMS stands for the links of a table, and ``::: NORMS`` for the entries: of all
public names of the package that the page does not name itself.
"""

import importlib
import re

from jaxnorm.norms.table import available_norms

PACKAGES = {
    f"reference/{package.rpartition('.')[2]}.md": package
    for package in ("jaxnorm", "jaxnorm.linen", "jaxnorm.nnx")
}


def with_norms(text: str, package: str) -> str:
    """Return the page of a package with its norms."""
    norms = left(text, package)
    links = ", ".join(f"[`{name}`][{package}.{name}]" for name in norms)
    entries = "\n\n".join(
        f"::: {package}.{name}\n    options:\n      heading_level: 3" for name in norms
    )
    return text.replace("::: NORMS", entries).replace("NORMS", links)


def left(text: str, package: str) -> list[str]:
    """Return the public names of a package that its page does not name, by the table of norms."""
    named = {*re.findall(rf"\[{package}\.(\w+)\]", text), "recurrent"}
    names = [name for name in importlib.import_module(package).__all__ if name not in named]
    rows = [(row.function, row.linen) for row in available_norms().values()]
    order = [name for row in rows for name in row]
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order))
