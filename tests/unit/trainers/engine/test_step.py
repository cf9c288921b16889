"""What a step that isn't finite says of its cause."""

import math

import pytest
import torch

from raytriever.errors import UserError
from tests.unit.trainers.tiny import Reports, TinyBatches, tiny_objective, tiny_settings
from trainers.engine.loop import train


def broken(objective) -> None:
    with torch.no_grad():
        objective.query_encoder.projection.weight.fill_(math.nan)


@pytest.mark.parametrize("cause", ["weights", "temperature"])
def test_before_any_update_it_is_not_the_learning_rate(cause):
    objective = tiny_objective(**({"similarity_temperature": 1e-42} if cause == "temperature" else {}))
    if cause == "weights":
        broken(objective)
    with pytest.raises(UserError) as stopped:
        train(objective, TinyBatches(), tiny_settings())
    message = str(stopped.value)
    assert message.startswith("Training stopped at step 1: ")
    assert "raytriever show tiny/batches --epoch 0" in message
    for named in ("the model's weights", "objective.similarity_temperature", "training.bf16", "no update has been"):
        assert named in message
    assert "lower training.optimizer.learning_rate" not in message


def test_behind_an_update_it_may_be():
    objective = tiny_objective()
    callbacks = [Reports(on_step=lambda _: broken(objective))]
    lower = r"step 2: the loss is nan .* lower training.optimizer.learning_rate"
    with pytest.raises(UserError, match=lower) as stopped:
        train(objective, TinyBatches(), tiny_settings(), callbacks=callbacks)
    assert "the model's weights" not in str(stopped.value)
