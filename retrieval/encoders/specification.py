"""What an encoder is: the settings that choose one, and the contract under which its vectors may meet others."""

import ctypes
import hashlib
import json
import operator
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, PartialShare, Settings

Role = Literal["query", "document"]
Dtype = Literal["float32", "bfloat16"]
AttentionKernel = Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"]
Head = Literal["full", "pooled"]
Projection = Literal["linear", "pooler", "pooler_tanh"]
Kind = Literal["single", "layers", "first_tokens", "all_tokens"]
Pooling = Literal["mean", "cls", "last_token", "max", "mean_sqrt_len", "weighted_mean"]
Reduction = Literal["none", "last", "average", "scalar_mix"]

ROLES: tuple[Role, ...] = ("query", "document")
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
UNLIMITED = 1 << 20  # tokens of a text, where nothing says where it is cut
_NOT_COMPARED = {"revision", "prompts"}  # of contracts


class VectorForm(Settings):
    """Which vectors a document has; a query always has one, that of the last layer."""

    kind: Kind = "single"
    """'single': one vector, the plain dual encoder. 'layers': pooled states of several layers (MLR, Xie & Lukasiewicz
    2025). 'first_tokens': the last layer's first states (ME-BERT, Luan et al. 2021). 'all_tokens': all of its states
    (ColBERT, Khattab & Zaharia 2020)."""
    layers: tuple[int, ...] = ()
    """For kind 'layers': the layers, ascending, with the encoder's last. 1 is the first block; 0 would be the
    embeddings."""
    tokens: NonNegativeInt = 0
    """For kind 'first_tokens': the number of states."""
    reduction: Reduction = "none"
    """'none' keeps all vectors. The others reduce them to one: the 'last' layer's or first token's, their 'average', or
    a 'scalar_mix', an average with learnt weights."""

    def _check(self) -> None:
        for name, kind, example in (("layers", "layers", "[10, 12]"), ("tokens", "first_tokens", "8")):
            value = getattr(self, name)
            if self.kind == kind and not value:
                raise ValueError(f"kind {kind!r} needs {name}: set {name}, such as {example}")
            if self.kind != kind and value:
                raise ValueError(f"{name} is {value}, which kind {self.kind!r} doesn't have: leave {name} out")
        if self.layers and (self.layers[0] < 1 or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"layers {list(self.layers)} must be ascending and distinct, from 1, the first block")
        if self.kind == "single" and self.reduction != "none":
            raise ValueError(f"reduction is {self.reduction!r}, but kind 'single' has one vector already")
        if self.kind == "all_tokens" and self.reduction == "scalar_mix":
            raise ValueError("reduction 'scalar_mix' learns one weight a vector, but all_tokens has no fixed number")

    @property
    def vectors(self) -> int | None:
        """Vectors before the reduction; None where every text has a number of its own."""
        return {"single": 1, "layers": len(self.layers), "first_tokens": self.tokens, "all_tokens": None}[self.kind]

    @property
    def reduced(self) -> bool:
        """Whether a document has one vector in use."""
        return self.kind == "single" or self.reduction != "none"

    def stored_vectors(self, max_length: int) -> int:
        """Vectors a document in use, 1 or m: for all tokens as many as the longest text may have, ``max_length``."""
        return 1 if self.reduced else self.vectors or max_length

    def __str__(self) -> str:
        """In a few words, for reports and contracts: 'single', 'layers 4, 6', 'scalar_mix of layers 4, 6'."""
        vectors = {
            "layers": f"layers {', '.join(map(str, self.layers))}",
            "first_tokens": f"first {self.tokens} tokens",
        }.get(self.kind, self.kind.replace("_", " "))
        return vectors if self.reduction == "none" else f"{self.reduction} of {vectors}"

    def require_last_layer(self, count: int, setting: str, model: str) -> None:
        """Raises ``UserError`` where the ``layers`` of ``setting`` don't end in the last of the model's ``count``."""
        if self.layers and self.layers[-1] != count:
            raise UserError(
                f"{setting} is {list(self.layers)}. It must end in {count}, the last layer of {model}, because"
                f" queries use its vector. Before it, any of 1 to {count - 1} are allowed."
            )


class ModelSettings(Settings):
    """The pretrained model."""

    model: InputPath
    """A folder, a model artifact or a hub name."""
    revision: str | None = None
    """Branch, tag or commit of a hub name."""
    base_model: InputPath | None = None
    """The base model of a LoRA adapter, instead of the one that its folder names."""


class EncoderSettings(ModelSettings):
    """The encoder, and settings that override those of its folder (null or 'auto': as the folder says)."""

    tokenizer: InputPath | None = None
    """A folder, a model artifact or a hub name to read the tokenizer from, for a model without one."""
    pooling: Literal[Pooling, "auto"] = "auto"
    """How the states of a text's tokens become one vector."""
    head: Head = "full"
    """'pooled': vectors as the pooling leaves them, without the folder's dense layers and normalisation. The authors of
    CDE use GTR so (Morris & Rush 2024, released code)."""
    projection: Projection | None = None
    """One more layer after the folder's. 'linear': a new one, for training only. 'pooler': the weights of the model's
    own pooler, without its tanh or with it. The trained model's folder then holds the layer itself."""
    normalize: bool | None = None
    """Whether vectors are scaled to length 1. null: as the folder does, and where sentence-transformers compares its
    vectors by cosine."""
    query_prompt: str | None = None
    """Text put before a query."""
    document_prompt: str | None = None
    """Text put before a document."""
    prompts: dict[str, str] = Field(default={}, exclude_if=operator.not_)
    """More prompts by name. They override those of the folder, sentence-transformers' ``prompts``."""
    query_prompt_name: str | None = Field(default=None, exclude_if=operator.not_)
    """Name of the query prompt, instead of ``query_prompt``."""
    document_prompt_name: str | None = Field(default=None, exclude_if=operator.not_)
    """Name of the document prompt, instead of ``document_prompt``."""
    truncate_dim: int | None = Field(default=None, ge=1, exclude_if=operator.not_)
    """Keep this many of a vector's first numbers, before normalisation. ``objective.matryoshka`` trains such
    vectors."""
    max_length: PositiveInt | None = None
    """Tokens of the longest text, special tokens included. Longer texts are cut."""
    append_eos: bool | Literal["auto"] = "auto"
    """Whether texts end in the end-of-sequence token. 'auto': where the folder asks for it (``add_eos_token``). 'auto'
    also adds it if the last token is pooled and the folder has no pooling settings."""
    dtype: Literal[Dtype, "auto"] = "auto"
    """Data type of weights and matrix products. 'auto': bfloat16 where the processor has it. Of what is trained
    ``training.bf16`` says it."""
    attention: AttentionKernel = Field(default="auto", exclude_if=lambda kernel: kernel == "auto")
    """The attention kernels. 'auto' and 'sdpa': PyTorch's. FlashAttention's are a package of their own that needs a GPU
    and bfloat16. A contextual encoder's second stage always uses PyTorch's."""
    bidirectional: bool = Field(default=False, exclude_if=operator.not_)
    """For a decoder: every token reads the whole text, as in an encoder (BehnamGhader et al. 2024). The trained model's
    folder records it (``is_causal`` in its config.json, which transformers reads)."""
    static: bool = Field(default=False, exclude_if=operator.not_)
    """Use only the model's table of word embeddings: a text is the mean of its tokens' vectors, which trains in seconds
    on a CPU. A folder with such a table (sentence-transformers' StaticEmbedding, model2vec) needs no setting."""
    trust_remote_code: bool = False
    """Whether to run the model's own Python code."""
    form: VectorForm | None = None
    """The vectors of a document."""

    def _check(self) -> None:
        for role in ROLES:
            if role in self.prompts:
                raise ValueError(f"prompts names {role!r}, the prompt of every {role}: set {role}_prompt instead")
            text, name = getattr(self, f"{role}_prompt"), getattr(self, f"{role}_prompt_name")
            if text is not None and name is not None:
                raise ValueError(
                    f"{role}_prompt is {text!r} and {role}_prompt_name {name!r}: set one of the two, and leave the"
                    " other out (or null)"
                )

    def __hash__(self) -> int:
        """Prompts are a mapping, which has no hash."""
        return hash(self.model_dump_json())

    def resolve_dimension(self, whole: int) -> int:
        """Numbers of a vector, of ``whole`` ones. Raises ``UserError`` where more are wanted."""
        kept = self.truncate_dim or whole
        if kept > whole:
            raise UserError(f"encoder.truncate_dim is {kept}, but vectors have {whole} numbers. Give less.")
        return kept

    def resolve_prompts(self, stated: Mapping[str, str]) -> dict[str, str]:
        """All prompts by name, ``query`` and ``document`` first; ``stated``: those of the encoder's folder.

        Raises ``UserError`` where one is wanted that isn't among them.
        """
        of_documents = next((stated[name] for name in DOCUMENT_PROMPTS if name in stated), "")
        named = {"query": "", "document": of_documents} | dict(stated) | self.prompts
        found = dict(named)
        for role in ROLES:
            text, name = getattr(self, f"{role}_prompt"), getattr(self, f"{role}_prompt_name")
            if name is not None:
                found[role] = require_prompt(named, name, f"encoder.{role}_prompt_name")
            elif text is not None:
                found[role] = text
        return found


class LoraSettings(Settings):
    """Trains two small matrices beside each of ``targets`` instead of the transformer's weights.

    Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models": W x + (alpha / rank) B A dropout(x), with B
    zero at first.
    """

    rank: PositiveInt = 16
    """Rank of the adapter: the width of its two matrices."""
    alpha: PositiveFloat = 32
    """Scale of the adapter's output, divided by the rank."""
    dropout: PartialShare = 0.0
    """Dropout on the adapter's input."""
    targets: list[str] | Literal["attention", "all_linear"] = "attention"
    """The matrices to adapt: those of the attention, or those and the feed-forward ones. Or modules by the ends of
    their names, such as 'query' or 'layer.0.attention.self.query'."""


class ListScorerForm(Settings):
    """The size of the transformer. Defaults are those of the paper's appendix A.4 and table 3."""

    layers: PositiveInt = 2
    """Number of blocks of attention and feed-forward layers."""
    heads: PositiveInt = 8
    """Number of attention heads."""
    width: PositiveInt | None = None
    """Width of the states. null: that of the vectors."""
    feed_forward: PositiveInt | None = None
    """Width of the feed-forward layers. null: four times ``width``."""
    dropout: PartialShare = 0.1
    """Dropout on the output of attention and feed-forward layers."""

    def __str__(self) -> str:
        width = "" if self.width is None else f", width {self.width}"
        return f"transformer over lists, {self.layers} layers, {self.heads} heads{width}"


class ContextualForm(Settings):
    """The second stage's sequence is [context vectors | prompt vectors | text].

    As Morris & Rush 2024 ("Contextual Document Embeddings") describe it by default; ``RELEASED`` is what their released
    model adds.
    """

    context_documents: PositiveInt = 64
    """J, the number of documents in the context."""
    vectors_per_document: PositiveInt = 1
    """k, the number of vectors of each of them."""
    prompts: NonNegativeInt = 0
    """Number of learnt vectors between context and text."""
    residual_head: bool = False
    """Whether a residual perceptron follows the pooling."""
    text_positions: Literal["from_zero", "behind_prefix"] = "from_zero"
    """'from_zero': a text's first token has position 0. 'behind_prefix': it comes after the vectors before it, and the
    prompt vectors have positions too."""
    pooled: Literal["text", "all"] = "text"
    """What is averaged: the text's tokens, or also the vectors before it."""
    prefix_attends: Literal["all", "prefix"] = "all"
    """What the vectors before the text read: the whole sequence, or only each other. 'prefix' computes them once for
    all texts. They read each other, so a document that a text must not read can still reach it in part."""

    def _check(self) -> None:
        if self.prefix_attends == "prefix" and (self.prompts or self.pooled == "all"):
            raise ValueError(
                f"prefix_attends 'prefix' doesn't work with prompt vectors (prompts is {self.prompts}) or with more"
                f" than the text pooled (pooled is {self.pooled!r}). Set prompts to 0 and pooled to 'text', or"
                " prefix_attends to 'all'"
            )

    @property
    def vectors(self) -> int:
        """Vectors of a whole context."""
        return self.context_documents * self.vectors_per_document

    def __str__(self) -> str:
        """In words, for reports and contracts: 'contextual, 64 vectors'."""
        words = [f"contextual, {self.vectors} vectors"]
        if self.vectors_per_document > 1:
            words.append(f"{self.vectors_per_document} a document")
        for name in ("prompts", "residual_head", "text_positions", "pooled", "prefix_attends"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                words.append(f"{name} {value}")
        return ", ".join(words)


RELEASED = {"prompts": 8, "residual_head": True, "text_positions": "behind_prefix"}
"""What the authors' released code has that the paper doesn't mention; its first stage also ends in a perceptron."""


class EncoderContract(Settings):
    """Everything that makes two vectors comparable; stored with vectors and indexes, compared where they meet."""

    model: str
    """Fingerprint of the weights (with a LoRA adapter's base), tokenizer and module settings."""
    revision: str | None = None
    """The revision as it was asked for. It is not compared, because ``model`` identifies the loaded files."""
    pooling: Pooling
    """How the states of a text's tokens became one vector."""
    head: Head = "full"
    """'pooled' where the folder's dense layers were left out."""
    projection: Projection | None = None
    """A layer that the folder doesn't have."""
    normalize: bool
    """Whether vectors have length 1."""
    query_prompt: str
    """Text put before a query."""
    document_prompt: str
    """Text put before a document."""
    prompts: dict[str, str] = Field(default={}, exclude_if=operator.not_)
    """Other prompts by name. They are not compared, because no text has one of them before it."""
    max_length: int
    """Tokens of the longest text."""
    append_eos: bool = False
    """Whether every text ends in the tokenizer's end-of-sequence token."""
    dtype: Dtype
    """Data type of weights and matrix products."""
    dimension: int
    """Length of a vector."""
    bidirectional: bool = False
    """Whether the tokens of a decoder read the whole text."""
    form: str = "single"
    """A document's vectors: a ``VectorForm`` in words."""
    document_model: str | None = None
    """For an encoder of queries only: ``fingerprint`` of its documents' contract."""
    list_scorer: str | None = None
    """The scoring module that an encoder of queries was trained with, in words."""
    architecture: str = "plain"
    """A ``ContextualForm`` in words, or 'static'."""
    context: str | None = None
    """The context that a contextual encoder reads: a fingerprint, 'null', 'none'."""

    @property
    def named_prompts(self) -> dict[str, str]:
        """All prompts by name, the two roles' among them."""
        return {"query": self.query_prompt, "document": self.document_prompt} | self.prompts

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all that is compared."""
        values = self.model_dump(mode="json", exclude=_NOT_COMPARED)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def require_queries(
        self, queries: "EncoderContract", mine: str, theirs: str, *, by_list_scorer: bool = False
    ) -> None:
        """Raises ``UserError`` where ``queries`` are no vectors to search these documents with.

        They are of the same encoder, or of one that was trained for just these documents (``document_model``). One that
        was trained with a scoring module ranks by that alone (``by_list_scorer``).
        """
        if queries.list_scorer is not None and not by_list_scorer:
            raise UserError(
                f"The encoder behind the queries of {theirs} was trained with a scoring module"
                f" ({queries.list_scorer}), which ranks whole lists of candidates. No index can be searched with"
                " its vectors, because it was not trained for inner products. Find candidates by another ranking,"
                " and rerank them with the module: 'raytriever rerank' with 'scoring' set to the trained model."
            )
        if queries.document_model is None or queries.model == self.model:
            self.require_same(queries, mine, theirs)
        elif queries.document_model != self.fingerprint or queries.dimension != self.dimension:
            raise UserError(
                f"The encoder behind the queries of {theirs} was trained for documents of another encoder"
                f" ({queries.document_model[:12]}) than the one behind {mine} ({self.fingerprint[:12]}). Search"
                " the index of the documents that it was trained with (objective.documents of its training)."
            )

    def require_same(self, other: "EncoderContract", mine: str, theirs: str) -> None:
        """Raises ``UserError`` if two sets of vectors come from different encoders, naming the fields that differ."""
        if differing := self.differences(other):
            raise UserError(
                f"The vectors of {mine} and {theirs} come from different encoders: {differing}. Use the encoder"
                " that made them, with the same settings."
            )

    def differences(self, other: "EncoderContract") -> str:
        """The fields that differ, each with both values; '' where none does."""
        here, there = (contract.model_dump(exclude=_NOT_COMPARED) for contract in (self, other))
        return "; ".join(f"{key} {here[key]!r} against {there[key]!r}" for key in here if here[key] != there[key])


def require_prompt(prompts: Mapping[str, str], name: str, setting: str) -> str:
    """The prompt of that name. Raises ``UserError`` where there is none, naming those that there are."""
    if name not in prompts:
        raise UserError(
            f"{setting} is {name!r}, but the encoder has no prompt of that name. It has"
            f" {', '.join(sorted(prompts))}. Name one of those, or add it: encoder.prompts maps names to texts."
        )
    return prompts[name]


def require_length(wanted: int | None, most: int, setting: str, limit: str = "encoder.max_length") -> None:
    """Raises ``UserError`` where ``setting`` asks for more than the ``most`` tokens that an encoder reads of a text.

    ``limit``: the setting that raises these.
    """
    if wanted is not None and wanted > most:
        raise UserError(
            f"{setting} is {wanted}, but the encoder reads {most} tokens of a text. Lower it, or raise {limit}."
        )


def require_positions(wanted: int | None, positions: int, setting: str, model: str) -> None:
    """Raises ``UserError`` where ``setting`` asks for longer texts than the ``model`` was made for."""
    if wanted is not None and wanted > positions:
        raise UserError(
            f"{setting} is {wanted}, over the limit of {model}, {positions} tokens. Lower it, or choose another model."
        )


def resolve_dtype(dtype: Literal[Dtype, "auto"], *, gpu: bool = False) -> Dtype:
    """'auto' becomes bfloat16 where the processor that will compute (this machine's, ``gpu``: its GPU) has it."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_bfloat16(gpu=gpu) else "float32"


def has_bfloat16(*, gpu: bool = False) -> bool:
    """Whether this machine's CPU (or GPU) has bfloat16 instructions; a GPU that only workers have counts as one.

    torch answers it, but is imported only if the system doesn't tell.
    """
    known = None
    if "torch" not in sys.modules:
        known = _without_cuda() if gpu else _of_this_cpu()
    if known is not None:
        return known
    import torch

    if gpu:
        return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _without_cuda() -> bool | None:
    """True where the driver's library can't be loaded, without which torch has no CUDA; else None."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return None


def _of_this_cpu() -> bool | None:
    try:
        return bfloat16_of_x86(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.release())
    except OSError:
        return None


def bfloat16_of_x86(cpuinfo: str, release: str) -> bool | None:
    """Whether Linux names the instructions; None of other processors, and where kernel ``release`` knows not all names.

    ``cpuinfo``: the text of /proc/cpuinfo.
    """
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None:
        return None
    if {"avx512_bf16", "amx_bf16"} & set(flags[1].split()):
        return True
    version = [int(number) for number in re.findall(r"\d+", release)]
    return False if version >= [5, 16] else None


def require_dtype(dtype: Dtype, host: str, *, gpu: bool = False) -> None:
    """Raises ``UserError`` on a worker that lacks what the driver resolved 'auto' to."""
    if dtype == "bfloat16" and not has_bfloat16(gpu=gpu):
        raise UserError(
            f"The job runs in bfloat16, but the {'GPU' if gpu else 'CPU'} of {host} has no instructions for it."
            " Set the encoder's dtype to float32, or keep the job on machines of one kind."
        )
