"""A contextual encoder as a sentence-transformers folder that brings its own module file, and its context.

``SentenceTransformer(folder, trust_remote_code=True)`` loads it where nothing of ours is installed: the code in the
folder is that of this package, its imports made relative. Without trust it isn't loaded at all; the folder that
``ContextualEncoder.save`` writes is, as a plain encoder without context.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from raytriever.retrieval.contexts import CorpusContext
from raytriever.retrieval.encoders.contextual.context_reader import vectors_sha256
from raytriever.retrieval.encoders.contextual.encoder import ContextualEncoder
from raytriever.retrieval.encoders.modules import CONTEXTUAL_TRANSFORMER

_RETRIEVAL = Path(__file__).parents[2]
_MODULE = "contextual_transformer"
_SOURCES = (
    "errors.py",
    "encoders/structure.py",
    "encoders/pooling.py",
    "encoders/contextual/drawing.py",
    "encoders/contextual/backbones.py",
    "encoders/contextual/families.py",
    "encoders/contextual/second_stage.py",
    "encoders/contextual/context_reader.py",
    f"encoders/contextual/{_MODULE}.py",
)
_OWN_IMPORT = re.compile(r"^from raytriever\.(?:\w+\.)*(\w+) import", re.MULTILINE)


def write_module_folder(encoder: ContextualEncoder, folder: Path, context: CorpusContext | None = None) -> None:
    """Writes ``encoder``, the code that runs it, and where there is one the context that it starts with.

    Raises ``UserError`` for a context that leaves no room for texts.
    """
    if context is not None:
        encoder.require_room(len(context.vectors), encoder.contract.max_length)
    encoder.save(folder)
    listing = folder / "modules.json"
    modules = [each for each in json.loads(listing.read_text(encoding="utf-8")) if "Pooling" not in each["type"]]
    modules[0]["type"] = f"{_MODULE}.{CONTEXTUAL_TRANSFORMER}"  # which pools too
    for number, module in enumerate(modules):
        module |= {"idx": number, "name": str(number)}
    _write(listing, modules)
    for source in _SOURCES:
        text = (_RETRIEVAL / source).read_text(encoding="utf-8")
        (folder / Path(source).name).write_text(_OWN_IMPORT.sub(r"from .\1 import", text), encoding="utf-8")
    _write_context(context, folder)


def _write_context(context: CorpusContext | None, folder: Path) -> None:
    from safetensors.torch import save_file

    vectors, description = folder / "context.safetensors", folder / "context.json"
    if context is None:
        vectors.unlink(missing_ok=True)  # of an encoder that was there before
        description.unlink(missing_ok=True)
    else:
        held = torch.from_numpy(context.vectors).contiguous()
        save_file({"vectors": held}, vectors)
        _write(description, context.description.model_dump(mode="json") | {"vectors_sha256": vectors_sha256(held)})


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
