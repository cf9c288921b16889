"""A contextual encoder from a plain one, and as a folder.

The folder is the second stage's in the layout of sentence-transformers. It also has ``first_stage/`` (another encoder's
folder), ``contextual.json`` (the form) and ``contextual.safetensors`` (null vector, prompt vectors, head).
sentence-transformers loads it as a plain encoder without context. ``write_module_folder`` adds the code of this package
with relative imports. Then ``SentenceTransformer(folder, trust_remote_code=True)`` reads a context on machines without
Raytriever.
"""

import copy
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.contextual.context_reader import own_weights, perceptron, vectors_sha256
from retrieval.encoders.contextual.contexts import CorpusContext
from retrieval.encoders.contextual.encoder import WEIGHTS, ContextualEncoder, shortened
from retrieval.encoders.dense import DenseLayer, load_weights
from retrieval.encoders.modules import (
    CONTEXTUAL_FILE,
    CONTEXTUAL_TRANSFORMER,
    FIRST_STAGE,
    read_json,
    reading,
    write_json,
)
from retrieval.encoders.specification import ContextualForm, EncoderSettings
from retrieval.encoders.structure import numbered_blocks
from retrieval.encoders.text_encoder import TextEncoder, load_encoder


def contextual_from(
    encoder: TextEncoder,
    form: ContextualForm,
    first_stage: TextEncoder | None = None,
    *,
    first_stage_layers: int | None = None,
    first_stage_perceptron: bool = False,
    context_max_length: int | None = None,
    seed: int = 0,
) -> ContextualEncoder:
    """A contextual encoder to train. Its second stage takes the modules of ``encoder``.

    ``first_stage``: None starts from a copy of ``encoder``. Its pooled states are a document's vector, without dense
    layers and normalisation. ``first_stage_perceptron`` adds a new perceptron, as the released model has.
    ``first_stage_layers``: number of its layers to keep, from the first. ``context_max_length``: tokens of a document
    in the context. ``seed``: of new weights. Raises ``UserError`` for more layers or tokens than it has.
    """
    of = first_stage or encoder
    transformer = of.transformer if first_stage else copy.deepcopy(of.transformer)
    if first_stage_layers is not None:
        keep_layers(transformer, first_stage_layers)
    config: Any = transformer.config
    width = int(config.hidden_size)
    dense = _dense_perceptron(width, seed) if first_stage_perceptron else []
    changed = {"normalize": False, "head": "full", "projection": None, "dimension": width}
    contract = shortened(of.contract.model_copy(update=changed), context_max_length or of.contract.max_length)
    first = TextEncoder(transformer, of.tokenizer if first_stage else copy.deepcopy(of.tokenizer), dense, contract)
    return ContextualEncoder(*encoder.parts(), first, form, seed)


def _dense_perceptron(width: int, seed: int) -> list[DenseLayer]:
    first, activation, second = perceptron(width, width, nn.GELU(), torch.Generator().manual_seed(seed))
    return [DenseLayer(first, activation), DenseLayer(second, nn.Identity())]  # type: ignore[arg-type]


def keep_layers(transformer: nn.Module, count: int) -> None:
    """Takes all layers but the first ``count`` out of a transformer, in place. Raises ``UserError`` for more."""
    config: Any = transformer.config
    blocks = numbered_blocks(transformer)
    if not 1 <= count <= len(blocks):
        raise UserError(f"first_stage_layers is {count}; the first stage has {len(blocks)} layers. Set 1 to as many.")
    listed = next(m for m in transformer.modules() if isinstance(m, nn.ModuleList) and m[0] is blocks[0])
    del listed[count:]
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:count]


def load_contextual(
    settings: EncoderSettings, path: Path, fingerprint: str, dropout: float | None = None, fresh_seed: int | None = None
) -> ContextualEncoder:
    """Loads what ``ContextualEncoder.save`` wrote, as ``load_encoder`` does; no context is set.

    A prompt of documents that ``settings`` choose is that of the documents in a context too.
    Raises ``UserError`` where the folder isn't whole, and for a ``form`` of several vectors.
    """
    second = load_encoder(settings, path, fingerprint, dropout, fresh_seed=fresh_seed)
    chosen = settings.document_prompt if settings.document_prompt_name is None else second.contract.document_prompt
    own = EncoderSettings(
        model=str(path / FIRST_STAGE), trust_remote_code=settings.trust_remote_code, document_prompt=chosen
    )
    first = load_encoder(own, path / FIRST_STAGE, fingerprint, dropout)
    with reading("The contextual encoder's form", path / CONTEXTUAL_FILE):
        form = ContextualForm.model_validate(read_json(path / CONTEXTUAL_FILE))
    encoder = ContextualEncoder(*second.parts(), first, form)
    load_weights(encoder, own_weights(encoder).keys(), path / WEIGHTS)
    return encoder


_ROOT = Path(__file__).parents[3]
_MODULE = "contextual_transformer"
_SOURCES = (
    "raytriever/errors.py",
    "retrieval/encoders/structure.py",
    "retrieval/encoders/pooling.py",
    "retrieval/encoders/contextual/families.py",
    "retrieval/encoders/contextual/second_stage.py",
    "retrieval/encoders/contextual/context_reader.py",
    f"retrieval/encoders/contextual/{_MODULE}.py",
)
_OWN_IMPORT = re.compile(r"^from (?:raytriever|retrieval)\.(?:\w+\.)*(\w+) import", re.MULTILINE)


def write_module_folder(encoder: ContextualEncoder, folder: Path, context: CorpusContext | None = None) -> None:
    """Writes ``encoder``, the code that runs it, and where there is one the context that it starts with.

    Raises ``UserError`` for a context that leaves no room for texts.
    """
    if context is not None:
        encoder.require_room(len(context.vectors), encoder.contract.max_length)
    encoder.save(folder)
    listing = folder / "modules.json"
    modules = [each for each in read_json(listing) if "Pooling" not in each["type"]]
    modules[0]["type"] = f"{_MODULE}.{CONTEXTUAL_TRANSFORMER}"  # which pools too
    for number, module in enumerate(modules):
        module |= {"idx": number, "name": str(number)}
    write_json(listing, modules)
    for source in _SOURCES:
        text = (_ROOT / source).read_text(encoding="utf-8")
        (folder / Path(source).name).write_text(_OWN_IMPORT.sub(r"from .\1 import", text), encoding="utf-8")
    _write_context(context, folder)


def _write_context(context: CorpusContext | None, folder: Path) -> None:
    vectors, description = folder / "context.safetensors", folder / "context.json"
    if context is None:
        vectors.unlink(missing_ok=True)  # of an encoder that was there before
        description.unlink(missing_ok=True)
    else:
        held = torch.from_numpy(context.vectors).contiguous()
        save_file({"vectors": held}, vectors)
        write_json(description, asdict(context.description) | {"vectors_sha256": vectors_sha256(held)})
