import torch

from raytriever.trainers.out_of_memory import out_of_memory_message

ERROR = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.02 GiB is free."
    " Process 1 has 78.15 GiB memory in use. Of the allocated memory 70 GiB is allocated by PyTorch."
)


def settings(**changes):
    values = {
        "objective": {"kind": "contrastive", "chunk_size": None, "gradient_cache": False},
        "training": {"bf16": True},
        "activation_checkpointing": False,
        "sharding": "replicated",
        "lora": None,
    }
    return values | changes


def test_it_says_what_was_asked_for_and_names_the_cheapest_knob_first():
    message = out_of_memory_message(ERROR, settings())
    assert message.startswith(
        "The GPU's memory is full: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.02"
        " GiB is free. In this order: (1) set objective.gradient_cache to true with objective.chunk_size 32:"
    )
    places = [message.index(knob) for knob in ("gradient_cache", "activation_checkpointing", "sharding", "(lora)")]
    assert places == sorted(places)
    assert "bf16" not in message
    assert message.endswith("(training.batches_per_step).")


def test_it_leaves_out_what_is_set_already():
    objective = {"chunk_size": 16, "gradient_cache": True}
    everything = settings(
        objective=objective,
        activation_checkpointing=True,
        sharding="sharded",
        lora={"rank": 8},
        training={"bf16": False},
    )
    message = out_of_memory_message(ERROR, everything)
    assert "(1) lower objective.chunk_size (now 16)" in message
    assert "(2) set training.bf16 to true; (3) cut texts shorter" in message
    smallest = out_of_memory_message(ERROR, everything | {"objective": {"chunk_size": 1, "gradient_cache": True}})
    assert "chunk_size" not in smallest
    kept = out_of_memory_message(ERROR, settings(objective={"chunk_size": 64, "gradient_cache": False}))
    assert "gradient_cache to true with objective.chunk_size 64" in kept
    assert "gradient_cache" not in out_of_memory_message(ERROR, settings(objective={"kind": "other"}))
