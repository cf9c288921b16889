"""Which vectors an encoder gives a document: one, several of its layers or tokens, or one that these are reduced to."""

from typing import Literal, Self

from pydantic import model_validator

from raytriever.settings.configuration import Settings

FORM_FILE = "vector_form.json"  # beside an exported encoder's modules.json

Kind = Literal["single", "layers", "first_tokens", "all_tokens"]
Reduction = Literal["none", "last", "average", "scalar_mix"]


class VectorForm(Settings):
    """Which vectors a document has; a query always has one, that of the last layer.

    ``kind``: 'single' is the plain dual encoder; 'layers' the pooled states of several ``layers`` (1 is the first
    block, 0 would be the embeddings), ascending, the encoder's last among them (MLR, Xie & Lukasiewicz 2025);
    'first_tokens' the last layer's first ``tokens`` states (ME-BERT, Luan et al. 2021); 'all_tokens' all of them
    (ColBERT, Khattab & Zaharia 2020). ``reduction``: 'none' keeps them all; else they become one vector: the 'last'
    layer's or the first token's, their 'average', or a 'scalar_mix', an average with learnt weights.
    """

    kind: Kind = "single"
    layers: tuple[int, ...] = ()
    tokens: int = 0
    reduction: Reduction = "none"

    @model_validator(mode="after")
    def _kind_has_its_settings(self) -> Self:
        if self.kind == "layers" and not self.layers:
            raise ValueError("kind 'layers' needs the numbers of the layers: set layers, such as [10, 12]")
        if self.kind != "layers" and self.layers:
            raise ValueError(
                f"layers is {list(self.layers)}, which kind {self.kind!r} doesn't have: set layers to [], or kind to"
                " 'layers'"
            )
        if self.layers and (self.layers[0] < 1 or list(self.layers) != sorted(set(self.layers))):
            raise ValueError(f"layers {list(self.layers)} must be ascending and distinct, from 1, the first block, on")
        if self.kind == "first_tokens" and self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}, but kind 'first_tokens' needs 1 or more: set tokens, such as 8")
        if self.kind != "first_tokens" and self.tokens:
            raise ValueError(
                f"tokens is {self.tokens}, which kind {self.kind!r} doesn't have: set tokens to 0, or kind to"
                " 'first_tokens'"
            )
        if self.kind == "single" and self.reduction != "none":
            raise ValueError(f"reduction is {self.reduction!r}, but kind 'single' has one vector already")
        if self.kind == "all_tokens" and self.reduction == "scalar_mix":
            raise ValueError("reduction 'scalar_mix' learns one weight a vector, but all_tokens has no fixed number")
        return self

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
        if self.reduced:
            return 1
        return max_length if self.vectors is None else self.vectors

    def __str__(self) -> str:
        """In a few words, for reports and contracts: 'single', 'layers 4, 6', 'scalar_mix of layers 4, 6'."""
        vectors = {
            "layers": f"layers {', '.join(map(str, self.layers))}",
            "first_tokens": f"first {self.tokens} tokens",
        }.get(self.kind, self.kind.replace("_", " "))
        return vectors if self.reduction == "none" else f"{self.reduction} of {vectors}"
