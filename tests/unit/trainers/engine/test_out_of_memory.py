import torch

from trainers.engine.settings import out_of_memory_message

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


def test_it_says_what_was_asked_for_and_first_what_the_run_goes_on_with():
    objective = {"chunk_size": 64, "gradient_cache": False}
    message = out_of_memory_message(ERROR, settings(objective=objective, training={"bf16": False}))
    assert message.startswith(
        "The GPU's memory is full: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.02"
        " GiB is free. With these the run goes on from its checkpoint, the cheapest first: (1) set"
        " objective.gradient_cache to true: memory then grows with the chunk (chunk_size 64), not with the batch;"
    )
    going_on, anew = message.split(" With these it begins anew, by --force or in another folder: (4) ")
    places = [going_on.index(knob) for knob in ("gradient_cache", "activation_checkpointing", "sharding")]
    assert places == sorted(places)
    assert [knob for knob in ("chunk_size", "bf16", "(lora)", "batches_per_step") if knob in anew] == [
        "bf16",
        "(lora)",
        "batches_per_step",
    ]
    assert not any(knob in going_on for knob in ("bf16", "lora", "max_length"))
    assert message.endswith("(training.batches_per_step).")


def test_another_chunk_size_begins_the_run_anew():
    going_on, anew = out_of_memory_message(ERROR, settings()).split("it begins anew")
    assert "gradient_cache" not in going_on
    assert "(3) set objective.gradient_cache to true with objective.chunk_size 32" in anew
    assert "bf16" not in anew
    cached = settings(objective={"chunk_size": 16, "gradient_cache": True})
    going_on, anew = out_of_memory_message(ERROR, cached).split("it begins anew")
    assert "chunk_size" not in going_on
    assert "lower objective.chunk_size (now 16)" in anew


def test_it_leaves_out_what_is_set_already():
    everything = settings(
        objective={"chunk_size": 16, "gradient_cache": True},
        activation_checkpointing=True,
        sharding="sharded",
        lora={"rank": 8},
        training={"bf16": False},
    )
    message = out_of_memory_message(ERROR, everything)
    assert "goes on" not in message
    assert "(1) lower objective.chunk_size (now 16)" in message
    assert "(2) set training.bf16 to true; (3) cut texts shorter" in message
    smallest = out_of_memory_message(ERROR, everything | {"objective": {"chunk_size": 1, "gradient_cache": True}})
    assert "chunk_size" not in smallest
    assert "gradient_cache" not in out_of_memory_message(ERROR, settings(objective={"kind": "other"}))
