"""Tiny models with random weights of every architecture, saved as the hub has them: config, safetensors, tokenizer.

folder = save_tiny_model("llama", tmp_path / "llama")
folder = tiny_model("llama")  # shared by all tests: copy it before you change it
folder = save_sentence_transformer(base, tmp_path / "model", pooling="lasttoken")
encoder = load_tiny(folder, pooling="mean")
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from retrieval.embedding import encode_texts
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import EncoderSettings, Role
from retrieval.encoders.text_encoder import TextEncoder, load_encoder
from retrieval.encoders.towers import Towers, load_towers

SENTENCES = [
    "The index of a book lists its words and the pages that hold them.",
    "A river carries the water of its springs to the sea.",
    "Return the value of the first key that the table holds.",
    "Whoever reads a long report wants its result in the first line.",
    "Fünf weiße Möwen über dem Hafen, naïve façades and 漢字.",
    "def total(numbers):\n    return sum(number for number in numbers)",
]
TEXTS = [
    SENTENCES[0],
    "x",
    "UPPER and lower, with  two spaces and an end ",
    " ".join(SENTENCES),  # longer than any limit
    "\tdef f(a):\n\t\treturn a\n",
    "Straße 漢字 🙂",
    "the sea",
]
WIDTH = 32
VOCABULARY = 400
POSITIONS = 48  # tokens that a tiny model was made for


@dataclass(frozen=True)
class Architecture:
    """A transformers configuration's name, what it says, and how its tokenizer puts special tokens around a text."""

    config: str
    settings: dict[str, Any]
    special: tuple[str, ...]  # in order of their ids
    template: str | None  # None: nothing is put around a text
    names: dict[str, str]  # cls_token, eos_token…
    tokenizer_config: dict[str, Any] = field(default_factory=dict)


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
# special tokens, template, names
_BERT = (
    ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "[CLS] $A [SEP]",
    {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
)
_ROBERTA = (
    ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
    "<s> $A </s>",
    {
        "bos_token": "<s>",
        "cls_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "unk_token": "<unk>",
    },
    {"model_max_length": POSITIONS},
)
_ROBERTA_SHAPE = _SHAPE | {
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": POSITIONS + 2,
}
_DECODER = _SHAPE | {"num_key_value_heads": 2, "rms_norm_eps": 1e-5}
_QWEN = (
    ("<|endoftext|>",),
    None,
    {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    {"tokenizer_class": "Qwen2Tokenizer"},
)
_QWEN_SHAPE = _DECODER | {"bos_token_id": 0, "eos_token_id": 0}

ARCHITECTURES = {
    "bert": Architecture("BertConfig", _SHAPE, *_BERT),
    "roberta": Architecture("RobertaConfig", _ROBERTA_SHAPE | {"type_vocab_size": 1}, *_ROBERTA),
    "mpnet": Architecture("MPNetConfig", _ROBERTA_SHAPE, *_ROBERTA),
    "distilbert": Architecture("DistilBertConfig", _SHAPE | {"hidden_dim": 48}, *_BERT),
    "modernbert": Architecture(
        "ModernBertConfig",
        _SHAPE
        | {"num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 3}
        | {"pad_token_id": 0, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3},
        *_BERT,
    ),
    "nomic_bert": Architecture("NomicBertConfig", _SHAPE, *_BERT),
    "t5": Architecture(
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_factor": 0.5,
        },
        ("<pad>", "</s>", "<unk>"),
        "$A </s>",
        {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"},
        {"model_max_length": POSITIONS},
    ),
    "llama": Architecture(
        "LlamaConfig",
        _DECODER | {"bos_token_id": 1, "eos_token_id": 2},
        ("<unk>", "<s>", "</s>"),
        "<s> $A",
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {"add_bos_token": True, "add_eos_token": False},
    ),
    "smollm2": Architecture(
        "LlamaConfig",
        _DECODER | {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True},
        ("<|endoftext|>",),
        None,
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
        {"tokenizer_class": "GPT2Tokenizer"},
    ),
    "qwen2": Architecture("Qwen2Config", _QWEN_SHAPE, *_QWEN),
    "qwen3": Architecture("Qwen3Config", _QWEN_SHAPE | {"head_dim": 8}, *_QWEN),
    # EmbeddingGemma's: a decoder that reads both ways, within a window in all but some layers
    "gemma3": Architecture(
        "Gemma3TextConfig",
        _DECODER
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "use_bidirectional_attention": True}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        ("<pad>", "<eos>", "<bos>", "<unk>"),
        "<bos> $A <eos>",
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
}
DECODERS = ["llama", "smollm2", "qwen2", "qwen3"]


def save_tiny_model(
    name: str, folder: Path, texts: Sequence[str] = SENTENCES, seed: int = 0, *, language_model: bool = False
) -> Path:
    """Writes the model ``name`` of ``ARCHITECTURES`` with a byte-level BPE trained on ``texts``.

    Without a head, or a decoder with the one that makes it a ``language_model``.
    """
    architecture = ARCHITECTURES[name]
    config: PretrainedConfig = getattr(transformers, architecture.config)(**architecture.settings)
    torch.manual_seed(seed)
    loader = transformers.AutoModelForCausalLM if language_model else transformers.AutoModel
    model = transformers.T5EncoderModel(config) if name == "t5" else loader.from_config(config)
    with torch.no_grad():  # biases and norms of a new model are all 0 or 1, and hide mistakes
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _tokenizer(architecture, texts).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | architecture.tokenizer_config))
    return folder


_MODELS = TemporaryDirectory(prefix="tiny-models-")  # removed when the process ends


@cache
def tiny_model(name: str, seed: int = 0) -> Path:
    """The folder that ``save_tiny_model`` writes, one for all tests of the process: to be read, not changed."""
    return save_tiny_model(name, Path(_MODELS.name) / f"{name}-{seed}", seed=seed)


def tiny_model_class(name: str) -> Any:
    """The class that reads the model's folder in plain transformers."""
    return transformers.T5EncoderModel if name == "t5" else transformers.AutoModel


def _tokenizer(architecture: Architecture, texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(architecture.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if architecture.template is None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        ids = [(token, number) for number, token in enumerate(architecture.special) if token in architecture.template]
        tokenizer.post_processor = processors.TemplateProcessing(single=architecture.template, special_tokens=ids)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **architecture.names)


def save_sentence_transformer(
    base: Path, folder: Path, pooling: str = "mean", *, extra: Sequence[torch.nn.Module] = (), **settings: Any
) -> Path:
    """The model at ``base`` with pooling and ``extra`` modules, written by sentence-transformers itself.

    Its similarity is the inner product, by which vectors are as the modules leave them. ``settings``
    (``max_seq_length``, ``query_length``…) go to its Transformer module; ``prompts`` to the whole.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    prompts = settings.pop("prompts", None)
    transformer = Transformer(str(base), **settings)
    if transformer.tokenizer.pad_token is None:
        transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    modules = [transformer, Pooling(WIDTH, pooling), *extra]
    made = SentenceTransformer(modules=modules, prompts=prompts, device="cpu", similarity_fn_name="dot")
    made.save(str(folder))
    return folder


def load_tiny(folder: Path, **settings: Any) -> TextEncoder:
    """Our encoder from the folder, in evaluation mode."""
    wanted = EncoderSettings(model=str(folder), **settings)
    located = locate_model(wanted.model, wanted.revision, wanted.base_model)
    return load_encoder(wanted, located.path, located.fingerprint).eval()


def load_tiny_towers(folder: Path, **settings: Any) -> Towers:
    """The encoders of queries and of documents from the folder, in evaluation mode."""
    wanted = EncoderSettings(model=str(folder), **settings)
    return load_towers(wanted, folder, locate_model(wanted.model).fingerprint).eval()


def vectors_of(encoder: Any, role: Role = "document", **settings: Any) -> NDArray[np.float32]:
    """Of ``TEXTS``."""
    return encode_texts(encoder, TEXTS, role, **settings)


def literal_vectors(model: Any, folder: Path, pooling: str, append_eos: bool) -> NDArray[np.float32]:
    """Of ``TEXTS``, one at a time in plain transformers; the tokenizer is the folder's."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=POSITIONS - append_eos)["input_ids"]
        if append_eos:
            ids = [*ids, tokenizer.eos_token_id]
        with torch.no_grad():
            states = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        found.append({"mean": states.mean(dim=0), "cls": states[0], "last_token": states[-1]}[pooling].numpy())
    return np.stack(found)


def same_vectors(encoder: Any, other: Any, role: Role = "document", atol: float = 0.0) -> None:
    """Asserts that both encoders give ``TEXTS`` the same vectors, to the last bit or within ``atol``."""
    np.testing.assert_allclose(vectors_of(encoder, role), vectors_of(other, role), atol=atol, rtol=0)


def sentence_transformer(folder: Path) -> Any:
    """The folder as sentence-transformers loads it."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def assert_sentence_transformers_agrees(folder: Path, expected: Path | None = None, **settings: Any) -> None:
    """``SentenceTransformer(folder)`` gives our encoder's vectors, ours from ``expected`` where that is given."""
    same_vectors_as_theirs(load_tiny(expected or folder, **settings), sentence_transformer(folder))


def same_vectors_as_theirs(encoder: Any, model: Any, document: Any = None) -> None:
    """``model``, of sentence-transformers, gives ``encoder``'s vectors, and ``document``'s where documents have one."""
    of_queries, of_documents = vectors_of(encoder, "query"), vectors_of(document or encoder)
    np.testing.assert_allclose(model.encode_query(TEXTS, batch_size=3), of_queries, atol=1e-5, rtol=0)
    np.testing.assert_allclose(model.encode_document(TEXTS, batch_size=3), of_documents, atol=1e-5, rtol=0)


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Changes the JSON file at ``path`` in place; returns its folder."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path.parent


def copy_without_weights(source: Path, folder: Path, left_out: Callable[[str], bool]) -> Path:
    """A copy of a model folder that lacks the tensors whose names ``left_out`` says."""
    shutil.copytree(source, folder)
    weights = {name: value for name, value in load_file(source / "model.safetensors").items() if not left_out(name)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
