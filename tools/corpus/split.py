"""Documents shuffled and some kept out of training, by a keyed hash of their ids."""

from pathlib import Path

from tools.corpus.jsonl import (
    Count,
    Funnel,
    document_id,
    keyed_hash,
    placed,
    read_records,
    run,
    write_record,
)


def split(
    input: Path,
    train: Path,
    heldout: Path,
    report: Path,
    heldout_share: float = 0.05,
    seed: int = 1234,
) -> None:
    """Shuffle the documents and keep a share of them out of training.  Run it after dedup.

    Args:
        input: a jsonl file with a "text" and, better, a unique "id" in each line.
        train: the jsonl file to write for training.
        heldout: the jsonl file to write for evaluation.
        report: a JSON file for the counts of both.
        heldout_share: share of the documents that is kept out, at least one document.
        seed: another seed gives another order and another choice.
    """
    if not 0 < heldout_share < 1:
        raise ValueError(f"--heldout-share {heldout_share}: has to be between 0 and 1")
    funnel = Funnel("split", heldout_share=heldout_share, seed=seed)
    records = list(read_records([input], funnel))
    if len(records) < 2:
        raise ValueError(
            f"--input {input} holds {len(records)} document, what the steps before have left; "
            "at least 2 are needed, one to train on and one to keep out: more documents would work"
        )
    records.sort(key=lambda record: keyed_hash(f"split {seed}", document_id(record)))
    kept_out = min(max(round(heldout_share * len(records)), 1), len(records) - 1)
    evaluation = Count()
    with placed(train) as train_file, placed(heldout) as heldout_file:
        for number, record in enumerate(records):
            if number < kept_out:
                evaluation.add(record["text"])
            write_record(heldout_file if number < kept_out else train_file, record, funnel)
    count = {
        "documents": funnel.output.documents - evaluation.documents,
        "bytes": funnel.output.bytes - evaluation.bytes,
    }
    funnel.write(report, train=count, heldout=vars(evaluation))


if __name__ == "__main__":
    run(split)
