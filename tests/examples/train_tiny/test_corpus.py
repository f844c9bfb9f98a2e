"""The training text: what is read, what is left out, and that the split follows names alone."""

import pytest

from examples.train_tiny.corpus import Document, read_corpus, read_documents, without_near_duplicates


def lines(start, count):
    return "\n".join(f"value_{number} = {number * number}" for number in range(start, start + count)) + "\n"


@pytest.fixture
def library(tmp_path):
    for name, text in {
        "b.py": lines(0, 30),
        "a.py": lines(100, 30),
        "json/decoder.py": lines(200, 30),
        "test/test_a.py": lines(300, 30),
        "site-packages/other.py": lines(400, 30),
        "empty.py": "\n",
        "wide.py": "x = '" + "y" * 500 + "'\n",
        "notes.txt": "text",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    return tmp_path


def test_sources_for_people_are_read_by_name(library):
    documents = read_documents(library)
    assert [document.name for document in documents] == ["a.py", "b.py", "json/decoder.py"]
    assert documents[1].text == lines(0, 30)


def test_most_of_a_document_seen_before_leaves_it_out():
    first = Document("first", lines(0, 40))
    mostly = Document("mostly", lines(0, 30) + lines(500, 10))
    partly = Document("partly", lines(0, 10) + lines(600, 30))
    spaced = Document("spaced", lines(0, 40).replace("\n", "\n\n    "))
    assert without_near_duplicates([first, mostly, partly, spaced]) == [first, partly]
    assert without_near_duplicates([partly, first]) == [partly, first]


def test_a_file_stays_on_its_side_when_others_come(library):
    for number in range(100):
        (library / f"more_{number}.py").write_text(lines(1000 * number, 30), encoding="utf-8")
    before = read_corpus(library)
    (library / "newcomer.py").write_text(lines(7, 30) + lines(900_000, 90), encoding="utf-8")
    after = read_corpus(library)
    assert set(before.held_out) <= set(after.held_out)
    assert set(before.training) <= set(after.training)
    assert 1 <= len(before.held_out) <= 15
    assert before.digest != after.digest
    assert before.digest == read_corpus_without(library, "newcomer.py").digest


def read_corpus_without(library, name):
    (library / name).unlink()
    return read_corpus(library)
