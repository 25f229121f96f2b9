"""Words that this house has given up, each for the field's term (docs/architecture.md has the glossary)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = (*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md"))

GIVEN_UP = (
    # pattern from the start of a word on, what to write
    (r"places? of the pipeline|pipeline places?|joins_places|mesh\.place\(", "pipeline rank, pp_rank"),
    (r"place_link\b|PLACES\b|class Places", "pp_link, stage map"),
    (r"with_sums\b|without_sums\b|with_reductions\b|without_reductions\b", "with_once, without_once"),
    (r"sums of gradients\b|gradient sums\b", "gradient reductions"),
    (r"tells_loss\b", "reduces_loss"),
    (r"(?<!file\.)tell\b|tells\b", "show, report, gather"),
    (r"told\b", "reported, received"),
    (r"stands?\b|stood\b", "is, waits, stalls"),
    (r"stand[-_]ins?\b|_?StandIn\b", "substitute"),
    (r"holds?\b|holding\b", "keeps, has"),
    (r"held\b(?![-_ ]?out)", "kept, resident"),
    (r"holders?\b", "owner"),
    (r"(?<![\"'])whole\b(?![\"'])", "full, complete, unsharded"),
    (r"wholly\b|as a whole\b", "fully, in full"),
    (r"stretto\.whole\b", "stretto.replicated"),
    (r"is_spread\b|spread_experts\b|spread over ranks\b", "sharded"),
    (r"addends?\b|Addend\b", "partial sum"),
    (r"kth\b", "the machine bound"),
    (r"fed\b", "the machine bound"),
    (r"lone\b|lone_rank\b", "single"),
    (r"worlds\b", "clusters of ops"),
    (r"listing\b", "list scheduler"),
    (r"arrange[sd]?\b", "order"),
    (r"push(es|ed)?\b", "forward-backward improvement"),
    (r"refine[sd]?\b", "improve"),
    (r"May touch\b", "nothing: a test checks imports"),
    (r"class _?Found\w*\b", "the name of what it is"),
    (r"class _?Setup\b", "a name that says whose"),
    (r"for ever\b", "forever"),
    (r"anew\b", "again"),
    (r"[Ww]hoever\b", "anyone who"),
    (r"(of|to|in) one that\b", "a plain clause"),
    (r"what it is that\b|it is that\b", "a plain clause"),
    (r"that which\b|those which\b", "the one that, those that"),
    (r"upon which\b|whereupon\b", "and then"),
    (r"thereby\b|thereof\b|therein\b|herein\b|hence\b", "so"),
    (r"[Oo]ne's own\b|ones-own\b", "your own"),
    (r"people\b", "users"),
    (r"is told\b|are told\b|be told\b", "receives, is reported"),
    (r"told apart\b|tells? apart\b", "distinguish"),
    (r"unheard\b", "silent"),
)

SCARS = (
    # what replacing one word by another, without reading the sentence, leaves
    (
        r"(?:may|must|would) (?:not )?(?:are|is|has|sharded|kept)\b|do(?:es)? not (?:are|sharded|has)\b",
        "the verb's plain form",
    ),
    (r"to (?:sharded|kept|has) (?:it|them)\b", "the verb's plain form"),
    (r"represents? (?:itself|themselves|communication)\b", "is, counts as"),
    (r"(?:is|are) kept against\b", "is compared with, is checked against"),
    (r"in all (?:batch|sequence)\b", "on the full batch, on the full sequence"),
    (
        r"the full(?= one(?:'s)? tensor| of (?:it|them|slices|a tensor)\b|[,;:]| \||\.\s|\n\n)|The full\n",
        "full tensor, full batch",
    ),
    (r"an? (?:full|unsharded)(?=[,;:)]| of that)", "a full tensor, a full value"),
    (r"full_values (?:of what|no one)\b", "full tensors"),
    (r"that have (?:on|against)\b", "that are true of, that compare with"),
    (r"(?:and|or) the same(?= \(`| [a-z]+ once)", "and the like"),
    (r"is sharded over both\b", "is spread over both"),
    (r"beside (?:pp|`pp`|public names)\b", "besides, other than"),
)


def found(words: tuple[tuple[str, str], ...], files: Iterable[Path]) -> Iterator[str]:
    # All at once, as a search by each alone takes ten times as long.
    any_of = re.compile(rf"\b(?:{'|'.join(pattern for pattern, _ in words)})")
    for path in files:
        text = path.read_text().partition("### Old and new public names")[0]
        for match in any_of.finditer(text):
            number, word = text.count("\n", 0, match.start()) + 1, match.group()
            instead = next(one for pattern, one in words if re.compile(pattern).match(text, match.start()))
            yield f"{path.relative_to(ROOT)}:{number}: {word!r}; write: {instead}"


def faults() -> list[str]:
    tests = (path for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__))
    return [*found(GIVEN_UP, FILES), *found(SCARS, (*FILES, *tests))]


def test_words_that_were_given_up_do_not_come_back() -> None:
    assert not faults(), "\n".join(faults())


if __name__ == "__main__":
    print("\n".join(faults()))
