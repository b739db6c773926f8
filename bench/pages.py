"""A page for each committed experiment: the claim of its source, the command, our figures, and what
they say.

    python -m bench.pages [--check | --pictures DIR [NAME ...]]

writes bench/results/NAME/README.md from results.json there and from the texts of bench/findings.py,
and the pages of speeds and of whole models from what was measured for them; or says whether they
are so; or draws the pictures that they name, as DIR/NAME/curves.png. With bench/results as DIR
those lie beside the pages, and git leaves them out.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from bench import adoption, folding, models, speed_report
from bench.findings import FINDINGS, Finding
from jaxnorm.experiments import explain, explain_figures, figures, report, samples

RESULTS = Path(__file__).parent / "results"
SPEEDS = ("speed", "speed-zen4", "speed-pages", "speed-xeon", "speed-gpu")
PICTURED = (*FINDINGS, *SPEEDS)
TITLES = {
    figures.CURVES: "Learning curves",
    figures.SIZES: "After the last epoch, by batch size",
    samples.SAMPLES: "Samples",
} | explain_figures.PICTURES


def page(name: str, finding: Finding) -> str:
    """The text of README.md."""
    folder = RESULTS / name
    results = report.read(folder)
    settings, machine = results["settings"], results["machine"]
    if (folder / explain.EXPLANATION).exists():
        pairs = zip(explain.words(results), explain_figures.PICTURES, strict=True)
        parts = [part for words, picture in pairs for part in (words, _image(picture))]
    else:
        files = [*figures.pictures(settings), *samples.pictures(results)]
        parts = [report.markdown(results), *map(_image, files)]
    shown = "\n\n".join(parts)
    seeds = f"{settings['seeds']} seed{'s, mean ± deviation' if settings['seeds'] > 1 else ''}"
    unit = results.get("loss", "cross entropy")
    facts = (
        f"{seeds}; losses: {unit}; {machine['cores']} cores, jax {machine['jax']}, "
        f"flax {machine['flax']}"
    )
    return (
        f"# {finding.title}\n\n**The claim.** {finding.claim}\n\n**Here.** {finding.verdict}\n\n"
        f"`{finding.command} --out bench/results/{name}`\n({facts})\n\n{shown}\n"
    )


def _image(picture: str) -> str:
    return f"![{TITLES[picture]}]({picture})"


def without_pictures(text: str) -> str:
    """A page whose pictures are links to the numbers, of which the site draws them.

    Samples stay: they are drawn beside examples of data that are not here.
    """
    return re.sub(
        rf"!\[(.+)\]\((?!{samples.SAMPLES}\))(.+\.png)\)",
        rf"[\1: drawn on the site, from these numbers]({report.RESULTS}#\2)",
        text,
    )


def pages() -> dict[Path, str]:
    """The texts by file."""
    found = {
        RESULTS / name / "README.md": page(name, finding) for name, finding in FINDINGS.items()
    }
    for name in SPEEDS:
        folder = RESULTS / name
        found[folder / "README.md"] = speed_report.page(
            report.read(folder), folder.relative_to(RESULTS.parents[1])
        )
    # models-pages.md is as an earlier version wrote it, whose results lack what the page shows now
    found[RESULTS / "adoption.md"] = adoption.page(
        json.loads((RESULTS / "adoption.json").read_text())
    )
    found[RESULTS / "folding.md"] = folding.page(json.loads((RESULTS / "folding.json").read_text()))
    found[RESULTS / "models.md"] = models.page(json.loads((RESULTS / "models.json").read_text()))
    found[RESULTS / "gemma.md"] = models.page(json.loads((RESULTS / "gemma.json").read_text()))
    return {path: without_pictures(text) for path, text in found.items()}


def draw(out: Path, name: str) -> None:
    """The pictures of a page, by what the command draws them by that measured."""
    results = report.read(RESULTS / name)
    if name in SPEEDS:
        speed_report.plot(out / name, results)
    elif (RESULTS / name / explain.EXPLANATION).exists():
        explain_figures.plot(out / name, results)
    else:
        figures.plot(out / name, results)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pages", description=__doc__.partition("\n\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="compare the pages instead")
    what = "draw into DIR instead, by default the pictures of every page"
    parser.add_argument("--pictures", metavar=("DIR", "NAME"), nargs="+", help=what)
    options = parser.parse_args()
    if options.pictures:
        out, *names = options.pictures
        for name in names or PICTURED:
            draw(Path(out), name)
        return
    texts = pages()
    for path, text in texts.items():
        if not options.check:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is not what python -m bench.pages writes.")
    print(f"{len(texts)} pages {'are as written' if options.check else 'written'}.")


if __name__ == "__main__":
    main()
