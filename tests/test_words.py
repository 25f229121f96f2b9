"""Words that this house has given up, each for the field's term (docs/architecture.md has the glossary)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = (*sorted((ROOT / "src").rglob("*.py")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")

GIVEN_UP = (
    # pattern, what to write
    (r"places? of the pipeline|pipeline places?|joins_places|\bmesh\.place\(", "pipeline rank, pp_rank"),
    (r"\bplace_link\b|\bPLACES\b|class Places", "pp_link, stage map"),
    (r"\bwith_sums\b|\bwithout_sums\b", "with_reductions, without_reductions"),
    (r"\bsums of gradients\b|\bgradient sums\b", "gradient reductions"),
    (r"\bsummed_bytes\b", "reduced_bytes"),
    (r"\btells_loss\b", "reduces_loss"),
    (r"(?<!file\.)\btell\b|\btells\b", "show, report, gather"),
    (r"\btold\b", "reported, received"),
    (r"\bstands?\b|\bstood\b", "is, waits, stalls"),
    (r"\bstand[-_]ins?\b|_StandIn", "substitute"),
    (r"\bholds?\b|\bholding\b", "keeps, has"),
    (r"(?<!\w)held\b(?![-_ ]?out)", "kept, resident"),
    (r"\bholders?\b", "owner"),
    (r"(?<![\"'])\bwhole\b(?![\"'])", "full, complete, unsharded"),
    (r"\bwholly\b|\bas a whole\b", "fully, in full"),
    (r"\bstretto\.whole\b", "stretto.replicated"),
    (r"\bis_spread\b|\bspread_experts\b|\bspread over ranks\b", "sharded"),
    (r"\baddends?\b|\bAddend\b", "partial sum"),
    (r"\bkth\b", "the machine bound"),
    (r"\bfed\b", "the machine bound"),
    (r"\blone\b|\blone_rank\b", "single"),
    (r"\bworlds\b", "clusters of ops"),
    (r"\blisting\b", "list scheduler"),
    (r"\barrange[sd]?\b", "order"),
    (r"\bpush(es|ed)?\b", "forward-backward improvement"),
    (r"\brefine[sd]?\b", "improve"),
    (r"\bMay touch\b", "nothing: a test checks imports"),
    (r"class _?Found\w*\b", "the name of what it is"),
    (r"class _?Setup\b", "a name that says whose"),
    (r"\bfor ever\b", "forever"),
    (r"\banew\b", "again"),
    (r"\b[Ww]hoever\b", "anyone who"),
    (r"\b(of|to|in) one that\b", "a plain clause"),
    (r"\bwhat it is that\b|\bit is that\b", "a plain clause"),
    (r"\bthat which\b|\bthose which\b", "the one that, those that"),
    (r"\bupon which\b|\bwhereupon\b", "and then"),
    (r"\bthereby\b|\bthereof\b|\btherein\b|\bherein\b|\bhence\b", "so"),
    (r"\b[Oo]ne's own\b|\bones-own\b", "your own"),
    (r"\bpeople\b", "users"),
    (r"\bis told\b|\bare told\b|\bbe told\b", "receives, is reported"),
    (r"\btold apart\b|\btells? apart\b", "distinguish"),
    (r"\bunheard\b", "silent"),
)


def found() -> Iterator[str]:
    for path in FILES:
        text = path.read_text().partition("## Old and new public names")[0]
        for number, line in enumerate(text.split("\n"), 1):
            for pattern, instead in GIVEN_UP:
                for match in re.finditer(pattern, line):
                    where = f"{path.relative_to(ROOT)}:{number}"
                    yield f"{where}: {match.group()!r}; write: {instead}\n    {line}"


def test_words_that_were_given_up_do_not_come_back() -> None:
    faults = list(found())
    assert not faults, "\n".join(faults)


if __name__ == "__main__":
    print("\n".join(found()))
