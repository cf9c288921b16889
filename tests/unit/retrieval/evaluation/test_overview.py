"""The table over several collections."""

from retrieval.evaluation.overview import overview_lines


def metrics(**means: dict[str, float]) -> dict[str, object]:
    return {"measures": list(next(iter(means.values()))), "means": means}


def test_systems_by_collection_with_their_mean() -> None:
    a = metrics(bm25={"nDCG@10": 0.25, "R@100": 0.5}, ours={"nDCG@10": 0.5, "R@100": 0.75})
    b = metrics(bm25={"nDCG@10": 0.75, "R@100": 1.0}, ours={"nDCG@10": 0.25, "R@100": 0.0}, other={"nDCG@10": 1.0})
    assert overview_lines({"cranfield": a, "x": b}) == [
        "",
        "nDCG@10 by collection",
        "",
        "      cranfield       x    mean",
        "bm25     0.2500  0.7500  0.5000",
        "ours     0.5000  0.2500  0.3750",
        "",
        "R@100 by collection",
        "",
        "      cranfield       x    mean",
        "bm25     0.5000  1.0000  0.7500",
        "ours     0.7500  0.0000  0.3750",
    ]


def test_one_evaluation_or_no_common_system_gives_no_table() -> None:
    a, b = metrics(bm25={"AP": 0.25}), metrics(ours={"AP": 0.5})
    assert overview_lines({"a": a}) == []
    assert overview_lines({"a": a, "b": b}) == []
