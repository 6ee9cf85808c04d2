"""Unigram and bigram models as baselines: the same training tokens, the same held-out tokens.

A stream is a flat array of token ids in which every document ends in the end mark, so the last
token of a stream is the end mark.  Every token of the held-out stream is predicted, end marks
included; the first token of a document, and of the stream, is predicted from the end mark.  A
GPT-2 predicts the same tokens when it reads the stream after one end mark.  Perplexities are exp of
the mean negative log probability (natural) over those tokens.  Every id below the true vocabulary
size has a probability above zero; padding has none.

Discounts are those of modified Kneser-Ney (Chen and Goodman 1998, TR-10-98, section 3),
interpolated.
"""

import math

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.integer]
Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FALLBACK_DISCOUNTS = np.array([0.0, 0.5, 1.0, 1.5])


def discounts(counts: Counts) -> Floats:
    """D(0) = 0, D1, D2, D3+ from the counts of counts n1 to n4 (Chen and Goodman, eq. 26).

    Where these give no discount between 0 and the count (too little text: some n is 0), the fixed
    values 0, 0.5, 1, 1.5.
    """
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    if not n[1:5].all():
        return FALLBACK_DISCOUNTS
    y = n[1] / (n[1] + 2 * n[2])
    found = np.array([0.0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))])
    return found if (found[1:] > 0).all() else FALLBACK_DISCOUNTS


def unigram(counts: Counts) -> Floats:
    """[vocabulary]: max(c(w) - D, 0) / total, plus the discounted mass spread evenly over all ids.

    counts: [vocabulary], counts of tokens or, as lower order of a bigram, of contexts.
    """
    taken = discounts(counts)[np.minimum(counts, 3)]
    return (counts - taken + taken.sum() / len(counts)) / counts.sum()


class Bigram:
    """p(w | v) = max(c(v w) - D, 0) / c(v) + backoff(v) x lower(w); lower(w) after an unseen v.
    lower is of continuation counts: the number of contexts v in which w occurs."""

    def __init__(self, tokens: Tokens, vocabulary: int) -> None:
        check_stream(tokens, vocabulary)
        self.keys, counts = np.unique(bigram_keys(tokens, vocabulary), return_counts=True)
        previous, word = np.divmod(self.keys, vocabulary)
        taken = discounts(counts)[np.minimum(counts, 3)]
        total = np.bincount(previous, weights=counts, minlength=vocabulary)
        mass = np.bincount(previous, weights=taken, minlength=vocabulary)
        self.backoff = np.divide(mass, total, out=np.ones(vocabulary), where=total > 0)
        self.lower = unigram(np.bincount(word, minlength=vocabulary))
        self.kept = (counts - taken) / total[previous]

    def probability(self, previous: Tokens, word: Tokens) -> Floats:
        """p(word | previous), elementwise."""
        keys = previous.astype(np.int64) * len(self.backoff) + word
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        kept = np.where(self.keys[place] == keys, self.kept[place], 0.0)
        return kept + self.backoff[previous] * self.lower[word]


def unigram_perplexity(train: Tokens, heldout: Tokens, vocabulary: int) -> float:
    """Per-token perplexity of `heldout` under a unigram model of `train`."""
    for stream in (train, heldout):
        check_stream(stream, vocabulary)
    return perplexity(unigram(np.bincount(train, minlength=vocabulary))[heldout])


def bigram_perplexity(train: Tokens, heldout: Tokens, vocabulary: int) -> float:
    """Per-token perplexity of `heldout` under an interpolated modified Kneser-Ney bigram model."""
    check_stream(heldout, vocabulary)
    if train[-1] != heldout[-1]:
        raise ValueError(
            f"the training tokens end in {train[-1]}, the held-out tokens in {heldout[-1]}: "
            "both have to end in the end mark (preprocess without --no-append-eod)"
        )
    model = Bigram(train, vocabulary)
    return perplexity(model.probability(np.roll(heldout, 1), heldout))


def perplexity(probability: Floats) -> float:
    return math.exp(-np.log(probability).mean())


def bigram_keys(tokens: Tokens, vocabulary: int) -> Counts:
    """previous x vocabulary + token; the first token follows the end mark, the last token."""
    return np.roll(tokens, 1).astype(np.int64) * vocabulary + tokens


def check_stream(tokens: Tokens, vocabulary: int) -> None:
    if not len(tokens):
        raise ValueError("no tokens: the training and the held-out text need a document each")
    if tokens.max() >= vocabulary:
        raise ValueError(
            f"token {tokens.max()} does not fit a vocabulary of {vocabulary}: "
            "the tokens were made with another tokenizer (--vocab-file, --merge-file)"
        )
