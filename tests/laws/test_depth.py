"""Test the numbers of DeepNorm and Sub-LN against torchscale's, written as it writes them."""

import math

import pytest

import jaxnorm as jn


@pytest.mark.parametrize(("n", "m"), [(6, 6), (18, 18), (100, 12)])
def test_torchscale(n, m):
    both, encoder, decoder = (
        jn.deepnorm_constants(n, m),
        jn.deepnorm_constants(n),
        jn.deepnorm_constants(decoder_layers=m),
    )
    depth = math.pow(math.pow(n, 4) * m, 0.0625)
    assert both.encoder.alpha == pytest.approx(0.81 * depth)
    assert both.encoder.beta == pytest.approx(1 / 1.15 / depth, rel=1e-3)  # 0.87 in the paper
    assert both.decoder == pytest.approx((math.pow(3 * m, 0.25), 1 / math.pow(12 * m, 0.25)))
    assert encoder.encoder == pytest.approx((math.pow(2 * n, 0.25), 1 / math.pow(8 * n, 0.25)))
    assert decoder.decoder == pytest.approx((math.pow(2 * m, 0.25), 1 / math.pow(8 * m, 0.25)))
    assert encoder.decoder is decoder.encoder is None
    of_both = math.sqrt(math.log(3 * m) * math.log(2 * n) / 3), math.sqrt(math.log(3 * m))
    assert jn.subln_gains(n, m) == pytest.approx(of_both)
    assert jn.subln_gains(n) == (pytest.approx(math.sqrt(math.log(2 * n))), None)
    assert jn.subln_gains(decoder_layers=m) == (None, pytest.approx(math.sqrt(math.log(2 * m))))


@pytest.mark.parametrize("function", [jn.deepnorm_constants, jn.subln_gains])
def test_mistakes(function):
    with pytest.raises(ValueError, match="one of them 1 or more: got 0 and 0"):
        function()
    with pytest.raises(ValueError, match="must be 0 or more, and one of them 1 or more: got -1 an"):
        function(-1, 2)
    with pytest.raises(TypeError, match="encoder_layers must be an integer"):
        function(1.5)
