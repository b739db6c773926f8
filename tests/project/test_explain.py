"""Test that the measurements of jaxnorm explain have the values they must have."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from rich.console import Console

import jaxnorm as jn
from jaxnorm.experiments import data, explain, probes, report
from jaxnorm.experiments.command import main
from jaxnorm.experiments.models import LeNet

SMALL = explain.Settings(
    variant="conv", norms=("none", "batch"), blend_batch_sizes=(64,), epochs=1, snapshots=2
)


pytestmark = pytest.mark.usefixtures("ordinary_promotion")


@pytest.fixture
def few(monkeypatch):
    """Digits for four steps."""
    task = explain.TASKS["digits"]
    monkeypatch.setitem(
        explain.TASKS, "digits", replace(task, load=lambda folder: task.load(folder).first(256))
    )


def network(norm, variant="conv"):
    found = data.digits()
    batch = found.train_inputs[:16], found.train_labels[:16]
    model = LeNet(norm, variant)
    variables = model.lazy_init(
        jax.random.key(0), jax.ShapeDtypeStruct(batch[0].shape, batch[0].dtype), evaluating=True
    )
    return model, variables["params"], variables.get("batch_stats", {}), batch


@pytest.mark.slow
def test_along_the_gradient_are_losses_and_gradients_there():
    model, params, stats, batch = network("none")
    found = probes.along_gradient(model, params, stats, batch, 0.1)
    loss = jax.jit(probes.batch_loss(model, stats, batch))
    gradient_at = jax.jit(jax.grad(loss))
    gradient = gradient_at(params)
    for step, value, turn in zip(probes.REACH, found["losses"], found["turns"], strict=True):
        there = jax.tree.map(
            lambda p, g, step=step: np.asarray(p) - np.float32(0.1 * step) * np.asarray(g),
            params,
            gradient,
        )
        assert float(value) == pytest.approx(float(loss(there)), rel=1e-5)
        difference = jax.tree.map(np.subtract, gradient_at(there), gradient)
        assert float(turn) == pytest.approx(
            float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(difference)))), rel=1e-4
        )


@pytest.mark.parametrize("norm", long_sweep(["batch", "layer", "group"], quick=["layer"]))
def test_scaled_weights_have_the_same_loss_and_a_gradient_over_the_factor(norm):
    found = probes.scaled_weights(*network(norm))
    np.testing.assert_allclose(found["losses"], found["losses"][2], rtol=2e-4)
    np.testing.assert_allclose(
        found["gradients"] * np.array(probes.FACTORS), found["gradients"][2], rtol=2e-2
    )


def test_without_a_norm_scaled_weights_have_another_loss():
    losses = probes.scaled_weights(*network("none"))["losses"]
    assert np.ptp(losses) > 1e-3


def test_nothing_stands_before_the_first_layer():
    shift = probes.shift_of_gradients(*network("batch"), 0.1)
    assert shift.shape == (5,)  # two convolutions, three dense layers
    assert float(shift[0]) == 0
    assert float(shift[1:].min()) > 0


def test_moments_are_those_after_the_norm():
    model, params, stats, batch = network("batch", "deep")
    found = probes.before_activations(model, params, stats, batch[0])
    assert [moments.mean.shape[-1] for moments in found] == [6] * 4 + [16] * 4 + [120, 84]
    np.testing.assert_allclose(found[0].mean, 0, atol=1e-5)
    np.testing.assert_allclose(found[7].var, 1, rtol=1e-3)
    assert float(jnp.abs(found[8].var - 1).max()) > 0.1  # a dense layer, which has none


def test_drift_is_in_deviations():
    old = [jn.Moments(jnp.ones(2), jnp.array([0.0, 1.0]), jnp.array([4.0, 1.0]))]
    new = [jn.Moments(jnp.ones(2), jnp.array([3.0, 1.0]), jnp.array([36.0, 4.0]))]
    assert probes.drift(old, old).tolist() == [0]
    assert probes.drift(old, new).tolist() == [(2.5 + 1) / 2]  # 5 of 2 deviations, 1 of 1


@pytest.mark.slow
def test_an_explanation_is_pictures_and_words(tmp_path, few, monkeypatch):
    console = Console(quiet=True)
    results = explain.explain(SMALL, tmp_path, console)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "results.json",
        "explanation.md",
        "along_gradient.png",
        "drift.png",
        "scale.png",
        "blend.png",
    }
    assert [run["norm"] for run in results["runs"]] == ["none", "batch", "switchable"]
    assert results["runs"][0]["step"] == [0, 2, 4]
    assert sum(results["runs"][2]["weights"]["mean"]) == pytest.approx(1, abs=1e-5)
    paragraphs = [*explain.words(results), *explain.seen(results)]
    assert [text.split("**")[1] for text in paragraphs] == [
        "Along the gradient.",
        "Drift.",
        "Scale.",
        "The blend.",
        "What the norms saw.",
    ]
    seen = results["runs"][1]["health"]
    assert (
        f"group was: batch {max(seen[f'BatchNorm_{i}/offset'] for i in (0, 1)):.2g};"
        in (paragraphs[4])
    )
    assert "batch -1.00" in paragraphs[2]
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: path.touch())
    results["runs"].pop()
    report.write(tmp_path, results)
    again = explain.explain(SMALL, tmp_path, console, resume=True)
    assert len(again["runs"]) == 3
    with pytest.raises(report.ResultsError, match="other settings: epochs"):
        explain.explain(replace(SMALL, epochs=2), tmp_path, console, resume=True)


@pytest.mark.slow
def test_networks_that_diverge_are_drawn_and_told(tmp_path, few):
    explain.explain(
        replace(SMALL, norms=("none",), learning_rate=1e30), tmp_path, Console(quiet=True)
    )
    assert "to the power: none nan" in explain.words(report.read(tmp_path))[2]
    assert (tmp_path / "scale.png").exists()


def test_wrong_usage_is_told(capsys):
    for arguments, message in (
        (
            ["--norms", "switchable"],
            "unknown norm 'switchable': choose from none, batch, batch_renorm, keras_batch_renorm, "
            "ghost_batch, layer, rms, unit, scale, instance, group, ",
        ),
        (["imdb"], "unknown data 'imdb': choose from digits, mnist."),
        (["--variant", "dense"], "unknown variant 'dense': choose from conv, deep."),
    ):
        with pytest.raises(SystemExit):
            main(["explain", *arguments])
        assert message in capsys.readouterr().err
