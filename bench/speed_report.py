"""Tables and pictures of what ``python -m bench`` measured."""

from pathlib import Path

import numpy as np

from bench.speed import COPY, DTYPES
from bench.stamp import in_front
from jaxnorm.experiments.figures import pyplot, save

TITLES = {
    "forward": "Output",
    "gradients": "Output and all gradients",
    "eager": "Output, called without jit",
}
OURS, PLAIN = "jaxnorm", "jaxnorm, plain JAX"
ROWS, CHANNELS, ALL = (
    ("layer", "rms"),
    ("group", "instance"),
    ("layer", "rms", "batch", "group", "instance"),
)
# What is asked for: (whose, norms, kind, measure, other, most); without a kind, of a peer's
# counters.
GOALS = (
    (OURS, ROWS, "gradients", "ms", "flax", 0.35),
    (OURS, ROWS, "gradients", "cpu_ms", "torch", 1.0),
    (OURS, CHANNELS, "gradients", "ms", "flax", 0.3),
    (OURS, CHANNELS, "gradients", "cpu_ms", "torch", 0.6),
    (OURS, ("batch",), "gradients", "ms", "flax", 0.8),
    (OURS, ("batch",), "gradients", "ms", "torch", 1.0),
    (PLAIN, ROWS, "gradients", "ms", "flax", 0.75),
    (PLAIN, CHANNELS, "gradients", "ms", "flax", 0.75),
    (PLAIN, ("batch",), "gradients", "ms", "flax", 1.0),
    (OURS, ALL, "forward", "ms", COPY, 1.3),
    (OURS, ALL, "eager", "ms", "flax", 1.2),
    (OURS, ALL, "", "compile_s", "flax", 1.2),
    (PLAIN, ALL, "", "compile_s", "flax", 1.2),
)
MEASURES = {"ms": "time", "cpu_ms": "CPU time", "compile_s": "compile time"}
# What has to be moved, in copies of x, which read and write it once: gradients read x twice and the
# cotangent, and write two arrays.
COPIES = {"forward": 1.0, "gradients": 2.5}
CASE = ("norm", "shape", "dtype")
SMALL = "8x64"  # is for the cost of a call


def summarize(found: dict) -> str:
    """One case in a line."""
    peers = found["peers"]
    times = {name: peer["gradients"]["ms"] for name, peer in peers.items() if "gradients" in peer}
    best = min(
        (name for name in times if not name.startswith(OURS)), key=times.__getitem__, default=None
    )
    ours = f"{times[OURS]:.2f} ms with gradients" if OURS in times else "measured"
    return ours if best is None else f"{ours}, best peer {best} {times[best]:.2f}"


def _cases(results: dict, smallest: bool = False) -> dict[str, dict]:
    """What each implementation took, by the case's name."""
    return {
        " ".join(run[part] for part in CASE): run["peers"]
        for run in results["runs"]
        if smallest or run["shape"] != SMALL
    }


def ratios(
    results: dict, ours: str, norms, kind: str, measure: str, other: str
) -> dict[str, float]:
    """Ours to the other, by case."""
    found = {}
    for case, peers in _cases(results, smallest=kind == "eager").items():
        own, theirs = (
            peers.get(name, {}).get(kind) if kind else peers.get(name) for name in (ours, other)
        )
        if case.split()[0] in norms and own and theirs:
            found[case] = own[measure] / theirs[measure]
    return found


def beside_fastest(results: dict, ours: str) -> dict[str, float]:
    """Times of output and gradients to those of the fastest of the others in JAX, by case."""
    found = {}
    for case, peers in _cases(results).items():
        times = {
            name: peer["gradients"]["ms"] for name, peer in peers.items() if "gradients" in peer
        }
        others = [
            time for name, time in times.items() if not name.startswith(OURS) and name != "torch"
        ]
        if ours in times and others:
            found[case] = times[ours] / min(others)
    return found


def below_copies(results: dict, kind: str, measure: str, other: str, most: float) -> set[str]:
    """The cases in which that much of the other's is less than copies of as many bytes take."""
    found = set()
    for case, peers in _cases(results).items():
        theirs, copy = peers.get(other, {}).get(kind), peers.get(COPY, {}).get("forward")
        if (
            theirs
            and copy
            and kind in COPIES
            and most * theirs[measure] < COPIES[kind] * copy[measure]
        ):
            found.add(case)
    return found


def goals(results: dict) -> str:
    """A row per goal: the median and the worst case, how many cases meet it, and how many that do
    not no copy would meet either.
    """
    lines = [
        "| | goal | median | worst | met | missed, but so would copies of the bytes |",
        "|---|---|---|---|---|---|",
    ]
    for ours, norms, kind, measure, other, most in GOALS:
        whose = f", {PLAIN}" if ours == PLAIN else ""
        what = (
            f"{', '.join(norms)}{whose}: {TITLES.get(kind, TITLES['gradients']).lower()}, "
            f"{MEASURES[measure]} / {other}"
        )
        beyond = (
            below_copies(results, kind, measure, other, most)
            if measure in ("ms", "cpu_ms") and kind in COPIES
            else None
        )
        lines += _goal(what, most, ratios(results, ours, norms, kind, measure, other), beyond)
    for ours, most in ((OURS, 0.42), (PLAIN, 1.0)):
        lines += _goal(
            f"all five, {ours}: {TITLES['gradients'].lower()}, time / fastest JAX peer",
            most,
            beside_fastest(results, ours),
        )
    cases = _cases(results)
    times = {
        case: peers[PLAIN]["gradients"]["ms"]
        for case, peers in cases.items()
        if "gradients" in peers.get(PLAIN, {})
    }
    beside = {
        case: case.replace("switchable", "batch") for case in times if case.startswith("switchable")
    }
    blend = {
        case.split(" ", 1)[1]: times[case] / times[batch]
        for case, batch in beside.items()
        if batch in times
    }
    lines += _goal(
        f"switchable, {PLAIN}: output and all gradients, time / our batch norm", 2.5, blend
    )
    for ours in (OURS, PLAIN):
        lines += _counter_goals(cases, ours)
    return "\n".join(lines)


def _on_cpu(results: dict) -> bool:
    return results.get("platform", "cpu") == "cpu"


def summary(results: dict) -> str:
    """Goals on a CPU, for which they are set; elsewhere how each norm compares with Flax, and with
    copies of the bytes.
    """
    if _on_cpu(results):
        return goals(results)
    lines = ["| | time / | cases | median | least | most |", "|---|---|---|---|---|---|"]
    for norm in (*ALL, "switchable"):
        for kind in ("forward", "gradients"):
            for other in ("flax", COPY):
                values = list(ratios(results, OURS, (norm,), kind, "ms", other).values())
                if values:
                    spread = f"{np.median(values):.2f} | {min(values):.2f} | {max(values):.2f}"
                    lines.append(
                        f"| {norm}: {TITLES[kind].lower()} | {other} | {len(values)} | {spread} |"
                    )
    return "\n".join(lines)


def _counter_goals(cases: dict[str, dict], ours: str) -> list[str]:
    """Rows for temporaries and bytes kept."""
    lines, whose = [], f"{PLAIN}: " if ours == PLAIN else ""
    for counter, label, most in (
        ("temporaries", "temporaries / x", (0.05, 0.05)),
        ("residual_bytes", "bytes kept per element", (4.2, 2.2)),
    ):
        for dtype, bound in zip(DTYPES, most, strict=True):
            own = {
                case: peers[ours][counter]
                for case, peers in cases.items()
                if case.endswith(dtype) and ours in peers
            }
            values = {case.removesuffix(f" {dtype}"): value for case, value in own.items()}
            lines += _goal(f"{whose}{label}, {dtype}", bound, values)
    return lines


PAGES = """
- Arrays of 16 MiB and more: PyTorch's allocator keeps the outputs' pages, where XLA's go back to
  the system or not, by what ran before (page faults below), though the kernels ask for large ones;
  who is ahead there changes with it from run to run.
  [With an allocator that keeps them](../speed-pages/README.md)."""


def missed(results: dict) -> str:
    """Why, for what the goals show."""
    moved = {}
    for case, peers in _cases(results).items():
        ours, copy = peers.get(OURS, {}).get("gradients"), peers.get(COPY, {}).get("forward")
        if ours and copy and not case.startswith("switchable"):
            moved[case] = ours["ms"] / (COPIES["gradients"] * copy["ms"])
    if not moved:
        return ""
    values = list(moved.values())
    pages = "" if results.get("allocator") else PAGES
    return f"""- Against Flax: output and gradients have to read x twice, the cotangent once, and
  write two arrays, 2.5 times what a copy moves. Ours take {np.median(values):.2f} times that long
  in the median ({min(values):.2f} to {max(values):.2f}): they are bound by memory. Where Flax
  itself is no more than three times slower, 0.3 and 0.35 of its time would need fewer bytes, not a
  faster loop: copies of the bytes take longer than that (last column). Next: keeping the rows of
  the output in the cache for what follows, which takes a kernel of more than the norm.
- 32x7x7x512: groups of 49 elements. Mean and variance of a group are 8 bytes next to 98 of data in
  bfloat16: instead of storing them the kernels of instance norm recompute them for the gradients,
  in one reading with the sums for these. Switchable norm, which has no kernel, merges and blends
  16384 of them in some 80 small loops.
- Not in XLA's count of temporaries is what kernels allocate while they run: 16 bytes per channel
  and example of instance and group norm (at 32x7x7x512 0.08 of x, in bfloat16 twice as much).
- Norms over many positions leave their output to XLA, which inside a model fuses it with what
  follows into one loop and stores a quarter less ([whole models](../models.md)); alone, batch norm
  is the slower for it at some shapes.
- Plain JAX: of rows XLA makes one loop for the output, and one for each gradient. Over channels
  every sum is a pass over x, and there is one more than in a one-pass norm: that is the price of
  the accuracy. There every pass recomputes the cast and the shift of what it reads, instead of
  storing them; in group norm statistics are spread over channels for that. What it takes longer to
  compile than Flax is tracing, of batch and group norm about half of it: the derivative and its
  transpose, which Flax leaves to JAX, are written down. Next: the types of the tangent without
  tracing it.{pages}
- Tried and dropped: gradients over channels by XLA from statistics by kernels, and all of it by XLA
  (slower alone, in models no faster beyond the noise); float32 sums for long rows (narrow ones take
  twice as long); the steps of the gradients of several rows in turn, as for their output (1.09 of
  the time in float32); reading from last to first, so that the next pass begins with what is in the
  cache (0.98 to 1.03 of the time at seven shapes); gradients of scale and bias added up by several
  threads (0.94 to 1.07); kernels for switchable norm, more C++ than one rare norm is worth."""


def _goal(
    what: str, most: float, found: dict[str, float], beyond: set[str] | None = None
) -> list[str]:
    if not found:
        return []
    worst, values = max(found, key=found.__getitem__), list(found.values())
    missed = {case for case, value in found.items() if value > most}
    copies = f"{len(missed & beyond)} of {len(missed)}" if beyond is not None and missed else ""
    met = f"{len(found) - len(missed)} of {len(found)}"
    return [
        f"| {what} | {most} | {np.median(values):.2f} | {found[worst]:.2f} ({worst}) | {met} | "
        f"{copies} |"
    ]


def page(results: dict, folder: Path) -> str:
    """README.md: the goals, then every figure."""
    machine, settings = results["machine"], results["settings"]
    packages = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("jax", machine["jax"]),
            ("flax", machine["flax"]),
            *results["packages"].items(),
        )
    )
    imports = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in results["imports"].items())
    on_cpu = _on_cpu(results)
    kernels = f" Kernels {'built' if results['native'] else 'not built'}." if on_cpu else ""
    chosen = (
        ""
        if on_cpu
        else f" --platform {results['platform']} --peers '{'; '.join(settings['peers'])}'"
    )
    parts = [
        "# Speed of the norms" + ("" if on_cpu else f" on an {machine['device']}"),
        f"`{in_front(results.get('allocator', {}))}python -m bench{chosen} "
        f"--rounds {settings['rounds']} --out {folder}`, in turn in one process; "
        f"{machine['cores']} cores "
        f"({machine['processor']}), "
        f"{packages}, commit {results['commit']}.{kernels} Import: {imports}.",
        *(["## Goals"] if on_cpu else []),
        summary(results),
        *(["## What is missed, and why", missed(results)] if on_cpu else []),
        "![Time relative to the best peer](relative.png)",
        "![Speed relative to a copy](bandwidth.png)",
    ]
    for dtype in settings["dtypes"]:
        for kind, title in TITLES.items():
            rows = _rows(results, dtype, kind)
            if rows:
                parts += [f"## {title}, {dtype}: ms (CPU ms)", rows]
        parts += [
            f"## Counters, {dtype}: bytes kept per element / temporaries per x / page faults",
            _counters(results, dtype),
        ]
    return "\n\n".join(parts) + "\n"


def _table(names: list[str], rows: dict[str, list[str]]) -> str:
    head = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    return "\n".join(
        head + [f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows.items()]
    )


def _names(results: dict) -> list[str]:
    return list(dict.fromkeys(name for run in results["runs"] for name in run["peers"]))


def _rows(results: dict, dtype: str, kind: str) -> str:
    names = [
        name
        for name in _names(results)
        if any(kind in run["peers"].get(name, {}) for run in results["runs"])
    ]
    rows = {}
    for run in results["runs"]:
        if run["dtype"] == dtype and kind in run["peers"].get(OURS, {}):
            found = [run["peers"].get(name, {}).get(kind) for name in names]
            rows[f"{run['norm']} {run['shape']}"] = [
                "" if f is None else f"{f['ms']:.2f} ({f['cpu_ms']:.2f})" for f in found
            ]
    return _table(names, rows) if rows else ""


def _counters(results: dict, dtype: str) -> str:
    names = [name for name in _names(results) if name not in (COPY, "torch")]
    rows = {}
    for run in results["runs"]:
        if run["dtype"] == dtype:
            found = [run["peers"].get(name, {}) for name in names]
            rows[f"{run['norm']} {run['shape']}"] = [
                f"{f['residual_bytes']:.2f} / {f['temporaries']:.2f} / "
                f"{f['gradients']['faults']:.0f}"
                if "gradients" in f
                else ""
                for f in found
            ]
    return _table(names, rows)


def plot(folder: Path, results: dict) -> list[Path]:
    """Draws two pictures; returns the files."""
    figures = {"relative.png": _relative(results), "bandwidth.png": _bandwidth(results)}
    titles = {
        "relative.png": "Output and all gradients: time / best peer",
        "bandwidth.png": "Output alone: bytes per second / those of a copy",
    }
    for name, figure in figures.items():
        save(figure, folder / name, titles[name])
    return [folder / name for name in figures]


def _dots(results: dict, value, names: list[str], line: str):
    """A row of dots per case, a colour per peer; ``value(run, name)`` may be None."""
    runs = [
        run for run in results["runs"] if run["shape"] != SMALL and value(run, OURS) is not None
    ]
    figure, axes = pyplot().subplots(figsize=(9, 0.27 * len(runs) + 1.6), layout="constrained")
    for i, name in enumerate(names):
        points = [(value(run, name), -row) for row, run in enumerate(runs)]
        shown = np.array([point for point in points if point[0] is not None], float)
        if len(shown):
            big = name == OURS
            axes.scatter(
                *shown.T,
                s=60 if big else 22,
                color="black" if big else f"C{i % 10}",
                marker="D" if big else "o",
                label=name,
                zorder=3 if big else 2,
            )
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(line)
    axes.set_yticks(
        -np.arange(len(runs)),
        [f"{run['norm']} {run['shape']} {run['dtype']}" for run in runs],
        fontsize=8,
    )
    axes.grid(axis="y", linewidth=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _relative(results: dict):
    def value(run: dict, name: str) -> float | None:
        times = {
            peer: found["gradients"]["ms"]
            for peer, found in run["peers"].items()
            if "gradients" in found
        }
        others = [time for peer, time in times.items() if not peer.startswith(OURS)]
        return times[name] / min(others) if name in times and others else None

    return _dots(
        results,
        value,
        [name for name in _names(results) if name != COPY],
        "time / best peer (less is better)",
    )


def _bandwidth(results: dict):
    def value(run: dict, name: str) -> float | None:
        found = run["peers"].get(name, {}).get("forward")
        return run["peers"][COPY]["forward"]["ms"] / found["ms"] if found else None

    return _dots(
        results,
        value,
        [name for name in _names(results) if name != COPY],
        "share of a copy's speed (more is better)",
    )
