"""Toy models for rehearsals: the hub's families by their configurations, random weights, saved as the hub has them.

Each has as many positions as the real one, so that lengths are checked, and two layers or as many as a recipe names.
All have tokenizers of one kind.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from raytriever.errors import UserError
from raytriever.settings.configuration import did_you_mean, read_yaml

WIDTH, _VOCABULARY = 64, 2000
_SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # fixed, as one tokenizer may read for several models, and two trainings of one differ in rare pieces
    "vocab_size": _VOCABULARY,
}
_BEGIN, _PAD, _END, _UNKNOWN, _MASK = "<s>", "<pad>", "</s>", "<unk>", "<mask>"  # by their ids
_DECODERS = ("llama", "qwen2")

TRAINED = "sentence-transformers/all-MiniLM-L6-v2"
"""Whose toy stands in for an encoder that another run trains."""


@cache
def published() -> Mapping[str, Any]:
    """The table of published models and collections."""
    path = Path(__file__).with_name("published.yaml")
    return read_yaml(path, str(path))


def hub_models() -> Mapping[str, Any]:
    """The models of the hub that are known: the family, what the configuration says besides, the modules."""
    models: Mapping[str, Any] = published()["models"]
    return models


def published_configuration(model: str) -> dict[str, Any]:
    """What the configuration of one of ``hub_models`` says."""
    known = hub_models()[model]
    return {**published()["families"][known["family"]], **known.get("config", {})}


def require_known(models: Sequence[str]) -> None:
    """Raises ``UserError`` for a model of the hub whose family isn't known here."""
    for model in models:
        if model not in hub_models():
            hint = did_you_mean(model, list(hub_models()))
            raise UserError(
                f"No toy can stand in for the model {model}, because its family is unknown.{hint} Name a folder in"
                " its place by --set. Or add it to trainers/rehearsal/published.yaml."
            )


def write_model(model: str, layers: int, texts: Sequence[str], folder: Path) -> None:
    """Writes a toy of a model to ``folder``, with so many layers and a tokenizer for ``texts``."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    values: dict[str, Any] = published_configuration(model) | _SMALL | ids | {"num_hidden_layers": layers}
    head = "ForCausalLM" if values["model_type"] in _DECODERS else ""
    torch.manual_seed(0)
    weights = getattr(transformers, f"AutoModel{head}").from_config(transformers.AutoConfig.for_model(**values))
    weights.save_pretrained(folder)
    _tokenizer(texts).save_pretrained(folder)
    if modules := hub_models()[model].get("modules"):
        write_modules(modules, folder)


def _tokenizer(texts: Sequence[str]) -> Any:
    """A byte-level tokenizer that puts special tokens around a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_BEGIN, _PAD, _END, _UNKNOWN, _MASK],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    around = processors.TemplateProcessing(single=f"{_BEGIN} $A {_END}", special_tokens=[(_BEGIN, 0), (_END, 2)])
    tokenizer.post_processor = around
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_BEGIN,
        pad_token=_PAD,
        eos_token=_END,
        unk_token=_UNKNOWN,
        cls_token=_BEGIN,
        sep_token=_END,
        mask_token=_MASK,
    )


def write_modules(modules: Mapping[str, Any], folder: Path, width: int = WIDTH) -> None:
    """What sentence-transformers writes beside a transformer of this ``width``. ``modules``: of the table."""
    import torch
    from safetensors.torch import save_file

    modes = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    pooling = {name: mode == modules["pooling"] for name, mode in modes.items()}
    configs: dict[str, dict[str, Any]] = {"Transformer": {}, "Pooling": {"word_embedding_dimension": width} | pooling}
    if modules.get("dense"):
        linear = {"in_features": width, "out_features": width, "bias": False}
        configs["Dense"] = linear | {"activation_function": "torch.nn.modules.linear.Identity"}
    if modules.get("normalize"):
        configs["Normalize"] = {}
    listed = []
    for number, (kind, config) in enumerate(configs.items()):
        path = f"{number}_{kind}" if number else ""
        listed.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir(exist_ok=True)
        if config:
            (folder / path / "config.json").write_text(json.dumps(config))
        if kind == "Dense":
            save_file({"linear.weight": torch.randn(width, width) / 8}, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))
