"""Prompts by domain in training: the oracle is an encoder without prompts, and texts that begin with them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.trainers.objectives.contextual.made_up import FUNCTIONS, objective_of, rows_of
from tests.unit.trainers.tiny import with_columns
from trainers.jobs.train import Train, TrainConfig
from trainers.objective import Objective, build_objective
from trainers.objectives.pair_settings import ContrastiveSettings, MarginMseSettings
from trainers.objectives.settings import PairSettings

DOMAINS = ["forum", "forum", "wiki", "wiki", "forum", "paraphrases", "wiki", "forum"]  # equal texts are of one
PROMPTS = {"query_prompt": "ask ", "document_prompt": "read ", "prompts": {"alike": "both "}}
BY_DOMAIN: dict[str, Any] = {
    "forum": {"query": "alike", "document": "alike"},
    "paraphrases": {"document": "query"},
}
QUERIES = [{"forum": "both "}.get(domain, "ask ") for domain in DOMAINS]
DOCUMENTS = [{"forum": "both ", "wiki": "read ", "paraphrases": "ask "}[domain] for domain in DOMAINS]


def rows(negatives: bool = True) -> pa.Table:
    changes = {"hard_negatives": [[f"not {row}"] for row in range(len(FUNCTIONS))]}  # a triplet has one
    scores = {"positive_score": [3.0] * len(FUNCTIONS), "hard_negative_scores": [[1.0]] * len(FUNCTIONS)}
    return with_columns(rows_of(), domain=DOMAINS, **scores, **({} if negatives else changes))


def glued(made: pa.Table) -> pa.Table:
    """The same with the prompts as part of the texts."""
    texts = made.to_pydict()
    pools = zip(DOCUMENTS, texts["hard_negatives"], strict=True)
    return with_columns(
        made,
        query=[prompt + text for prompt, text in zip(QUERIES, texts["query"], strict=True)],
        document=[prompt + text for prompt, text in zip(DOCUMENTS, texts["document"], strict=True)],
        hard_negatives=[[prompt + text for text in pool] for prompt, pool in pools],
    )


def build(folder: Path, settings: PairSettings, **encoder: Any) -> Objective[Any]:
    chosen = EncoderSettings(model=str(folder), pooling="mean", normalize=True, **encoder)
    return build_objective(settings, load_towers(chosen, folder, "f" * 64, dropout=0.0))


@pytest.mark.parametrize("kind", [ContrastiveSettings, MarginMseSettings])
def test_texts_have_the_prompts_of_their_domain(tiny_encoder: Path, kind: type[PairSettings]) -> None:
    made = rows(negatives=kind is ContrastiveSettings)
    objective = build(tiny_encoder, kind.model_validate({"prompts_by_domain": BY_DOMAIN}), **PROMPTS)
    expected = build(tiny_encoder, kind())
    loss = objective(objective.collate(made.select(list(objective.columns)))).loss
    assert loss.item() == pytest.approx(expected(expected.collate(glued(made))).loss.item(), rel=1e-6)
    settings = objective.settings.shaping()
    assert settings["prompts_by_domain"]["forum"] == {"query": "alike", "document": "alike"}
    assert "prompts_by_domain" not in kind().shaping()  # recorded where they are set
    usual = build(tiny_encoder, kind(), **PROMPTS)
    assert set(objective.columns) - set(usual.columns) == {"domain"}
    assert abs(loss - usual(usual.collate(made)).loss) > 1e-4


@pytest.mark.parametrize("own", [True, False])
def test_so_have_the_documents_of_a_context(tiny_encoder: Path, own: bool) -> None:
    settings: dict[str, Any] = {
        "context_documents": 50, "own_documents_in_context": own, "sequence_dropout": 0.0, "chunk_size": 3
    }  # fmt: skip
    objective = objective_of(tiny_encoder, PROMPTS, prompts_by_domain=BY_DOMAIN, **settings)
    batch = objective.collate(rows())
    expected = objective_of(tiny_encoder, **settings)
    loss = expected(expected.collate(glued(rows()))).loss
    assert objective(batch).loss.item() == pytest.approx(loss.item(), rel=1e-5)
    first = objective.contextual.first_stage
    read = {first.tokenizer.decode(row, skip_special_tokens=True) for row in batch.candidates.features["input_ids"]}
    assert {text.replace(" ", "").replace("#", "")[:2] for text in read} == {"bo", "re", "as"}
    texts = objective.collate(with_columns(rows(), document=["the same"] * 8)).candidates
    assert len(set(texts.keys.tolist())) < len(texts.keys)  # once behind each prompt, known as one text


def test_what_there_is_not_is_refused(tiny_encoder: Path) -> None:
    settings = ContrastiveSettings.model_validate({"prompts_by_domain": {"forum": {"query": "alik"}}})
    message = r"prompts_by_domain\.forum\.query is 'alik', but the encoder has no .* has alike, document, query\."
    with pytest.raises(UserError, match=message):
        build(tiny_encoder, settings, **PROMPTS)
    encoder = {"model": str(tiny_encoder), "pooling": "mean", **PROMPTS}
    objective = {"kind": "contrastive", **settings.model_dump()}
    run = Train(validate(TrainConfig, {"output": "o", "batches": "b", "encoder": encoder, "objective": objective}, "x"))
    with pytest.raises(UserError, match=message):  # before anything begins
        run.check_inputs({"encoder.model"})
    objective = build(tiny_encoder, ContrastiveSettings.model_validate({"prompts_by_domain": BY_DOMAIN}), **PROMPTS)

    class Batches:
        uri = "some/batches"

        def distinct(self, column: str) -> set[str]:
            return set(pc.unique(rows()[column]).to_pylist()) - {"forum"}

    with pytest.raises(UserError, match=r"names 'forum', but no batch in some/batches .*Allowed: paraphrases, wiki"):
        objective.check_batches(Batches())  # type: ignore[arg-type]
