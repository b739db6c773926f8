"""A page for each committed experiment: the claim of its source, the command, our figures, and what
they say.

    python -m bench.pages [--check]

writes bench/results/NAME/README.md from results.json there and from the texts of bench/findings.py,
and the pages of speeds and of whole models from what was measured for them; or says whether they
are so.
"""

import json
import sys
from pathlib import Path

from bench import models, speed_report
from bench.findings import FINDINGS, Finding
from jaxnorm.experiments import explain, explain_figures, figures, report, samples

RESULTS = Path(__file__).parent / "results"


def page(name: str, finding: Finding) -> str:
    """The text of README.md."""
    folder = RESULTS / name
    results = report.read(folder)
    settings, machine = results["settings"], results["machine"]
    if (folder / explain.EXPLANATION).exists():
        pairs = zip(explain.words(results), explain_figures.PICTURES, strict=True)
        shown = "\n\n".join(f"{words}\n\n![]({picture})" for words, picture in pairs)
    else:
        files = [*figures.pictures(settings), *samples.pictures(results)]
        shown = "\n\n".join([report.markdown(results), *(f"![]({picture})" for picture in files)])
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


def pages() -> dict[Path, str]:
    """The texts by file."""
    found = {
        RESULTS / name / "README.md": page(name, finding) for name, finding in FINDINGS.items()
    }
    for name in ("speed", "speed-zen4", "speed-pages", "speed-xeon", "speed-gpu"):
        folder = RESULTS / name
        found[folder / "README.md"] = speed_report.page(
            report.read(folder), folder.relative_to(RESULTS.parents[1])
        )
    for name in ("models", "models-pages"):
        found[RESULTS / f"{name}.md"] = models.page(
            json.loads((RESULTS / f"{name}.json").read_text())
        )
    return found


def main() -> None:
    texts = pages()
    for path, text in texts.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is not what python -m bench.pages writes.")
    print(f"{len(texts)} pages {'are as written' if '--check' in sys.argv else 'written'}.")


if __name__ == "__main__":
    main()
