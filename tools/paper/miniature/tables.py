"""The results beside the paper's: tables and words, for a page and for a terminal."""

from collections.abc import Mapping

from tools.page import NONE, decimal, duration, percent, whole
from tools.paper.tables import Facts, Table, error, millions, of_lambada, of_wikitext, table_3

CHANCE = 0.25  # of RACE, which has four options
OURS = "this run"
MODELS = {"gpt2": "GPT-2", "bert": "BERT"}


def zero_shot(results: Facts) -> Table:
    """Table 3 of the paper."""
    wikitext, lambada = results["wikitext103"], results["lambada"]
    name = f"{OURS}, {millions(wikitext['model']['parameters'])}"
    return table_3([(name, wikitext, lambada)])


def race(result: Facts) -> Table:
    """The RACE column of the paper's table 5, and the accuracy of guessing."""
    figures = result["paper"]["figures"]
    rows = [
        [f"paper, {each['model']}", *(percent(each[name]) for name in figures)]
        for each in result["paper"]["rows"]
    ]
    names = [name.replace("accuracy", "majority_accuracy") for name in figures]
    ours = [
        f"{OURS}, {millions(result['model']['parameters'])}",
        *(share(result, name) for name in figures),
    ]
    majority = ["always the commonest letter", *(share(result, name) for name in names)]
    chance = ["chance, one of four", *([percent(CHANCE)] * len(figures))]
    head = ("BERT", "RACE", "middle", "high")
    return Table(head, [*rows, ours, majority, chance], frozenset([len(rows)]))


def share(result: Facts, name: str) -> str:
    """The figure `name` as a percentage; a level without passages has none."""
    return percent(result.get(name))


def held_out(scores: Facts) -> Table:
    rows = [
        ("GPT-2, this run", decimal(scores["token_perplexity"]), decimal(scores["word_perplexity"]),
         decimal(scores["bits_per_byte"], 3)),
        ("bigram", decimal(scores["bigram_perplexity"]), NONE, NONE),
        ("unigram", decimal(scores["unigram_perplexity"]), NONE, NONE),
        ("xz -9", NONE, NONE, decimal(scores["xz_bits_per_byte"], 3)),
    ]  # fmt: skip
    head = ("held-out articles of RACE", "perplexity per token", "per word", "bits per byte")
    return Table(head, rows, frozenset([0]))


def training(runs: Facts) -> Table:
    """runs: by model, the contents of its metrics and run.json."""
    rows = [
        (MODELS[name], whole(run["parameters"]), whole(run["steps"]), whole(run["samples"]),
         decimal(run["validation"], 3), whole(run["tokens_per_second"]))
        for name, run in runs.items()
    ]  # fmt: skip
    head = ("model", "parameters", "steps", "samples", "validation loss, nats a token",
            "tokens per second")  # fmt: skip
    return Table(head, rows)


def leakage(found: Facts, names: Mapping[str, str]) -> Table:
    """names: of evaluation sets, by file, for those whose file has another name."""
    rows = [
        (names.get(name, name), whole(each["ngrams"]), fine(each["before"]), fine(each["after"]))
        for name, each in found.items()
    ]
    return Table(("evaluation set", "8-grams", "found in the corpus", "after the cuts"), rows)


def fine(part: float) -> str:
    return f"{100 * part:.3f} %"


def times(seconds: Mapping[str, float], budget: Mapping[str, float]) -> Table:
    rows = [(name, duration(taken), f"{budget[name]:g} min") for name, taken in seconds.items()]
    planned = sum(budget[name] for name in seconds)
    rows.append(("in all", duration(sum(seconds.values())), f"{planned:g} min"))
    return Table(("stage", "took", "planned, on two cores"), rows, frozenset([len(rows) - 1]))


def verdict(result: Facts) -> str:
    """Whether RACE's accuracy is more than guessing, in words."""
    count, accuracy = result["questions"], result["accuracy"]
    of_chance = error(CHANCE, count)
    said = "above" if accuracy > CHANCE + 2 * of_chance else "not to be told from"
    return (
        f"RACE: {percent(accuracy)} of {whole(count)} questions, where guessing gives "
        f"{percent(CHANCE)} with a standard error of {percent(of_chance)}: {said} chance. A BERT "
        "of this size that has read for minutes does not understand passages, and hardly beats "
        "guessing; what the stage shows is that every step of the paper's runs."
    )


def meanings(results: Facts) -> list[tuple[str, str]]:
    """(figure, what it measures and by which convention)."""
    said = {
        "WikiText103": of_wikitext(results["wikitext103"]),
        "LAMBADA": of_lambada(results["lambada"]),
        "RACE": of_race(results["race"]),
        "Held-out articles": "of RACE's training archive, dealt to the side that nothing is "
        "trained on; all three models predict the same tokens, the end mark of each article "
        "included.",
    }
    return list(said.items())


def of_race(result: Facts) -> str:
    settings, trained = result["hyper_parameters"], result["notes"]["input"]["train"]["questions"]
    return (
        f"accuracy: {result['conventions']['accuracy']}. Fine-tuned on {whole(trained)} of the "
        f"87,866 questions of the training set, epochs: {settings['epochs']}, one seed, passages "
        f"cut at {settings['seq_length']} tokens with question and option; asked "
        f"{whole(result['questions'])} of the 4,887 of the development set; "
        f"{result['paper']['note']}."
    )
