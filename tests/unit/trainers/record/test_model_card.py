"""The card's header as the hub reads it, and what its text says."""

import re
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from retrieval.encoders.specification import EncoderContract, VectorForm
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.record.model_card import Measured, model_card
from trainers.run_settings import AnyObjectiveSettings

CONTRACT = EncoderContract(
    model="f" * 64, pooling="mean", normalize=True, query_prompt="query: ", document_prompt="", max_length=256,
    dtype="float32", dimension=384,
)  # fmt: skip
MEASURED = Measured(
    dataset="NQ | dev set", split="dev", step=400, start={"nDCG@10": 0.3},
    measures={"nDCG@10": 0.41234567, "RR@10": 0.35, "average rank": float("nan")},
)  # fmt: skip
INPUTS = {"batches": "b" * 64, "encoder.model": "e" * 64}
CONFIG, PAPER = {"objective": {"kind": "contrastive"}}, ContrastiveSettings.paper
POINTS = [{"examples": 8}, {"examples": 8}]
LAYERS = {"kind": "layers", "layers": (4, 6)}
TOKENS = {"kind": "first_tokens", "tokens": 8}


def card(base: str = "sentence-transformers/all-MiniLM-L6-v2", kind: str = "contrastive", **named: Any) -> str:
    config = {"objective": {"kind": kind}, "training": {"seed": 0}}
    return model_card(base, config, INPUTS, CONTRACT, POINTS, paper=PAPER, **named)


def test_the_hub_reads_the_header_and_the_text_says_data_measures_and_how_to_load() -> None:
    text = card(measured=MEASURED)
    data = ModelCard(text).data
    assert data.base_model == "sentence-transformers/all-MiniLM-L6-v2"
    assert data.library_name == "sentence-transformers"
    assert data.pipeline_tag == "sentence-similarity"
    assert data.tags[-1] == "contrastive"
    for said in (
        f"| batches | `{'b' * 64}` |",
        "| query prompt | `'query: '` |",
        "| document prompt | none |",
        "encode_query",
        "| nDCG@10 | 0.4123 | 0.3000 |",
        "| RR@10 | 0.3500 | |",
        "those after 400 steps",
        "Morris & Rush (2024). [Contextual Document Embeddings](https://arxiv.org/abs/2410.02525).",
    ):
        assert said in text
    assert "## Measures" not in card()  # without validation there are none


def test_prompts_are_told_by_name() -> None:
    named = CONTRACT.model_copy(update={"prompts": {"classification": "classification: "}})
    text = model_card("any", CONFIG | {"prompt": "für"}, INPUTS, named, POINTS, paper=PAPER)
    assert "prompt: für" in text
    assert "| prompt `classification` | `'classification: '` |" in text
    assert "prompt_name='classification'" in text
    assert "prompt_name" not in card()
    scored, contextual = "queries for a scoring module** (of 2 layers), which", "This is a contextual encoder, and the"
    own = {"architecture": "contextual, 64 vectors"}
    for changes, said in (
        ({"list_scorer": "of 2 layers"}, scored),
        (own, contextual),
        (own, "the lines above load a fallback"),
        (own, "| architecture | contextual, 64 vectors |"),
    ):
        assert said in model_card("any", CONFIG, INPUTS, CONTRACT.model_copy(update=changes), POINTS, paper=PAPER)
        assert said not in text
    both = "`encode_query` and `encode_document` put the prompts before the texts"
    for of_queries, of_documents in (("q: ", ""), ("", "d: "), ("", "")):
        own = CONTRACT.model_copy(update={"query_prompt": of_queries, "document_prompt": of_documents})
        assert (both in model_card("any", CONFIG, INPUTS, own, POINTS, paper=PAPER)) == bool(of_queries or of_documents)


def test_training_is_counted_up_to_the_weights_that_validation_chose() -> None:
    points = [{"step": step, "examples": 8 if step > 1 else 4} for step in range(1, 1001)]
    text = model_card("mine", CONFIG, INPUTS, CONTRACT, points, paper=PAPER, best_step=200)
    assert "| training | 200 steps, 1,596 examples: the weights after step 200 of 1,000, chosen by validation |" in text
    assert "| training | 1,000 steps, 7,996 examples |" in model_card(
        "mine", CONFIG, INPUTS, CONTRACT, points, paper=PAPER
    )


@pytest.mark.parametrize(("values", "alone"), [
    ({}, None),
    (LAYERS, "last layer"),
    (LAYERS | {"reduction": "last"}, None),
    (LAYERS | {"reduction": "average"}, None),
    (LAYERS | {"reduction": "scalar_mix"}, None),
    (TOKENS, "first token"),
    (TOKENS | {"reduction": "last"}, None),
    (TOKENS | {"reduction": "average"}, "first token"),
    (TOKENS | {"reduction": "scalar_mix"}, "first token"),
    ({"kind": "all_tokens"}, "first token"),
    ({"kind": "all_tokens", "reduction": "average"}, None),
    ({"kind": "all_tokens", "reduction": "last"}, None),
])  # fmt: skip
def test_a_fallback_is_called_one(values: dict[str, Any], alone: str | None) -> None:
    """What sentence-transformers gives of each form is what tests/unit/retrieval/encoders/test_towers.py compares."""
    form = VectorForm(**values)
    contract = CONTRACT.model_copy(update={"form": str(form)})
    text = model_card("mine", CONFIG, INPUTS, contract, POINTS, paper=PAPER)
    assert ("fallback" in text) == (alone is not None)
    if alone is not None:
        assert f"vectors here are: {form}, and the lines above load a fallback" in text
        assert f"`encode_document` gives the vector of the {alone} alone" in text
        assert "`raytriever embed` gives what was trained" in text


@pytest.mark.parametrize("path", ["./models/mine", "/data/model", "mine", "a/b/c", "s3://bucket/model", "../x/y"])
def test_a_path_is_no_base_model_of_the_hub(path: str) -> None:
    text = card(path)
    assert "base_model" not in yaml.safe_load(text.split("---")[1])
    assert path not in text or path == "mine"


def test_every_objective_has_its_paper() -> None:
    settings = AnyObjectiveSettings.__args__[0].__args__
    assert len(settings) >= 4
    for kind in settings:
        assert re.fullmatch(
            "https://(arxiv.org/abs/[0-9]{4}[.][0-9]{5}|aclanthology.org/.*/|doi.org/.+)", kind.paper.url
        )
