"""The library's docstrings, written in reStructuredText's roles with doctests, as the Markdown that
mkdocstrings takes.
"""

import importlib
import inspect
import re

import griffe

ROLE = re.compile(r":(?:func|class|mod|meth):`~?([\w.]+)`")
EXAMPLE = re.compile(r"(?:^[ ]*>>>.*\n?)(?:^[ ]*\S.*\n?)*", re.MULTILINE)
TABLE = re.compile(r"^([ ]*)=+ [ =]*\n(?:.*\n)*?\1=+ [ =]*$", re.MULTILINE)
PAGES = [f"jaxnorm.{name}" for name in ("linen", "nnx", "online", "recurrent", "kernels")]
SCOPES = ("jaxnorm", "jaxnorm.recurrent", "jaxnorm.online", "jaxnorm.linen")


class Docstrings(griffe.Extension):
    """References to public names become links; examples and tables become blocks of code; classes
    show the arguments they inherit.
    """

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        if pkg.name == "jaxnorm":
            self._translate(pkg, set())
            for family in ("linen", "nnx"):
                module = importlib.import_module(f"jaxnorm.{family}")
                for value in filter(
                    inspect.isclass, (getattr(module, name) for name in module.__all__)
                ):
                    self._show_arguments(pkg, value)

    def _show_arguments(self, package: griffe.Module, value: type) -> None:
        """The arguments of a class, most of which are those of Flax's; what it has from a private
        base as its own.
        """
        found = package[f"{value.__module__}.{value.__name__}".removeprefix("jaxnorm.")]
        for base in [
            found.parent[str(base).partition("[")[0]]
            for base in found.bases
            if str(base).startswith("_")
        ]:
            methods = {
                name: method
                for name, method in base.members.items()
                if method.is_function and method.docstring
            }
            for name in [name for name in methods if name not in found.members]:
                found.set_member(name, griffe.Alias(name, methods[name], parent=found))
        found.bases = [base for base in found.bases if not str(base).startswith("_")]
        parameters = [
            p
            for p in inspect.signature(value.__init__).parameters.values()
            if p.name not in ("self", "parent", "kwargs")
        ]
        shown = [
            griffe.Parameter(
                p.name, kind=griffe.ParameterKind[p.kind.name.lower()], default=default(p)
            )
            for p in parameters
        ]
        itself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        found.set_member(
            "__init__",
            griffe.Function("__init__", parameters=griffe.Parameters(itself, *shown), parent=found),
        )

    def _translate(self, found: griffe.Object, seen: set[str]) -> None:
        if found.is_alias or found.path in seen:
            return
        seen.add(found.path)
        if found.docstring:
            found.docstring.value = as_markdown(found.docstring.value, found.path)
        for member in found.members.values():
            self._translate(member, seen)


def default(parameter: inspect.Parameter) -> str | None:
    """As it would be written; functions and dtypes by their names, functions that others have made
    by dots.
    """
    value = parameter.default
    if value is parameter.empty:
        return None
    if "<locals>" in getattr(value, "__qualname__", ""):
        return "..."
    return value.__name__ if hasattr(value, "__name__") else repr(value)


def as_markdown(text: str, path: str) -> str:
    """One docstring.

    >>> as_markdown("As :func:`ema`, not :class:`flax.linen.RNN`.", "jaxnorm.norms.axes.batch_norm")
    'As [`ema`][jaxnorm.ema], not `flax.linen.RNN`.'
    """
    text = ROLE.sub(lambda role: reference(role[1], path), text)
    return TABLE.sub(_fenced("text"), EXAMPLE.sub(_fenced("pycon"), text))


def reference(name: str, path: str) -> str:
    if name in PAGES:
        return f"[`{name}`][{name}]"
    # jaxnorm.nnx.layers.LayerNorm refers to names of jaxnorm.nnx first
    own = ".".join(path.split(".")[:2])
    for scope in (own, *SCOPES) if own in ("jaxnorm.linen", "jaxnorm.nnx") else SCOPES:
        short = name.removeprefix(f"{scope}.")
        if short in importlib.import_module(scope).__all__:
            return f"[`{name}`][{scope}.{short}]"
    return f"`{name}`"


def _fenced(language: str):
    def block(found: re.Match) -> str:
        lines = found[0].rstrip("\n").split("\n")
        indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
        tail = "\n" if found[0].endswith("\n") else ""
        return "\n".join([f"{indent}```{language}", *lines, f"{indent}```"]) + tail

    return block
