"""How gradients grow through the steps of a layer-normalized LSTM, by its initial gain and where
the norm stands.

    python -m bench.gradient_growth

An LSTM(128) at its start reads 16 texts of 200 words drawn by Zipf's law, embedded in 100
dimensions. Prints, and writes to bench/results/gradient-growth.md, the length of the gradient of a
random combination of the last state with respect to the word read so many steps before the end,
relative to that of the last word. Beyond 1 the network is a chaotic map, and its early words are
noise.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxnorm import recurrent

BATCH, TIME, IN, FEATURES, WORDS = 16, 200, 100, 128, 20_000
BACK = (20, 50, 100, 199)


def growth(
    x: jax.Array, weights: jax.Array, norm: str | None, gain: float | None, placement: str
) -> list[float]:
    """Lengths of the gradients ``BACK`` steps before the last, relative to that of the last."""
    options = {"norm": norm, "placement": placement}
    params = recurrent.init_lstm(jax.random.key(0), IN, FEATURES, scale=gain, **options)
    gradient = jax.grad(lambda x: jnp.vdot(weights, recurrent.lstm(x, params, **options)[0][0]))(x)
    lengths = jnp.sqrt((gradient**2).sum((0, 2)))
    return [float(lengths[-1 - back] / lengths[-1]) for back in BACK]


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    words = jax.random.categorical(
        keys[0], -jnp.log(jnp.arange(1.0, WORDS + 1)), shape=(BATCH, TIME)
    )
    x = (jax.random.normal(keys[1], (WORDS, IN)) / 10)[words]
    weights = jax.random.normal(keys[2], (BATCH, FEATURES))
    rows = [
        "| norm | gain | placement | " + " | ".join(f"{back} steps" for back in BACK) + " |",
        "|---" * (3 + len(BACK)) + "|",
    ]
    cases = [("layer", gain, "ba2016") for gain in (1.0, 0.5, 0.3, 0.1)]
    cases += [("layer", 1.0, placement) for placement in ("sum", "gate", "carried_cell")]
    for norm, gain, placement in [(None, None, "ba2016"), *cases]:
        cells = [norm or "none", "" if gain is None else f"{gain:g}", placement if norm else ""]
        rows.append(
            "| "
            + " | ".join(
                [*cells, *(f"{value:.2g}" for value in growth(x, weights, norm, gain, placement))]
            )
            + " |"
        )
    text = "\n".join(rows)
    (Path(__file__).parent / "results" / "gradient-growth.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
