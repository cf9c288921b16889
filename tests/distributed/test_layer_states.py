"""Layers of a transformer that is shared out over ranks are those of a whole one, and so are its gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.encoders.multi_vector import MultiVectorEncoder, VectorForm
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from retrieval.encoders.transformer import checkpoint_activations
from tests.distributed.processes import assert_close, run_each
from trainers.engine.sharding import shard, whole

TEXTS = ["import the first of the values", "yield", "a file is open"]


def states_and_gradients(rank: int, folder: str, shares: bool, again: bool) -> tuple[NDArray[Any], dict[str, Any]]:  # noqa: ARG001
    located = locate_model(folder)
    encoder = load_encoder(EncoderSettings(model=folder, pooling="cls"), located.path, "", dropout=0.0).train()
    several = MultiVectorEncoder(encoder, VectorForm(kind="layers", layers=(1, 2)))
    if again:
        checkpoint_activations(encoder.transformer)
    if shares:
        shard(several)
    states, _ = several.states(several.tokenize(TEXTS, "document"))
    states.square().sum().backward()
    named = several.named_parameters()
    return states.detach().numpy(), {name: whole(p.grad).numpy() for name, p in named if p.grad is not None}


@pytest.mark.usefixtures("one_thread")
def test_a_shared_out_transformer_gives_the_same_states(tiny_encoder: Path) -> None:
    expected, gradients = states_and_gradients(0, str(tiny_encoder), False, False)
    doubled = {name: 2 * gradient for name, gradient in gradients.items()}  # the sum over the ranks
    calls = [(states_and_gradients, str(tiny_encoder), True, again) for again in (False, True)]
    for answers in run_each(2, *calls):
        for states, summed in answers:
            np.testing.assert_allclose(states, expected, atol=1e-6)
            assert_close(summed, doubled, rtol=1e-4, atol=1e-4)
