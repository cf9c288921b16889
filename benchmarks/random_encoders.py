"""Encoders with random weights in folders of their own, and texts for them: both sides of a comparison load the same.

The tokenizer is a WordPiece of BERT's kind over made-up words, so that tokenizing takes what it takes in earnest.
Dropout is 0: both sides then compute the same numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from trainers.estimate.made_up import token_counts

_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_SUFFIXES = ["##s", "##ed", "##ing", "##er"]
_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))
_LONGEST_WORD = 9
_WITH_SUFFIX = 0.2  # of the words of a text


@dataclass(frozen=True)
class Case:
    """A model by its configuration, and what is encoded with it.

    ``query_tokens``, ``document_tokens``: means. ``cut``: tokens of the longest text; ``texts``: that are embedded;
    ``pairs``: of a training batch, each with a hard negative.
    """

    config: Mapping[str, Any]
    query_tokens: int
    document_tokens: int
    cut: int
    texts: int
    pairs: int


CASES = {
    "MiniLM, short texts": Case(
        {
            "model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6,
            "num_attention_heads": 12, "intermediate_size": 1536, "max_position_embeddings": 512,
        },
        10, 50, 128, 65_536, 512,
    ),
    "BERT-base": Case({"model_type": "bert", "vocab_size": 30522}, 12, 256, 512, 8_192, 128),
    "ModernBERT": Case({"model_type": "modernbert", "vocab_size": 50368}, 12, 1024, 4096, 2_048, 32),
}  # fmt: skip
_TINY = {
    "vocab_size": 1000, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 128,
}  # fmt: skip
_TINY_MODERN = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
REHEARSED_CASES = {
    name: Case(
        {"model_type": case.config["model_type"]}
        | _TINY
        | (_TINY_MODERN if case.config["model_type"] == "modernbert" else {}),
        6, 20, 64, 64, 8,
    )
    for name, case in CASES.items()
}  # fmt: skip


def write_encoder(case: Case, folder: Path) -> Path:
    """The folder, which then holds the model and its tokenizer; once it does, it stays as it is."""
    from transformers import AutoConfig, AutoModel

    if not folder.exists():
        values = {name: value for name, value in case.config.items() if name != "model_type"}
        config = AutoConfig.for_model(case.config["model_type"], **values)
        for name, value in config.to_dict().items():
            if "dropout" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
        _write_tokenizer(folder, case)
    return folder


def _write_tokenizer(folder: Path, case: Case) -> None:
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*_SPECIAL, *_SUFFIXES, *_words(case.config["vocab_size"])]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    around = [(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=case.cut,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


@cache
def _words(vocabulary: int) -> list[str]:
    """Distinct ones, as many as fit beside special tokens and suffixes, but 30,000 at most."""
    generator, wanted = np.random.default_rng(0), min(vocabulary, 30_000) - len(_SPECIAL) - len(_SUFFIXES)
    found: dict[str, None] = {}
    while len(found) < wanted:
        letters = generator.choice(_LETTERS, _LONGEST_WORD)
        found["".join(letters[: generator.integers(2, _LONGEST_WORD + 1)])] = None
    return list(found)


def random_texts(case: Case, count: int, mean: float, seed: int) -> list[str]:
    """Texts of about lognormal lengths around ``mean`` tokens, of words as frequent as Zipf's law has it."""
    generator, words = np.random.default_rng(seed), np.array(_words(case.config["vocab_size"]))
    lengths = np.maximum(1, np.round(np.array(token_counts(count, mean)) / (1 + _WITH_SUFFIX))).astype(int)
    ranks = np.exp(generator.random(lengths.sum()) * np.log(len(words))).astype(int) - 1
    suffixes = np.array([suffix.removeprefix("##") for suffix in _SUFFIXES])
    endings = np.where(generator.random(len(ranks)) < _WITH_SUFFIX, generator.choice(suffixes, len(ranks)), "")
    written = np.char.add(words[ranks], endings)
    return [" ".join(part) for part in np.split(written, np.cumsum(lengths)[:-1])]


def random_batches(case: Case, count: int) -> list[pa.Table]:
    """Training batches as they are stored, with what a contrastive objective reads."""
    tables = []
    for number in range(count):
        queries = random_texts(case, case.pairs, case.query_tokens, 2 * number)
        documents = random_texts(case, 2 * case.pairs, case.document_tokens, 2 * number + 1)
        columns: dict[str, Any] = {"query": queries, "document": documents[: case.pairs]}
        columns["hard_negatives"] = pa.array([[text] for text in documents[case.pairs :]], pa.list_(pa.string()))
        columns["masked"] = pa.array([[]] * case.pairs, pa.list_(pa.int32()))
        tables.append(pa.table(columns))
    return tables
