"""A small language model of one's own, for trying Revela and REPLUG where no pretrained one is at hand.

    python -m benchmarks.small_language_model data/raw_wikipedia/docs.jsonl --output small_llama --minutes 8

A byte-level BPE and a Llama of a few million weights from its configuration, both trained on the texts of JSON lines
(field ``text``), saved as the hub has such models. Every twentieth text is held out. Prints the loss on the second
halves of their blocks behind their own first halves, and behind those of another text: a model that reads what comes
before has less loss behind its own.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPECIAL = ["<unk>", "<s>", "</s>"]
_HELD_OUT = 20
_WARM_UP = 50


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose texts begin with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def blocks_of(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], length: int) -> Tensor:
    """Texts cut into blocks, of one text each: int64 (blocks, length). What is left of a text is not read."""
    blocks = []
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        blocks.append(ids[: len(ids) // length * length].view(-1, length))
    return torch.cat(blocks)


@torch.inference_mode()
def losses(model: LlamaForCausalLM, blocks: Tensor) -> tuple[float, float]:
    """Of second halves behind their own first halves, and behind those that stand half of all blocks on, in nats."""
    half = blocks.shape[1] // 2
    found = []
    for before in (blocks, blocks.roll(len(blocks) // 2, dims=0)):
        read = torch.cat([before[:, :half], blocks[:, half:]], dim=1)
        labels = read.clone()
        labels[:, :half] = -100
        of_parts = [
            model(input_ids=ids, labels=own).loss.item()
            for ids, own in zip(read.split(64), labels.split(64), strict=True)
        ]
        found.append(sum(of_parts) / len(of_parts))
    return found[0], found[1]


def shuffled(blocks: Tensor, size: int, seed: int = 0) -> Iterator[Tensor]:
    """Batches, epoch after epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(blocks), generator=generator).split(size):
            yield blocks[rows]


def main() -> None:
    """Trains for so many minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON lines with the field text")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8_000)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--batch-size", type=int, default=16)
    arguments = parser.parse_args()
    texts = [json.loads(line)["text"] for file in arguments.files for line in file.open(encoding="utf-8")]
    tokenizer = train_tokenizer(texts, arguments.vocabulary)
    held_out = blocks_of(tokenizer, texts[::_HELD_OUT], arguments.length)
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(len(held_out), 256)).long()]  # of many texts
    blocks = blocks_of(tokenizer, [t for n, t in enumerate(texts) if n % _HELD_OUT], arguments.length)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 32,
        num_key_value_heads=arguments.width // 64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    started, budget, steps = time.monotonic(), 60 * arguments.minutes, 0
    for batch in shuffled(blocks, arguments.batch_size):
        done = (time.monotonic() - started) / budget
        if done >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (steps + 1) / _WARM_UP) * (1 - done)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 50 == 0:
            print(f"{steps} steps, loss {loss.item():.3f}", flush=True)
    own, other = losses(model.eval(), held_out)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    size = sum(weight.numel() for weight in model.parameters()) / 1e6
    print(
        f"{size:.1f} million weights, {steps} steps on {len(blocks):,} blocks, held-out loss {own:.3f} behind the same"
        f" text, {other:.3f} behind another"
    )


if __name__ == "__main__":
    main()
