"""The README.md of an exported encoder: what it is, how to load it, what it was trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from raytriever.retrieval.encoders.specification import EncoderContract


def model_card(
    base_model: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, str],
    contract: EncoderContract,
    points: Sequence[Mapping[str, Any]],
) -> str:
    """A model card in the hub's format. ``points``: the training curve; ``inputs``: fingerprints."""
    header: dict[str, Any] = {
        "library_name": "sentence-transformers",
        "pipeline_tag": "sentence-similarity",
        "tags": ["sentence-transformers", "retrieval", "raytriever"],
    }
    if base_model.count("/") == 1 and not base_model.startswith((".", "/")):
        header["base_model"] = base_model
    examples = sum(point["examples"] for point in points)
    prompts = f"query {contract.query_prompt!r}, document {contract.document_prompt!r}"
    return f"""---
{yaml.safe_dump(header, sort_keys=True).strip()}
---

# A text encoder for retrieval

```python
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer("path/to/this/folder")
vectors = encoder.encode_query(["how do I open a file?"])
```

| | |
|---|---|
| vectors | {contract.dimension} dimensions, {contract.pooling} pooling{", normalised" if contract.normalize else ""} |
| texts | up to {contract.max_length} tokens; prompts: {prompts} |
| training | {len(points)} steps, {examples:,} examples |
| batches | `{inputs["batches"]}` |
| start | `{inputs["encoder.model"]}` |

Settings of the training run:

```yaml
{yaml.safe_dump(dict(config), sort_keys=True, allow_unicode=True).strip()}
```
"""
