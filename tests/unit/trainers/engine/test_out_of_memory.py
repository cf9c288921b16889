import pytest
import torch

from raytriever.errors import UserError
from trainers.engine.settings import IN_TRAINING, naming_full_memory

ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.02 GiB is free."
    " Process 1 has 78.15 GiB memory in use. Of the allocated memory 70 GiB is allocated by PyTorch."
)


def test_it_says_what_was_asked_for_and_first_what_the_run_goes_on_with():
    with pytest.raises(UserError) as caught, naming_full_memory("training", IN_TRAINING):
        raise ERROR
    message = str(caught.value)
    assert message.startswith(
        "The GPU's memory is full in training: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of"
        " which 1.02 GiB is free. With these the run goes on from its checkpoint, the cheapest first:"
        " objective.gradient_cache true"
    )
    going_on, anew = message.split("With these it begins anew, by --force or in another folder")
    places = [going_on.index(knob) for knob in ("gradient_cache", "activation_checkpointing", "sharding")]
    assert places == sorted(places)
    assert not any(knob in going_on for knob in ("bf16", "lora", "max_length"))
    assert all(knob in anew for knob in ("chunk_tokens", "bf16", "(lora)", "batches_per_step"))
