from raytriever.reports.tables import aligned, counted


def test_one_and_many() -> None:
    assert counted(1, "pair") == "1 pair"
    assert counted(0, "pair") == "0 pairs"
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(2_000, "batch", "batches") == "2,000 batches"


def test_columns_are_aligned_to_their_sides() -> None:
    rows = [("rule", "masked", "why"), ("same text", "7", "a copy"), ("größe", "1,234,567", "")]
    assert aligned(rows, "<><") == [
        "rule          masked  why",
        "same text          7  a copy",
        "größe      1,234,567",
    ]
