"""How CODER scores a query's candidates: each by itself, or all together by a transformer."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from raytriever.retrieval.configuration import Settings
from raytriever.retrieval.encoders.list_scorer import ListScorer, ListScorerForm
from raytriever.retrieval.encoders.pooling import at_least_float32

_SMALLEST_NORM = 1e-6


class SimilarityScoring(Settings):
    """Each candidate by its similarity to the query (eq. 2): the encoder searches a whole index."""

    kind: Literal["similarity"] = "similarity"
    query_encoder: ClassVar[Literal["trained"]] = "trained"


class TransformerScoring(ListScorerForm):
    """All candidates together, by a module that is trained too and ranks candidates alone (appendix A.4).

    ``query_encoder``: trained beside it, as in the paper, or 'frozen', so that the module alone learns.
    """

    kind: Literal["transformer"] = "transformer"
    query_encoder: Literal["trained", "frozen"] = "trained"


ScoringSettings = Annotated[SimilarityScoring | TransformerScoring, Field(discriminator="kind")]


def fresh_list_scorer(settings: SimilarityScoring | TransformerScoring, dimension: int, seed: int) -> ListScorer | None:
    """The module to train for vectors of ``dimension``; None where there is none."""
    if isinstance(settings, SimilarityScoring):
        return None
    form = ListScorerForm.model_validate(settings.model_dump(include=set(ListScorerForm.model_fields)))
    return ListScorer(form, dimension, seed)


def list_similarities(queries: Tensor, documents: Tensor, places: Tensor, similarity: str) -> Tensor:
    """Similarities of B queries with N candidates each, (B, N), in float32 (float64 for float64 queries).

    ``queries`` (B, d); ``documents`` (M + 1, d), their last a zero vector; ``places`` int64 (B, N), each candidate's
    among them. Whatever ``similarity`` is, a candidate that isn't there has 0.
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries = at_least_float32(queries)
        documents = documents.to(queries.dtype)
        if similarity == "cosine":
            queries = nn.functional.normalize(queries, dim=-1, eps=_SMALLEST_NORM)
            documents = nn.functional.normalize(documents, dim=-1, eps=_SMALLEST_NORM)
        # all with all: lists share documents, and up to d queries it takes no more memory than the documents themselves
        return (queries @ documents.T).gather(1, places)
