"""Toy models for rehearsals: of the hub's families by their configurations, random weights, saved as the hub has them.

Each has as many positions as the real one, so that lengths are checked, and two layers or as many as a recipe names.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean

_WIDTH, _HEADS, _VOCABULARY = 64, 4, 2000
_BERT = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
_ROBERTA = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA |= {"cls_token": "<s>", "sep_token": "</s>"}
_T5 = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
_SMOLLM = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
_QWEN = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}


@dataclass(frozen=True)
class Family:
    """An architecture by its name in transformers, what its configuration says, and how its tokenizer reads texts."""

    name: str
    settings: dict[str, Any]
    tokens: dict[str, str] = field(default_factory=lambda: _BERT)
    pieces: Literal["words", "bytes", "unigrams"] = "words"  # of WordPiece, byte-level BPE, SentencePiece
    template: str = "[CLS] $A [SEP]"
    head: str = "Model"
    layers: str = "num_hidden_layers"  # the configuration's name for their number
    tokenizer: dict[str, Any] = field(default_factory=dict)  # of its configuration


_SHAPE = {"hidden_size": _WIDTH, "num_attention_heads": _HEADS, "intermediate_size": 2 * _WIDTH}
_SHAPE_OF_ROBERTA = _SHAPE | {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 514}
_SHAPE_OF_MODERN = _SHAPE | {
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_SHAPE_OF_T5 = {"d_model": _WIDTH, "d_kv": _WIDTH // _HEADS, "d_ff": 2 * _WIDTH, "num_heads": _HEADS}
_DECODER = _SHAPE | {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True}
_LIMIT = {"model_max_length": 512}


def _decoder(name: str, positions: int, tokens: dict[str, str], template: str = "", **tokenizer: str) -> Family:
    ends = {"eos_token_id": len(set(tokens.values())) - 1, "max_position_embeddings": positions}
    return Family(name, _DECODER | ends, tokens, "bytes", template, "ForCausalLM", tokenizer=tokenizer)


FAMILIES = {
    "bert": Family("Bert", _SHAPE | {"max_position_embeddings": 512}),
    "distilbert": Family("DistilBert", {"dim": _WIDTH, "n_heads": _HEADS, "hidden_dim": 2 * _WIDTH}, layers="n_layers"),
    "roberta": Family(
        "Roberta", _SHAPE_OF_ROBERTA | {"type_vocab_size": 1}, _ROBERTA, "bytes", "<s> $A </s>", tokenizer=_LIMIT
    ),
    "mpnet": Family("MPNet", _SHAPE_OF_ROBERTA, _ROBERTA, template="<s> $A </s>", tokenizer=_LIMIT),
    "modernbert": Family("ModernBert", _SHAPE_OF_MODERN | {"max_position_embeddings": 8192}),
    "nomic_bert": Family("NomicBert", _SHAPE | {"max_position_embeddings": 2048}),
    "t5": Family("T5", _SHAPE_OF_T5, _T5, "unigrams", "$A </s>", "EncoderModel", "num_layers"),
    "llama": _decoder("Llama", 131_072, _LLAMA, "<|begin_of_text|> $A"),
    "smollm": _decoder("Llama", 8192, _SMOLLM, tokenizer_class="GPT2Tokenizer"),
    "qwen2": _decoder("Qwen2", 32_768, _QWEN, tokenizer_class="Qwen2Tokenizer"),
}


@dataclass(frozen=True)
class HubModel:
    """A model of the hub: its family, and what its repository holds besides."""

    family: str
    pooling: str | None = None  # of a sentence-transformers folder
    dense: bool = False
    normalize: bool = False
    tokenizer: bool = True
    prefix: str = ""  # before the weights' names


HUB_MODELS = {
    "FacebookAI/roberta-base": HubModel("roberta"),
    "HuggingFaceTB/SmolLM2-135M": HubModel("smollm"),
    "Qwen/Qwen2.5-0.5B": HubModel("qwen2"),
    "Shitao/RetroMAE": HubModel("bert"),
    "answerdotai/ModernBERT-base": HubModel("modernbert"),
    "canwenxu/laprador": HubModel("distilbert"),
    "distilbert/distilbert-base-uncased": HubModel("distilbert"),
    "distilbert/distilroberta-base": HubModel("roberta"),
    "facebook/contriever": HubModel("bert"),
    "google-bert/bert-base-uncased": HubModel("bert"),
    "google-t5/t5-base": HubModel("t5"),
    "meta-llama/Llama-3.2-1B": HubModel("llama"),
    "microsoft/graphcodebert-base": HubModel("roberta"),
    "microsoft/mpnet-base": HubModel("mpnet"),
    "microsoft/unixcoder-base": HubModel("roberta"),
    "nomic-ai/nomic-bert-2048": HubModel("nomic_bert", tokenizer=False, prefix="bert."),
    "nomic-ai/nomic-embed-text-v1": HubModel("nomic_bert", pooling="mean"),
    "sentence-transformers/all-MiniLM-L6-v2": HubModel("bert", pooling="mean", normalize=True),
    "sentence-transformers/gtr-t5-base": HubModel("t5", pooling="mean", dense=True, normalize=True),
    "sentence-transformers/msmarco-distilbert-base-tas-b": HubModel("distilbert", pooling="cls"),
}


TRAINED = HubModel("bert", pooling="mean", normalize=True)
"""Stands in for an encoder that another run trains."""


def require_known(models: Sequence[str]) -> None:
    """Raises ``UserError`` for a model of the hub whose family isn't known here."""
    for model in models:
        if model not in HUB_MODELS:
            hint = did_you_mean(model, list(HUB_MODELS))
            raise UserError(
                f"No toy can stand in for the model {model}, because its family is unknown.{hint} Name a folder in"
                " its place by --set. Or add it to HUB_MODELS in trainers/rehearsal/models.py."
            )


def write_model(known: HubModel, layers: int, texts: Sequence[str], folder: Path) -> None:
    """The toy of a model with so many layers, whose tokenizer is made for ``texts``, in ``folder``."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.logging.disable_progress_bar()
    family = FAMILIES[known.family]
    tokenizer = _tokenizer(family, texts)
    # of a fixed size, as one tokenizer may read for several models, and two trainings of one differ in rare pieces
    settings = family.settings | {"vocab_size": _VOCABULARY, family.layers: layers}
    torch.manual_seed(0)
    weights = getattr(transformers, family.name + family.head)(
        getattr(transformers, f"{family.name}Config")(**settings)
    )
    weights.save_pretrained(folder)
    if known.tokenizer:
        tokenizer.save_pretrained(folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | family.tokenizer))
    if known.pooling is not None:
        write_modules(known, folder)
    if known.prefix:
        path = folder / "model.safetensors"
        save_file({f"{known.prefix}{name}": value for name, value in load_file(path).items()}, path, {"format": "pt"})


def _tokenizer(family: Family, texts: Sequence[str]) -> Any:
    """A tokenizer of the family's kind, its special tokens first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys(family.tokens.values()))
    size: dict[str, Any] = {"vocab_size": _VOCABULARY, "special_tokens": special, "show_progress": False}
    if family.pieces == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token=family.tokens["unk_token"]))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(**size)
    elif family.pieces == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(**size, unk_token=family.tokens["unk_token"])
    tokenizer.train_from_iterator(texts, trainer)
    if family.template:
        ids = [(token, tokenizer.token_to_id(token)) for token in special if token in family.template]
        tokenizer.post_processor = processors.TemplateProcessing(single=family.template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **family.tokens)


def write_modules(known: HubModel, folder: Path, width: int = _WIDTH) -> None:
    """What sentence-transformers writes beside a transformer of this ``width``."""
    import torch
    from safetensors.torch import save_file

    dense = {"in_features": width, "out_features": width, "bias": False}
    modes = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
    configs: dict[str, dict[str, Any]] = {
        "Transformer": {},
        "Pooling": {"word_embedding_dimension": width} | {name: key == known.pooling for key, name in modes.items()},
        "Dense": dense | {"activation_function": "torch.nn.modules.linear.Identity"} if known.dense else {},
    }
    kinds = ["Transformer", "Pooling", *(["Dense"] if known.dense else []), *(["Normalize"] if known.normalize else [])]
    modules = []
    for number, kind in enumerate(kinds):
        path = f"{number}_{kind}" if number else ""
        modules.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir(exist_ok=True)
        if configs.get(kind):
            (folder / path / "config.json").write_text(json.dumps(configs[kind]))
    if known.dense:
        save_file({"linear.weight": torch.randn(width, width) / 8}, folder / "2_Dense" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
