"""Means over MTEB's tasks and over their categories."""

from retrieval.evaluation.suite_table import summarize


def test_means_over_tasks_and_over_categories() -> None:
    scores = {"a": ("Retrieval", 0.5), "b": ("Reranking", 0.25), "c": ("Retrieval", 0.75), "d": ("Retrieval", 1.0)}
    tasks = [{"task": task, "category": category, "main_score": score} for task, (category, score) in scores.items()]
    found = summarize("mine", tasks)
    assert found["model"] == "mine"
    assert found["mean"] == 0.625
    assert found["categories"] == {"Reranking": {"tasks": 1, "mean": 0.25}, "Retrieval": {"tasks": 3, "mean": 0.75}}
    assert list(found["categories"]) == ["Reranking", "Retrieval"]
    assert found["mean_of_categories"] == 0.5
    assert found["tasks"]["c"] == {"category": "Retrieval", "main_score": 0.75}
