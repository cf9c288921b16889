"""In-batch attention against its equations written out, and a language model's step against the two-pass form of it.

    python -m benchmarks.in_batch_attention reading
    python -m benchmarks.in_batch_attention step

``reading``: cross-document attention of one layer, forward and backward, of 16 documents of 160 tokens with the heads
of a model of a billion weights (32 of queries, 8 of keys and values, 64 wide), in float32. The other side takes Eq. 5
to 7 as they are printed, all pairs of documents at once. Prints what each keeps for the backward pass, how far the
gradients are apart, and the ratio of times; then the same where the similarities are those of a temperature of 1e-4.

``step``: forward and backward of a small Llama with in-batch attention, against a pass of the e-stream through
transformers that returns its cache, then one of the h-stream that reads the cache, with full logits in both.

Sides take turns whose order alternates; the median of the rounds' ratios counts. Times are the processor's, in one
thread, so that other work on the machine counts little.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainers.objectives.revela.cross_attention import cross_document_attention, find_readers
from trainers.objectives.revela.language_model import InBatchLanguageModel
from trainers.objectives.revela.objective import in_batch_similarity

DOCUMENTS, LENGTH = 16, 160
HEADS, GROUPS, DIMENSION = 32, 8, 64
EPSILON = 1e-6

Step = Callable[[], Sequence[Tensor]]


def literal(queries: Tensor, keys: Tensor, values: Tensor, similarity: Tensor) -> Tensor:
    """Eq. 5 to 7 of all pairs: (B, H, L, D)."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = torch.einsum("ihld,jhmd->ijhlm", queries, keys) / math.sqrt(queries.shape[-1])
    weights = scores.softmax(dim=-1)
    read = torch.einsum("ijhlm,jhmd->ijhld", weights, values)
    norms = torch.einsum("ijhlm,jhm->ijhl", weights, values.norm(dim=-1))
    others = similarity * (1 - torch.eye(len(similarity)))
    return torch.einsum("ij,ijhld->ihld", others, read / (norms + EPSILON).unsqueeze(-1))


def kept_bytes(forward: Callable[[], Tensor], weights: Sequence[Tensor] = ()) -> int:
    """Storages that the backward pass of ``forward`` needs, each once, without those of ``weights``."""
    known = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    total = sum(kept.values())
    del result
    return total


def compare(sides: dict[str, Step], rounds: int) -> None:
    """Prints the time of each side in each round, and the first's share of every other's."""
    names = list(sides)
    results = {name: [tensor.clone() for tensor in sides[name]()] for name in names}
    for name in names[1:]:
        pairs = zip(results[names[0]], results[name], strict=True)
        apart = max(float((found - other).abs().max() / other.abs().max()) for found, other in pairs)
        print(f"{names[0]} and {name}: results and gradients {apart:.1e} of the largest entry apart", flush=True)
    del results
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            started = time.process_time()
            sides[name]()
            seconds[name].append(time.process_time() - started)
        print(", ".join(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()), flush=True)
    for name in names[1:]:
        ratios = [own / other for own, other in zip(seconds[names[0]], seconds[name], strict=True)]
        print(
            f"{names[0]} takes {np.median(ratios):.3f} of the time of {name} (median of {rounds}, one thread)",
            flush=True,
        )


def reading(rounds: int) -> None:
    """Cross-document attention of one layer."""
    torch.manual_seed(0)
    queries = torch.randn(DOCUMENTS, HEADS, LENGTH, DIMENSION, requires_grad=True)
    keys, values = (torch.randn(DOCUMENTS, GROUPS, LENGTH, DIMENSION, requires_grad=True) for _ in range(2))
    cotangent = torch.randn_like(queries)
    mask = torch.ones(DOCUMENTS, LENGTH, dtype=torch.long)
    one, other = torch.randn(2, DOCUMENTS, 256) + torch.randn(256)
    for temperature in (0.1, 1e-4):
        similarity = in_batch_similarity(one, other, temperature).requires_grad_()
        given = queries, keys, values, similarity

        def ours(recompute: bool, given: tuple[Tensor, Tensor, Tensor, Tensor] = given) -> Tensor:
            return cross_document_attention(*given, find_readers(mask, given[3]), recompute=recompute)

        forwards = {
            "ours": lambda ours=ours: ours(True),
            "ours without recomputation": lambda ours=ours: ours(False),
            "literal": lambda given=given: literal(*given),
        }
        live = int((similarity != 0).sum())
        print(f"temperature {temperature:g}: {live} of {DOCUMENTS * (DOCUMENTS - 1)} pairs have a weight")
        if temperature == 0.1:
            sizes = {name: kept_bytes(forward) for name, forward in forwards.items()}
            for name, size in sizes.items():
                print(f"{name}: {size / 2**20:,.0f} MiB kept, 1/{sizes['literal'] / size:.1f} of literal")
        checked = given if temperature == 0.1 else given[:3]  # a Sim of 0 has a gradient in the literal form alone

        def step(forward: Callable[[], Tensor], checked: tuple[Tensor, ...] = checked) -> list[Tensor]:
            result = forward()
            return [result.detach(), *torch.autograd.grad((result * cotangent).sum(), checked)]

        compare({name: lambda f=forward, step=step: step(f) for name, forward in forwards.items()}, rounds)


def two_pass_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float,
    similarity: Tensor,
    e_cache: Any,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of the h-stream inside transformers' own layers: causal, plus the cached documents."""
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    attended = nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    cached = e_cache.layers[module.layer_idx]
    attended = attended + literal(query, cached.keys, cached.values, similarity)
    return attended.transpose(1, 2).contiguous(), None


def two_passes(model: Any, input_ids: Tensor, similarity: Tensor) -> Tensor:
    """The loss: the e-stream with its cache and logits, then the h-stream, as the authors run them."""
    model.set_attn_implementation("sdpa")
    cache = model(input_ids, use_cache=True).past_key_values
    model.set_attn_implementation("two_passes")
    logits = model(input_ids, use_cache=False, similarity=similarity, e_cache=cache).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())


def step(rounds: int) -> None:
    """Forward and backward of a small language model, all weights trained."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("two_passes", two_pass_attention)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    in_batch = InBatchLanguageModel(model)
    input_ids = torch.randint(config.vocab_size, (DOCUMENTS, LENGTH))
    mask = torch.ones_like(input_ids)
    one, other = torch.randn(2, DOCUMENTS, 256) + torch.randn(256)
    weights = list(model.parameters())
    for temperature in (0.1, 1e-4):
        similarity = in_batch_similarity(one, other, temperature).requires_grad_()
        forwards = {
            "ours": lambda s=similarity: in_batch(input_ids, mask, s)[0],
            "two passes": lambda s=similarity: two_passes(model, input_ids, s),
        }
        print(f"temperature {temperature:g}")
        for name, forward in forwards.items():
            print(f"{name}: {kept_bytes(forward, weights) / 2**20:,.0f} MiB kept")

        def gradients(forward: Callable[[], Tensor]) -> list[Tensor]:
            loss = forward()
            return [loss.detach(), *torch.autograd.grad(loss, weights)]

        compare({name: lambda f=forward: gradients(f) for name, forward in forwards.items()}, rounds)


def main() -> None:
    """Measures one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comparison", choices=("reading", "step"))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (reading if arguments.comparison == "reading" else step)(arguments.rounds)


if __name__ == "__main__":
    main()
