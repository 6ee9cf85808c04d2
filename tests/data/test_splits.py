import pytest

from megatron.data.order import split_documents


def test_every_document_is_in_one_split_in_proportion() -> None:
    for split, documents in [("969,30,1", 1000), ("29,1,0", 77), ("0.8,0.1,0.1", 10), ("1,2,3", 6)]:
        ranges = split_documents(split, documents)
        assert [each for part in ranges for each in part] == list(range(documents))
        weights = [float(weight) for weight in split.split(",")]
        for part, weight in zip(ranges, weights, strict=True):
            assert abs(len(part) - documents * weight / sum(weights)) < 1
    assert [len(part) for part in split_documents("969,30,1", 1000)] == [969, 30, 1]
    assert [len(part) for part in split_documents("0.8,0.1,0.1", 10)] == [8, 1, 1]


def test_a_weight_of_zero_gives_no_document() -> None:
    assert [len(part) for part in split_documents("29,1,0", 30)] == [29, 1, 0]
    assert [len(part) for part in split_documents("0,0,1", 30)] == [0, 0, 30]


@pytest.mark.parametrize(("split", "documents"), [("969,30,1", 20), ("29,1,0", 1), ("1,1,1", 2)])
def test_a_split_without_documents_is_an_error(split: str, documents: int) -> None:
    with pytest.raises(ValueError, match=f"--split {split} leaves no document for"):
        split_documents(split, documents)


@pytest.mark.parametrize("split", ["", "1,2", "a,b,c", "1,-1,0", "0,0,0", "nan,1,0", "1/0,1,1"])
def test_weights_that_are_none(split: str) -> None:
    with pytest.raises(ValueError, match="--split 29,1,0 would work"):
        split_documents(split, 10)
