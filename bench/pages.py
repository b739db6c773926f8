"""A page for each committed experiment: the claim of its source, the command, our figures, and what they say.

    python -m bench.pages [--check]

writes bench/results/NAME/README.md from results.json there and from the texts of bench/findings.py.
"""

import sys
from pathlib import Path

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
    facts = f"{seeds}; losses: {unit}; {machine['cores']} cores, jax {machine['jax']}, flax {machine['flax']}"
    return (
        f"# {finding.title}\n\n**The claim.** {finding.claim}\n\n**Here.** {finding.verdict}\n\n"
        f"`{finding.command} --out bench/results/{name}`\n({facts})\n\n{shown}\n"
    )


def main() -> None:
    for name, finding in FINDINGS.items():
        path, text = RESULTS / name / "README.md", page(name, finding)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif path.read_text() != text:
            sys.exit(f"{path} is not what python -m bench.pages writes.")
    print(f"{len(FINDINGS)} pages {'are as written' if '--check' in sys.argv else 'written'}.")


if __name__ == "__main__":
    main()
