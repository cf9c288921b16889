"""What a GPU gives, and what remedies for each bound are worth on it: what ``benchmarks.gpu_check`` decides them by.

Of what is measured the product has the setting ``compile`` alone. A row's note says which figure decides, and names
what the device or the version lacks.
"""

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.device_checks import Bench, Finding
from benchmarks.peer_checks import Run, bare_forward, encoder_of, padded_batches, seconds_of_run, wait
from benchmarks.random_encoders import random_texts
from retrieval.embedding import token_budget_batches
from retrieval.encoders.attention import last_states
from retrieval.encoders.structure import transformer_blocks
from retrieval.encoders.text_encoder import TextEncoder
from retrieval.encoders.transformer import compile_blocks
from trainers.estimate.made_up import token_counts

_REPEATS = 20
_SECONDS_OF_A_RUN = 0.5  # that repetitions may take together
_WORTH_IT = 1.15  # times faster, below which no remedy is taken up
_HEADS, _WIDTH, _WINDOW = 12, 64, 64  # of BERT-base and ModernBERT; how far a token reads in ModernBERT's windows

Leaves = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


def milliseconds(bench: Bench, run: Run) -> float:
    """Of one run, the mean of some, after two that don't count."""
    run()
    repeats = max(1, min(_REPEATS, int(_SECONDS_OF_A_RUN / seconds_of_run(bench, run))))
    return 1000 * seconds_of_run(bench, lambda: [run() for _ in range(repeats)]) / repeats


def tried(bench: Bench, runs: Mapping[str, Callable[[], Run]]) -> tuple[dict[str, float], str]:
    """Milliseconds of each that can be had here, and why the others can't."""
    figures, absent = {}, []
    for name, prepare in runs.items():
        try:
            figures[f"{name}, ms"] = bench.so_far[f"{name}, ms"] = milliseconds(bench, prepare())
        except Exception as error:  # a kernel that this device or version lacks
            absent.append(f"no {name}: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"[:120])
    return figures, "; ".join(absent)


def check_machine(bench: Bench) -> Finding:
    """What the device gives: products, copies, uploads, launches."""
    is_gpu = bench.device.type == "cuda"
    side, numbers = (8192, 1 << 28) if is_gpu else (256, 1 << 20)
    dtype = torch.bfloat16 if bench.bf16 else torch.float32
    factor = torch.randn(side, side, device=bench.device, dtype=dtype)
    source = torch.ones(numbers, device=bench.device, dtype=torch.uint8)
    target, host = torch.empty_like(source), torch.ones(numbers, dtype=torch.uint8)
    one, launches = torch.ones(1, device=bench.device), 1000
    figures = {
        "TFLOP/s": 2e-9 * side**3 / milliseconds(bench, lambda: factor @ factor),
        "copied GB/s": 2e-6 * numbers / milliseconds(bench, lambda: target.copy_(source)),
        "uploaded GB/s": 1e-6 * numbers / milliseconds(bench, lambda: target.copy_(host)),
        "us a launch": milliseconds(bench, lambda: [one.add_(1) for _ in range(launches)]) * 1000 / launches,
    }
    if is_gpu:
        pinned = host.pin_memory()
        figures["uploaded GB/s, pinned"] = (
            1e-6 * numbers / milliseconds(bench, lambda: target.copy_(pinned, non_blocking=True))
        )
    return Finding(True, "the constants of raytriever estimate", figures)


def check_compiled(name: str, bench: Bench) -> Finding:
    """A pass as it is, by the setting ``compile``, and replayed as a CUDA graph; forward, and both ways in training."""
    is_gpu, case = bench.device.type == "cuda", bench.size.cases[name]
    eager = encoder_of(case, bench)
    compiled = copy.deepcopy(eager)
    compile_blocks(compiled.transformer, "inductor" if is_gpu else "eager")
    trained, trained_compiled = (copy.deepcopy(each).float().train() for each in (eager, eager))
    compile_blocks(trained_compiled.transformer, "inductor" if is_gpu else "eager")

    def forward(encoder: TextEncoder, batch: Mapping[str, Tensor]) -> Run:
        return lambda: bare_forward(encoder, [batch])

    def both_ways(encoder: TextEncoder, batch: Mapping[str, Tensor]) -> Run:
        def run() -> None:
            with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.bf16):
                states = last_states(encoder.transformer, batch)
            states.sum().backward()

        return run

    ways = {
        "forward": partial(forward, eager),
        "forward, CUDA graph": partial(_graph, eager),
        "forward, compiled": partial(forward, compiled),
        "both ways": partial(both_ways, trained),
        "both ways, compiled": partial(both_ways, trained_compiled),
    }
    figures: dict[str, float] = {}
    for tokens in (2_048, 16_384) if is_gpu else (512,):
        texts = random_texts(case, 1 + 2 * tokens // case.document_tokens, case.document_tokens, seed=1)
        batch = padded_batches(eager, texts, tokens)[0]
        found, lacking = tried(bench, {f"{name}, {tokens:,}": partial(way, batch) for name, way in ways.items()})
        figures |= found
    note = f"a graph, or compile by default, where one is {_WORTH_IT} times as fast for 16,384 tokens. {lacking}"
    return Finding(True, note.strip(), figures)


def _graph(encoder: TextEncoder, batch: Mapping[str, Tensor]) -> Run:
    """The replay of a captured pass over one batch."""
    if not torch.cuda.is_available():
        raise RuntimeError("graphs are CUDA's")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bare_forward(encoder, [batch] * 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        last_states(encoder.transformer, batch)
    replay: Run = graph.replay
    return replay


def check_attention(name: str, bench: Bench) -> Finding:
    """A layer's attention, forward and backward, of a training chunk: padded with a mask, without one, and unpadded."""
    case, budget = bench.size.cases[name], 16_384 if bench.device.type == "cuda" else 256
    windows = case.config["model_type"] == "modernbert"
    counts = [min(each, case.cut) for each in token_counts(case.pairs, case.document_tokens)]
    batches = [
        sorted((counts[place] for place in batch), reverse=True) for batch in token_budget_batches(counts, budget)
    ]
    lengths = max(batches, key=lambda batch: max(batch) * len(batch) - sum(batch))  # the most padding
    dtype = torch.bfloat16 if bench.bf16 else torch.float32
    rows, longest, total = len(lengths), max(lengths), sum(lengths)
    padded = _leaves(bench, dtype, rows, _HEADS, longest, _WIDTH)
    flat = _leaves(bench, dtype, total, _HEADS, _WIDTH)
    places = torch.arange(longest, device=bench.device)
    sizes = torch.tensor(lengths, device=bench.device)
    seen = (places < sizes[:, None])[:, None, None]
    near = (places[:, None] - places).abs() <= _WINDOW
    mask = seen & near | (places[:, None] == places) if windows else seen
    starts = functional.pad(sizes.cumsum(0), (1, 0)).int()

    def masked() -> Run:
        return lambda: _both_ways(functional.scaled_dot_product_attention(*padded, attn_mask=mask), padded)

    def unmasked() -> Run:
        return lambda: _both_ways(functional.scaled_dot_product_attention(*padded), padded)

    def unpadded() -> Run:
        from torch.nn.attention.varlen import varlen_attn

        window = (_WINDOW, _WINDOW) if windows else (-1, -1)
        return lambda: _both_ways(varlen_attn(*flat, starts, starts, longest, longest, window_size=window), flat)

    def flex() -> Run:
        return _flex(padded, sizes, _WINDOW if windows else longest, bench)

    found, lacking = tried(bench, {"padded": masked, "no mask": unmasked, "unpadded": unpadded, "flex": flex})
    encoder = encoder_of(case, bench)
    batch = padded_batches(encoder, random_texts(case, rows, total / rows, seed=2), 1 << 30)[0]
    layers = len(transformer_blocks(encoder.transformer))

    def layer() -> None:
        last_states(encoder.transformer, batch).sum().backward()

    encoder.train()
    figures = found | {
        "a layer of the model, ms": milliseconds(bench, layer) / layers,
        "padding": 1 - total / rows / longest,
    }
    texts = f"{rows} texts of up to {longest:,} tokens{', in windows' if windows else ''}"
    note = f"{texts}: unpadded attention where it saves more than a tenth of a layer. {lacking}"
    return Finding(True, note.strip(), figures)


def _leaves(bench: Bench, dtype: torch.dtype, *shape: int) -> Leaves:
    queries, keys, values = (
        torch.randn(*shape, device=bench.device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    return queries, keys, values


def _both_ways(found: Tensor | tuple[Tensor, Tensor], leaves: Leaves) -> None:
    attended = found if isinstance(found, Tensor) else found[0]
    torch.autograd.grad(attended, leaves, torch.ones_like(attended))


def _flex(padded: Leaves, sizes: Tensor, window: int, bench: Bench) -> Run:
    """FlexAttention, compiled, over the blocks that hold a pair of tokens which see each other."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if bench.device.type != "cuda":
        raise RuntimeError("compiled for GPUs alone")

    def sees(text: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < sizes[text]) & ((query - key).abs() <= window)

    rows, _, longest, _ = padded[0].shape
    blocks = create_block_mask(sees, rows, None, longest, longest, device=str(bench.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: _both_ways(compiled(*padded, block_mask=blocks), padded)


def check_budgets(name: str, bench: Bench) -> Finding:
    """Tokens a second of bare passes by the padded tokens of each: forward (embedding), and both ways (training)."""
    case = bench.size.cases[name]
    encoder = encoder_of(case, bench)
    texts = random_texts(case, case.texts // 8, case.document_tokens, seed=3)
    figures: dict[str, float] = {}
    for budget in (8_192, 16_384, 32_768, 65_536, 131_072) if bench.device.type == "cuda" else (256, 512):
        batches = padded_batches(encoder, texts, budget)
        tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)

        def both_ways(batches: list[dict[str, Tensor]] = batches) -> None:
            for batch in batches:
                last_states(encoder.transformer, batch).sum().backward()

        try:
            figures[f"embedding, {budget:,}"] = (
                1000 * tokens / milliseconds(bench, lambda batches=batches: bare_forward(encoder, batches))
            )
            figures[f"training, {budget:,}"] = 1000 * tokens / milliseconds(bench, both_ways)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if bench.left() < 2:
            break
    return Finding(True, "tokens/s by token_budget (32,768 by default) and chunk_tokens (16,384)", figures)


def check_optimizer(name: str, bench: Bench) -> Finding:
    """An update of AdamW by its fused kernel, which training takes, and by the one over lists of tensors."""
    weights = list(encoder_of(bench.size.cases[name], bench).float().parameters())
    for weight in weights:
        weight.grad = torch.ones_like(weight)

    def update(*, fused: bool) -> Run:
        return torch.optim.AdamW(weights, lr=1e-6, fused=fused, foreach=not fused).step

    figures, lacking = tried(bench, {"fused": partial(update, fused=True), "foreach": partial(update, fused=False)})
    return Finding(True, f"fused stays where it is the faster. {lacking}".strip(), figures)


def check_tokenizing(name: str, bench: Bench) -> Finding:
    """Tokens a second of one call, in all threads of the process, and of two calls at once, as embedding makes them."""
    from concurrent.futures import ThreadPoolExecutor

    case = bench.size.cases[name]
    encoder = encoder_of(case, bench)
    texts = random_texts(case, min(case.texts, 16_384), case.document_tokens, seed=4)
    halves = [texts[::2], texts[1::2]]
    encoder.tokenize_ids(texts[:8], "document")
    wait(bench)
    started = time.perf_counter()
    tokens = sum(map(len, encoder.tokenize_ids(texts, "document")))
    alone = time.perf_counter() - started
    with ThreadPoolExecutor(2) as pool:
        started = time.perf_counter()
        list(pool.map(lambda part: encoder.tokenize_ids(part, "document"), halves))
        together = time.perf_counter() - started
    figures = {"tokens/s": tokens / alone, "two at once, tokens/s": tokens / together}
    return Finding(True, "more threads where the embedding row waits for more than a tenth of its time", figures)
