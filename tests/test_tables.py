"""Tables as people have them: of spreadsheets, in other encodings, with long texts."""

import pytest

from sot.data.rows import read_rows
from sot.data.texts import Columns, load_table


def rows(file, content, **options):
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [dict(row) for row in read_rows(file, **options)]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
def test_the_delimiter_is_recognised_from_the_header(delimiter, tmp_path):
    """Whatever else stands in the cells, and in names of columns that are quoted."""
    header = delimiter.join(["sentence", '"a, b; c;\t d"', "label"])
    cells = delimiter.join(['"one, two; three\tfour"', "5", "yes"])
    expected = {"sentence": "one, two; three\tfour", "a, b; c;\t d": "5", "label": "yes"}
    assert rows(tmp_path / "a.csv", f"{header}\n{cells}\n") == [expected]


def test_a_single_column_has_no_delimiter(tmp_path):
    assert rows(tmp_path / "a.csv", 'sentence\n"a; b"\nc\n') == [{"sentence": "a; b"}, {"sentence": "c"}]


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8"])
def test_a_table_in_another_encoding_is_read_by_its_name(encoding, tmp_path):
    content = "sentence;label\nÀ bientôt;où\n".encode(encoding)
    assert rows(tmp_path / "a.csv", content, encoding=encoding) == [{"sentence": "À bientôt", "label": "où"}]


def test_utf_16_of_spreadsheets_is_recognised_by_its_mark(tmp_path):
    assert rows(tmp_path / "a.csv", "sentence\tlabel\né\tx\n".encode("utf-16")) == [{"sentence": "é", "label": "x"}]


def test_unknown_encodings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="encoding must be one that Python knows, such as latin-1, got 'latin-99'"):
        rows(tmp_path / "a.csv", "sentence\na\n", encoding="latin-99")


def test_a_folder_is_no_table(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(ValueError, match=r"a\.csv is a folder, and a table is a file: \.csv, \.tsv, \.txt, \.jsonl"):
        list(read_rows(tmp_path / "a.csv"))


@pytest.mark.parametrize("name, between", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_text_may_be_very_long(name, between, tmp_path):
    long = "word " * 100_000
    assert rows(tmp_path / name, f"sentence{between}label\n{long}{between}x\n") == [{"sentence": long, "label": "x"}]


def test_quotes_that_are_closed_are_fine(tmp_path):
    content = 'sentence,label\n"two\nlines, and ""quotes""",x\n5" nails,y\nlast,"z"'
    found = [(row["sentence"], row["label"]) for row in rows(tmp_path / "a.csv", content)]
    assert found == [('two\nlines, and "quotes"', "x"), ('5" nails', "y"), ("last", "z")]


def test_what_is_empty_is_empty_in_every_format(tmp_path):
    (tmp_path / "a.csv").write_text("sentence,label\n,x\nb,y\n")
    (tmp_path / "a.jsonl").write_text('{"sentence": null, "label": "x"}\n{"sentence": "b", "label": "y"}\n')
    for name in ("a.csv", "a.jsonl"):
        assert load_table(tmp_path / name, None, Columns()).train.texts == ["", "b"]


def test_the_column_text_is_found_where_there_is_no_sentence(tmp_path):
    (tmp_path / "a.csv").write_text("id,text,label\n1,a,x\n2,b,y\n")
    assert load_table(tmp_path / "a.csv", None, Columns()).train.texts == ["a", "b"]
    with pytest.raises(ValueError, match="has no column 'words'; it has id, text, label"):
        load_table(tmp_path / "a.csv", None, Columns(text="words"))
    (tmp_path / "b.csv").write_text("text,sentence,label\n1,a,x\n2,b,y\n")
    assert load_table(tmp_path / "b.csv", None, Columns()).train.texts == ["a", "b"]
