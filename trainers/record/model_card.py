"""The README.md of an exported encoder: what it is, how to load it, what it was trained on, and what was measured.

Its header is the hub's own format, so the hub lists its base model; its text needs no network to be written.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import ModelCardData

from retrieval.encoders.specification import UNLIMITED, EncoderContract
from trainers.objectives.settings import Paper

_CONTEXTUAL = (
    "**This is a contextual encoder, and the lines above load a fallback**: its second stage alone. raytriever reads"
    " both stages, and embeds texts behind documents of the corpus that they belong to."
)
_FORM = (
    "**A document's vectors here are: {}, and the lines above load a fallback**: `encode_document` gives the vector of"
    " the {} alone. `raytriever embed` gives what was trained."
)
_LIST_SCORER = (
    "**This encodes queries for a scoring module** ({}), which lies beside it and ranks lists of candidates as a whole:"
    " `raytriever rerank` with `scoring` set to this folder."
)


@dataclass(frozen=True)
class Measured:
    """The validation of these weights, those after ``step`` steps.

    ``dataset`` and ``split`` name the data; ``start``: the same measures before the first step.
    """

    dataset: str
    split: str
    step: int
    measures: Mapping[str, float]
    start: Mapping[str, float]


def model_card(
    base_model: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    contract: EncoderContract,
    points: Sequence[Mapping[str, Any]],
    *,
    paper: Paper,
    best_step: int | None = None,
    measured: Measured | None = None,
) -> str:
    """A model card in the hub's format. ``points``: the training curve of the whole run. ``inputs``: fingerprints.

    ``paper``: the objective's. ``best_step``: the step of the weights if validation chose them. None: the last step.
    ``measured``: by validation, None without validation.
    """
    kind = config["objective"]["kind"]
    parts = [
        f"---\n{_header(base_model, kind).to_yaml().strip()}\n---",
        "# A text encoder for retrieval",
        _usage(contract),
        _facts(contract, base_model, inputs, _training(points, best_step)),
    ]
    if measured is not None:
        parts.append(_measures(measured))
    parts.append(f"## Objective\n\n`{kind}`, from {paper.cited()}")
    settings = yaml.safe_dump(dict(config), allow_unicode=True).strip()
    parts.append(f"## Settings of the training run\n\n```yaml\n{settings}\n```")
    return "\n\n".join(parts) + "\n"


def _training(points: Sequence[Mapping[str, Any]], best_step: int | None) -> str:
    """What the weights have seen; the steps after the best are none of theirs."""
    seen = points if best_step is None else [point for point in points if point["step"] <= best_step]
    text = f"{len(seen):,} steps, {sum(point['examples'] for point in seen):,} examples"
    if best_step is None:
        return text
    return f"{text}: the weights after step {best_step:,} of {len(points):,}, chosen by validation"


def _header(base_model: str, kind: str) -> ModelCardData:
    return ModelCardData(
        base_model=base_model if is_hub_name(base_model) else None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "retrieval", "raytriever", kind],
    )


def is_hub_name(model: str) -> bool:
    """Whether it looks like ``org/name`` and not like a path."""
    return re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", model) is not None


def _usage(contract: EncoderContract) -> str:
    lines = [
        "```python",
        "from sentence_transformers import SentenceTransformer",
        "",
        'encoder = SentenceTransformer("path/to/this/folder")  # or its name on the hub',
        'queries = encoder.encode_query(["how do I open a file?"])',
        'documents = encoder.encode_document(["open(path) returns a file object."])',
        "similarities = encoder.similarity(queries, documents)",
        "```",
    ]
    if contract.query_prompt or contract.document_prompt:
        lines += ["", "`encode_query` and `encode_document` put the prompts before the texts; `encode` alone does not."]
    if contract.prompts:
        named = f"`encode(texts, prompt_name={next(iter(contract.prompts))!r})` puts another prompt before them"
        lines += ["", f"{named}: texts of one task are embedded alike, in training too (`prompts_by_domain` below)."]
    if (fallback := _fallback_of(contract.form)) is not None:
        lines += ["", fallback]
    if contract.list_scorer is not None:
        lines += ["", _LIST_SCORER.format(contract.list_scorer)]
    if contract.architecture not in ("plain", "static"):
        lines += ["", _CONTEXTUAL]
    return "\n".join(lines)


def _fallback_of(form: str) -> str | None:
    """What is lost of a document's vectors, a ``VectorForm`` in words, without raytriever; None where nothing is."""
    reduction, _, vectors = form.rpartition(" of ")
    keeps_all = not reduction and vectors != "single"
    averages_tokens = reduction in ("average", "scalar_mix") and vectors.startswith("first ")
    if not keeps_all and not averages_tokens:
        return None
    place = "first token" if vectors.endswith("tokens") else "last layer"
    return _FORM.format(form, place)


def _facts(contract: EncoderContract, base_model: str, inputs: Mapping[str, str], training: str) -> str:
    pooling = f"{contract.dimension} dimensions, {contract.pooling} pooling"
    if contract.architecture == "static":
        pooling = f"{contract.dimension} dimensions, the mean of the tokens' vectors"
    base = f"[{base_model}](https://huggingface.co/{base_model}), " if is_hub_name(base_model) else ""
    rows = {
        "vectors": pooling + (", normalised" if contract.normalize else ""),
        "similarity": "cosine" if contract.normalize else "inner product",
        "texts": f"up to {contract.max_length} tokens" if contract.max_length < UNLIMITED else "of any length",
        "query prompt": _code(contract.query_prompt),
        "document prompt": _code(contract.document_prompt),
        **{f"prompt `{name}`": _code(prompt) for name, prompt in contract.prompts.items()},
        "training": training,
        "batches": _code(inputs["batches"]),
        "start": f"{base}weights {_code(inputs['encoder.model'])}",
    }
    if contract.architecture != "plain":
        rows["architecture"] = contract.architecture
    if contract.form != "single":
        rows["documents"] = contract.form
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return f"| | |\n|---|---|\n{table}"


def _code(text: str) -> str:
    """As code; repr keeps a prompt's own spaces and quotes visible."""
    return f"`{text}`" if re.fullmatch(r"[0-9a-f]+", text) else (f"`{text!r}`" if text else "none")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _measures(measured: Measured) -> str:
    lines = [
        "## Measures",
        "",
        f"On the split `{measured.split}` of {measured.dataset}, by which these weights were chosen (those after"
        f" {measured.step:,} steps). Being the best of several looks, they are no test.",
        "",
        "| measure | value | before training |",
        "|---|---:|---:|",
    ]
    for name, value in measured.measures.items():
        before = f" {measured.start[name]:.4f} |" if name in measured.start else " |"
        lines.append(f"| {_cell(name)} | {value:.4f} |{before}")
    return "\n".join(lines)
