"""The rows of the table of norms: what each is called, computes and comes from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# a module's class, or its name in jaxnorm.linen and jaxnorm.nnx
Module = str | Callable[..., Any] | None


@dataclass(frozen=True)
class Norm:
    """A row of the table of norms.

    Attributes:
      name: the name of the norm in ``norm(name)``.
      linen: the class of its linen module; a string names a class of :mod:`jaxnorm.linen`.
      nnx: the class of its nnx module; a string names a class of :mod:`jaxnorm.nnx`.
      function: the name of its function in :mod:`jaxnorm`, or "".
      formula: the output.
      axes: which elements share statistics, as a pattern, or "".
      source: the paper.
      call: how a module is called, and what it returns.
      positions: whether ``x`` must have axes between the batch and the features.
      running: whether modules keep running statistics, and take ``use_running_average``.
    """

    name: str
    linen: Module = None
    nnx: Module = None
    function: str = ""
    formula: str = ""
    axes: str = ""
    source: str = ""
    call: str = "y = norm(x)"
    positions: bool = False
    running: bool = False

    def __str__(self) -> str:
        modules = dict.fromkeys(_shown(module) for module in (self.linen, self.nnx) if module)
        used = [*modules, *([f"jn.{self.function}"] if self.function else [])]
        lines = [f"{self.name:<22}{self.call:<32}{', '.join(used)}"]
        lines += [f"{self.formula:<50}  {self.axes}", self.source]
        return "\n    ".join(line.rstrip() for line in lines if line.strip())


def _shown(module: Module) -> str:
    return module if isinstance(module, str) else getattr(module, "__name__", repr(module))


def _row(name: str, module: str, function: str = "", **about: Any) -> Norm:
    """Return the row of a norm of ours, whose modules have one name in both families."""
    return Norm(name, module, module, function, **about)


STANDARD = "(x - mean) / sqrt(var + epsilon) * scale + bias"
BY_CONDITION = "(x - mean) / sqrt(var + epsilon) * (1 + scale) + bias"
CONDITION = "y = norm(x, condition)"

ROWS = {
    row.name: row
    for row in (
        _row(
            "batch",
            "BatchNorm",
            "batch_norm",
            formula=STANDARD,
            axes="[n h w] c",
            source="Ioffe & Szegedy 2015, arXiv 1502.03167",
            running=True,
        ),
        _row(
            "batch_renorm",
            "BatchRenorm",
            "batch_renorm",
            formula="((x - mean) / std * r + d) * scale + bias",
            axes="[n h w] c",
            source="Ioffe 2017, arXiv 1702.03275, as in SBX and CrossQ",
            running=True,
        ),
        _row(
            "keras_batch_renorm",
            "KerasBatchRenorm",
            formula="((x - mean) / std * r + d) * scale + bias",
            axes="[n h w] c",
            source="Ioffe 2017, arXiv 1702.03275, as in Keras",
            running=True,
        ),
        _row(
            "ghost_batch",
            "GhostBatchNorm",
            "ghost_batch_norm",
            formula=STANDARD,
            axes="(k [n]) [h w] c",
            source="Hoffer, Hubara & Soudry 2017, arXiv 1705.08741",
            running=True,
        ),
        _row(
            "conditional_batch",
            "ConditionalBatchNorm",
            formula=BY_CONDITION,
            axes="[n h w] c",
            source="de Vries et al. 2017, arXiv 1707.00683",
            call=CONDITION,
            running=True,
        ),
        _row(
            "layer",
            "LayerNorm",
            "layer_norm",
            formula=STANDARD,
            axes="n h w [c]",
            source="Ba, Kiros & Hinton 2016, arXiv 1607.06450",
        ),
        _row(
            "ada_layer",
            "AdaLayerNorm",
            formula=BY_CONDITION,
            axes="n h w [c]",
            source="Peebles & Xie 2022, arXiv 2212.09748",
            call=CONDITION,
        ),
        _row(
            "ada_layer_zero",
            "AdaLayerNormZero",
            formula=BY_CONDITION,
            axes="n h w [c]",
            source="Peebles & Xie 2022, arXiv 2212.09748",
            call="y, gate = norm(x, condition)",
        ),
        _row(
            "rms",
            "RMSNorm",
            "rms_norm",
            formula="x / sqrt(mean(x**2) + epsilon) * scale",
            axes="n h w [c]",
            source="Zhang & Sennrich 2019, arXiv 1910.07467",
        ),
        _row(
            "gated_rms",
            "GatedRMSNorm",
            "gated_rms_norm",
            formula="h = x * silu(gate), h / sqrt(mean(h**2) + epsilon) * scale",
            axes="n t (g [c])",
            source="Dao & Gu 2024, arXiv 2405.21060",
            call="y = norm(x, gate)",
        ),
        _row(
            "qk",
            "QKNorm",
            formula="q / sqrt(mean(q**2) + epsilon) * scale, and k alike",
            axes="n t h [d]",
            source="Dehghani et al. 2023, arXiv 2302.05442",
            call="q, k = norm(q, k)",
        ),
        _row(
            "unit",
            "UnitNorm",
            "unit_norm",
            formula="x / max(sqrt(sum(x**2)), epsilon)",
            axes="n h w [c]",
            source="Wang et al. 2017, arXiv 1704.06369",
        ),
        _row(
            "scale",
            "ScaleNorm",
            "scale_norm",
            formula="scale * x / max(sqrt(sum(x**2)), epsilon)",
            axes="n h w [c]",
            source="Nguyen & Salazar 2019, arXiv 1910.05895",
        ),
        _row(
            "instance",
            "InstanceNorm",
            "instance_norm",
            formula=STANDARD,
            axes="n [h w] c",
            source="Ulyanov, Vedaldi & Lempitsky 2016, arXiv 1607.08022",
            positions=True,
        ),
        _row(
            "ada_instance",
            "AdaInstanceNorm",
            "ada_instance_norm",
            formula=BY_CONDITION,
            axes="n [h w] c",
            source="Huang & Belongie 2017, arXiv 1703.06868",
            call=CONDITION,
            positions=True,
        ),
        _row(
            "spade",
            "SPADE",
            formula="(x - mean) / sqrt(var + epsilon) * (1 + gamma) + beta",
            axes="n [h w] c",
            source="Park et al. 2019, arXiv 1903.07291",
            call=CONDITION,
            positions=True,
            running=True,
        ),
        _row(
            "reversible_instance",
            "ReversibleInstanceNorm",
            "reversible_instance_norm",
            formula=STANDARD,
            axes="n [t] c",
            source="Kim et al. 2022, ICLR",
            call="y, moments = norm(x)",
            positions=True,
        ),
        _row(
            "group",
            "GroupNorm",
            "group_norm",
            formula=STANDARD,
            axes="n [h w] (g [c])",
            source="Wu & He 2018, arXiv 1803.08494",
        ),
        _row(
            "positional",
            "PositionalNorm",
            "positional_norm",
            formula=STANDARD,
            axes="n h w [c]",
            source="Li et al. 2019, arXiv 1907.04312",
            call="y, moments = norm(x)",
        ),
        _row(
            "switchable",
            "SwitchableNorm",
            "switchable_norm",
            formula=STANDARD,
            axes="instance, layer and batch, blended",
            source="Luo et al. 2018, arXiv 1806.10779",
            positions=True,
            running=True,
        ),
        _row(
            "global_response",
            "GlobalResponseNorm",
            "global_response_norm",
            formula="scale * x * g / (mean(g) + epsilon) + bias + x, g = sqrt(sum(x**2))",
            axes="n [h w] c",
            source="Woo et al. 2023, arXiv 2301.00808",
            positions=True,
        ),
        _row(
            "filter_response",
            "FilterResponseNorm",
            "filter_response_norm",
            formula="max(x / sqrt(mean(x**2) + epsilon) * scale + bias, threshold)",
            axes="n [h w] c",
            source="Singh & Krishnan 2019, arXiv 1911.09737",
            positions=True,
        ),
        _row(
            "evonorm_s0",
            "EvoNormS0",
            "evonorm_s0",
            formula="x * sigmoid(v x) / sqrt(var + epsilon) * scale + bias",
            axes="n [h w] (g [c])",
            source="Liu et al. 2020, arXiv 2004.02967",
            positions=True,
        ),
        _row(
            "evonorm_b0",
            "EvoNormB0",
            "evonorm_b0",
            formula="x / max(sqrt(batch_var + epsilon), v x + sqrt(var + epsilon)) * scale + bias",
            axes="n [h w] c",
            source="Liu et al. 2020, arXiv 2004.02967",
            positions=True,
            running=True,
        ),
        _row(
            "film",
            "FiLM",
            formula="x * (1 + scale) + bias",
            source="Perez et al. 2017, arXiv 1709.07871",
            call=CONDITION,
        ),
        _row(
            "dynamic_tanh",
            "DynamicTanh",
            "dynamic_tanh",
            formula="tanh(alpha x) * scale + bias",
            source="Zhu et al. 2025, arXiv 2503.10622",
        ),
        _row(
            "dynamic_erf",
            "DynamicErf",
            "dynamic_erf",
            formula="erf(alpha x + shift) * scale + bias",
            source="Chen et al. 2025, arXiv 2512.10938",
        ),
        _row(
            "graph",
            "GraphNorm",
            "graph_norm",
            formula="d = x - mean_scale * mean, d / sqrt(mean(d**2) + epsilon) * scale + bias",
            axes="b [n] c",
            source="Cai et al. 2020, arXiv 2009.03294",
            call="y = norm(x, segments=ids)",
        ),
        _row(
            "pair",
            "PairNorm",
            "pair_norm",
            formula="d = x - mean, length * d / sqrt(mean(|d|**2) + epsilon)",
            axes="b [n] c",
            source="Zhao & Akoglu 2019, arXiv 1909.12223",
            call="y = norm(x, segments=ids)",
        ),
    )
}
