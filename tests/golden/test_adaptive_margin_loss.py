"""Adaptive relevance margins against recorded losses and gradients: of the paper's equations and the authors' code."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.objectives.adaptive_margin import distributed_residuals, in_batch_residuals, mean_error, own_residuals
from trainers.objectives.pairs import Triplets, unit_vectors

GOLDEN = np.load(Path(__file__).parent / "arm_case_a.npz")
NAMES = ("query", "pos", "neg")
MARGINS = {"static03": 0.3, "static10": 1.0, "adaptive": None}
ERRORS = {"l1": "absolute", "soft": "soft"}
CASES = sorted(name.removesuffix("_loss") for name in GOLDEN if name.endswith("_loss"))


def residuals_of(case: str, triplets: Triplets) -> torch.Tensor:
    kind, form, *_ = case.split("_")
    if kind == "distributed":
        return distributed_residuals(triplets, triplets, form)[0]
    if form == "own":
        return own_residuals(triplets, MARGINS[kind])[0]
    return in_batch_residuals(triplets, triplets, MARGINS[kind], case.split("_")[2])[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-9, 1e-10), (torch.float32, 1e-4, 2e-6)], ids=["float64", "float32"]
)
def test_loss_and_gradients(case, dtype, rtol, atol):
    inputs = [torch.from_numpy(GOLDEN[name]).to(dtype).requires_grad_() for name in NAMES]
    residuals = residuals_of(case, Triplets(*map(unit_vectors, inputs)))
    loss = mean_error(residuals, ERRORS.get(case.split("_")[-1], "squared"))
    loss.backward()
    assert loss.dtype == dtype
    np.testing.assert_allclose(loss.item(), GOLDEN[f"{case}_loss"], rtol=rtol, atol=atol)
    for name, tensor in zip(NAMES, inputs, strict=True):
        np.testing.assert_allclose(tensor.grad, GOLDEN[f"{case}_grad_{name}"], rtol=rtol, atol=atol, err_msg=name)
    if f"{case}_residuals" in GOLDEN:
        np.testing.assert_allclose(residuals.detach(), GOLDEN[f"{case}_residuals"], rtol=rtol, atol=atol)


def test_every_form_is_recorded():
    assert len(CASES) == 17
