"""Removes blacklisted, malformed and repeated URLs from lists, as for OpenWebText.

    python tools/corpus.py urls --input urls --output kept
    python tools/corpus.py urls --input urls --output kept --domain-blacklist domains.txt

Input and output are text files of one URL per line (*.txt, plain or compressed); URLs keep their
order, and the first of equal ones stays.  Reasons to drop a URL are tried in this order: too short
(8 characters and fewer), malformed (not http or https, an impossible host, spaces), blacklisted
domain, blacklisted extension (of the path, not of the host), duplicate (exactly the same URL).

A blacklisted domain covers its sub-domains.  One without a dot is a name with any ending: amazon
covers smile.amazon.co.uk.  The built-in names and extensions are of the kinds in the recipe:
pictures, videos and music, social media, shops, Wikipedia (a corpus of its own), files that are no
text.

To find repeats, hashes of 128 bits are sorted in parts that fit --memory, never all at once.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron.data.json_lines import OPENERS, WORK, Line, find_shards, read_lines
from megatron.errors import UsageError
from tools.corpus.engine import StepRun, Task, keep_rejected, sum_counts
from tools.corpus.external import count_parts, find_repeats, repeats_of, write_rows
from tools.corpus.files import DocumentCounts, Unit, cut, write_shard
from tools.corpus.settings import ShardSettings, program

SHORTEST = 9  # characters
LONGEST = 1 << 16  # bytes
DOMAINS = """\
500px akamaihd artstation bandcamp dailymotion deviantart fbcdn flickr gfycat giphy gyazo
imageshack imgflip imgur instagram liveleak memegenerator mixcloud nocookie photobucket pinimg
pinterest pixiv prntscr puu.sh quickmeme soundcloud spotify streamable tinypic twimg twitch
vimeo vine vocaroo xkcd youtu.be youtube ytimg
discord discordapp facebook fb.me linkedin livejournal myspace redd.it reddit redditmedia
reddituploads snapchat t.co t.me telegram tiktok tumblr twitter vk.com x.com
amazon apple ebay etsy walmart
dropbox github google lmgtfy mediafire mega.nz strawpoll
erome imagefap pornhub redtube spankbang xhamster xvideos
wikimedia wikipedia
"""
EXTENSIONS = """
3gp 7z ai aif apk app avi bin bmp bz2 css csv dat deb dmg doc docx exe gif gifv gz ico iso jar
jpeg jpg js json log mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv otf pdf pkg png pps ppt pptx psd
py qt ram rar rpm sql svg swf tar tgz tif tiff ttf txt wav webm webp wma wmv xls xlsx xml xz zip
"""
SECOND_LEVEL = ("ac", "co", "com", "edu", "gob", "gov", "ne", "net", "or", "org")  # as in .co.uk
URL = re.compile(
    r"https?://"
    r"(?P<host>(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9-]{2,}\.?"
    r"|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::\d+)?"
    r"(?P<path>/[^\s?#]*)?(?:[?#]\S*)?",
    re.IGNORECASE | re.ASCII,
)
DOMAIN = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)*")
EXTENSION = re.compile(r"[a-z0-9_+-]+")

LINE_BYTES = 32  # least size of a list's line, to estimate the number of its URLs
EXPANSION = 8  # factor by which a compressed list grows


@dataclass(frozen=True, kw_only=True)
class Settings(ShardSettings):
    input: tuple[Path, ...]
    """Files of one URL per line, or folders of *.txt (plain, .gz, .bz2, .xz or .zst)."""

    domain_blacklist: tuple[Path, ...] = ()
    """Files with more domains, one per line; # begins a comment."""

    extension_blacklist: tuple[Path, ...] = ()
    """Files with more extensions, one per line, with or without the dot."""


class Blacklists(NamedTuple):
    domains: frozenset[str]
    extensions: frozenset[str]


def run(settings: Settings) -> None:
    load_blacklists(settings)  # so that their errors come first
    # Here a .txt is a list, which can be read from any line on.
    lists = find_shards(settings.input, (".txt",))
    units = cut(lists, settings.unit_bytes, lambda path: path.suffix in OPENERS)
    if not units:
        raise UsageError("--input", settings.input[0], "a file with a URL a line")
    with StepRun("urls", settings, units) as step:
        if step.done:
            return
        size = 0  # of the lists once they are decompressed, roughly
        for unit in units:
            packed = Path(unit.file).suffix in OPENERS
            size += (unit.stop - unit.start) * (EXPANSION if packed else 1)
        parts = count_parts(size // LINE_BYTES, settings.memory_bytes)
        tasks = [Task(unit.name, (unit, parts, settings), unit.stop - unit.start) for unit in units]
        step.stage("hashes", hash_unit, tasks)
        names = tuple(unit.name for unit in units)
        rows = rows_folder(settings)
        judging = [Task(f"{part:05}", (rows, part, names)) for part in range(parts)]
        step.stage("repeats", find_repeats, judging)
        results = step.stage("shards", write_unit, tasks)
        step.finish(sum_counts(results), [result["shard"] for result in results])


def load_blacklists(settings: Settings) -> Blacklists:
    """The built-in entries and those of the files.  Raises UsageError for an invalid one."""
    domains = _entries("--domain-blacklist", settings.domain_blacklist, DOMAIN, "imgur.com")
    extensions = _entries("--extension-blacklist", settings.extension_blacklist, EXTENSION, "jpg")
    return Blacklists(
        frozenset([*DOMAINS.split(), *domains]), frozenset([*EXTENSIONS.split(), *extensions])
    )


def _entries(
    flag: str, files: Sequence[Path], form: re.Pattern[str], example: str
) -> Iterator[str]:
    for file in files:
        if not file.is_file():
            raise UsageError(flag, file, "a file that is there")
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            entry = line.partition("#")[0].strip().lower().removeprefix(".")
            if entry and not form.fullmatch(entry):
                allowed = f"lines such as {example}, and line {number} is {entry}"
                raise UsageError(flag, file, allowed)
            if entry:
                yield entry


def read_urls(unit: Unit, blacklists: Blacklists) -> Iterator[tuple[Line, str, str | None]]:
    """(line, with a fault if it is no text; its URL; why the URL is dropped)."""
    for line in read_lines(unit.file, unit.start, unit.stop, longest=LONGEST):
        try:
            text = line.content.decode().strip()
        except UnicodeDecodeError as error:
            yield line._replace(fault=line.fault or str(error)), "", None
            continue
        yield line, text, judge(text, blacklists)


def judge(url: str, blacklists: Blacklists) -> str | None:
    """Why the URL is dropped, regardless of other URLs; None if it stays."""
    if len(url) < SHORTEST:
        return "too short"
    match = URL.fullmatch(url)
    if match is None:
        return "malformed"
    if is_covered(match["host"], blacklists.domains):
        return "blacklisted domain"
    _, dot, extension = (match["path"] or "").rpartition("/")[2].rpartition(".")
    if dot and extension.lower() in blacklists.extensions:
        return "blacklisted extension"
    return None


@lru_cache(1 << 16)
def is_covered(host: str, domains: frozenset[str]) -> bool:
    """Whether the host, a domain that it is part of, or its name without the ending is listed."""
    labels = host.lower().rstrip(".").split(".")
    ending = 2 if len(labels) > 2 and labels[-2] in SECOND_LEVEL else 1
    return labels[-1 - ending] in domains or any(
        ".".join(labels[k:]) in domains for k in range(len(labels) - 1)
    )


def rows_folder(settings: Settings) -> Path:
    return settings.output / WORK / "rows"


def hash_unit(unit: Unit, parts: int, settings: Settings) -> None:
    """Write the hashes of the unit's URLs that could stay."""
    hashes = (
        hashlib.blake2b(text.encode(), digest_size=16).digest()
        for line, text, reason in read_urls(unit, load_blacklists(settings))
        if line.fault is None and reason is None
    )
    write_rows(rows_folder(settings), unit.name, parts, hashes)


def write_unit(unit: Unit, parts: int, settings: Settings) -> dict[str, Any]:
    """Write the URLs of the unit that stay."""
    blacklists, accounting, place = load_blacklists(settings), DocumentCounts(), 0
    repeats = repeats_of(rows_folder(settings), unit.name, unit.number, parts)
    repeat = next(repeats, None)
    with write_shard(settings.output, f"part-{unit.name}", settings.compress, ".txt") as shard:
        for line, text, reason in read_urls(unit, blacklists):
            if line.fault is not None:
                accounting.set_aside(unit.file, line.offset, line.content, line.fault)
                continue
            record = {"text": text}
            accounting.enter(record)
            if reason is None:
                if place == repeat:
                    repeat, reason = next(repeats, None), "duplicate"
                place += 1
            if reason is None:
                accounting.keep(record)
                shard.write(text.encode())
            else:
                accounting.drop(record, reason)
    assert repeat is None
    keep_rejected(settings, unit, accounting)
    return {"accounting": accounting.to_json(), "shard": shard.facts}


if __name__ == "__main__":
    program("tools.corpus.urls")
