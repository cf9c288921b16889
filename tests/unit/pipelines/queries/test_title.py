from pipelines.queries.headings import TitleQueries
from tests.unit.pipelines.queries.made_up import examples, source

THREAD = "I was offered one made with citra hops.\n\nCitra hops have fairly high alpha acids.\n\nSee the article."


def test_a_thread_s_question_finds_its_posts() -> None:
    made, dropped = examples(TitleQueries(), source(THREAD, "What is a citra hop?", "beer-q1"))
    assert made == [("beer-q1", "What is a citra hop?", (("beer-q1", "", THREAD),))]
    assert dropped == {}


def test_all_chunks_answer_the_title() -> None:
    cut = THREAD.index("Citra")
    made, _ = examples(TitleQueries(), source(THREAD, "What is a citra hop?", "q1", (cut,)))
    documents = (("q1#0", "", THREAD[:cut]), ("q1#1", "", THREAD[cut:]))
    assert made == [("q1", "What is a citra hop?", documents)]


def test_a_title_repeated_at_the_top_is_taken_away() -> None:
    for top in ("Lobster", "# lobster", "\n\nLOBSTER  ", "Lobster\r"):
        made, _ = examples(TitleQueries(), source(f"{top}\nA clawed animal.", "Lobster"))
        assert made[0].documents[0].text.strip() == "A clawed animal."
    made, _ = examples(TitleQueries(), source("Lobster is an animal.", "Lobster"))
    assert made[0].documents[0].text == "Lobster is an animal."


def test_what_lacks_a_title_or_a_text_is_counted() -> None:
    made, dropped = examples(
        TitleQueries(),
        source("A text.", "", "a"),
        source(" \n", "A title", "b"),
        source("A title\n", "A title", "c"),
        source("", "A title", "d"),
    )
    assert made == []
    assert dropped == {"documents without a title": 1, "documents without a text": 3}
