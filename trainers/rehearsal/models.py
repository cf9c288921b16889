"""Toy models for rehearsals: of the hub's families by their configurations, random weights, saved as the hub has them.

Each has as many positions as the real one, so that lengths are checked, and two layers or as many as a recipe names.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, read_yaml

_WIDTH, _VOCABULARY = 64, 2000
_SMALL = {
    "hidden_size": _WIDTH,
    "intermediate_size": 2 * _WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # fixed, as one tokenizer may read for several models, and two trainings of one differ in rare pieces
    "vocab_size": _VOCABULARY,
}


@dataclass(frozen=True)
class Family:
    """How models of a kind read a text: their special tokens, what stands around it, what their tokenizer says.

    ``head``: of the weights, by the name that transformers has for it.
    """

    tokens: dict[str, str]
    template: str = "$A"
    tokenizer: dict[str, str | int] = field(default_factory=dict)  # of its configuration
    head: str = ""


_BERT = Family(
    {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
    "[CLS] $A [SEP]",
)
_ROBERTA = Family(
    {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    | {"cls_token": "<s>", "sep_token": "</s>"},
    "<s> $A </s>",
    {"model_max_length": 512},
)
_END = "<|endoftext|>"

FAMILIES = {
    "bert": _BERT,
    "distilbert": _BERT,
    "modernbert": _BERT,
    "nomic_bert": _BERT,
    "roberta": _ROBERTA,
    "mpnet": _ROBERTA,
    "t5": Family({"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}, "$A </s>"),
    "llama": Family(
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        "<|begin_of_text|> $A",
        head="ForCausalLM",
    ),
    "smollm": Family(
        {"bos_token": _END, "eos_token": _END, "unk_token": _END},
        tokenizer={"tokenizer_class": "GPT2Tokenizer"},
        head="ForCausalLM",
    ),
    "qwen2": Family(
        {"eos_token": _END, "pad_token": _END}, tokenizer={"tokenizer_class": "Qwen2Tokenizer"}, head="ForCausalLM"
    ),
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


TRAINED = "sentence-transformers/all-MiniLM-L6-v2"
"""Whose toy stands in for an encoder that another run trains."""


@cache
def published() -> Mapping[str, Any]:
    """The table of published models and collections."""
    path = Path(__file__).with_name("published.yaml")
    return read_yaml(path, str(path))


def published_configuration(model: str) -> dict[str, Any]:
    """What the configuration of a model of ``HUB_MODELS`` says."""
    known = published()
    return {**known["families"][HUB_MODELS[model].family], **known["models"].get(model, {})}


def require_known(models: Sequence[str]) -> None:
    """Raises ``UserError`` for a model of the hub whose family isn't known here."""
    for model in models:
        if model not in HUB_MODELS:
            hint = did_you_mean(model, list(HUB_MODELS))
            raise UserError(
                f"No toy can stand in for the model {model}, because its family is unknown.{hint} Name a folder in"
                " its place by --set. Or add it to HUB_MODELS in trainers/rehearsal/models.py."
            )


def write_model(model: str, layers: int, texts: Sequence[str], folder: Path) -> None:
    """The toy of a model with so many layers, whose tokenizer is made for ``texts``, in ``folder``."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    transformers.logging.disable_progress_bar()
    known = HUB_MODELS[model]
    family = FAMILIES[known.family]
    tokenizer = _tokenizer(family, texts)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in family.tokens.items()}
    ends = {"bos_token_id": ids.get("cls_token_id"), "eos_token_id": ids.get("sep_token_id")} | ids
    values: dict[str, Any] = published_configuration(model) | _SMALL | ends | {"num_hidden_layers": layers}
    torch.manual_seed(0)
    weights = getattr(transformers, f"AutoModel{family.head}").from_config(transformers.AutoConfig.for_model(**values))
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
    """A byte-level tokenizer with the family's special tokens first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = list(dict.fromkeys(family.tokens.values()))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    around = [(token, tokenizer.token_to_id(token)) for token in special if token in family.template]
    tokenizer.post_processor = processors.TemplateProcessing(single=family.template, special_tokens=around)
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
