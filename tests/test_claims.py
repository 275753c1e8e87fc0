"""A claim is counted in its file; one that fails, or fails no longer, stops the build."""

import json

import pytest

from h3lib import claims
from h3lib.contract import ReportError

ENTRY = {
    "id": "fast", "claim": "it is fast", "file": "file.json", "lines": "measurements",
    "where": {"op": ["a", "b"], "rows": 7}, "value": "ratio", "holds": ">= 0.9", "least": 2,
}  # fmt: skip
LINES = [
    {"op": "a", "rows": 7, "ratio": 0.95},
    {"op": "b", "rows": 7, "ratio": 0.90},
    {"op": "b", "rows": 8, "ratio": 0.10},
    {"op": "c", "rows": 7, "ratio": 0.10},
]


@pytest.fixture
def outcome(tmp_path):
    def run(lines=LINES, complete=True, **changes):
        content = {"measurements": lines, "complete": complete}
        (tmp_path / "file.json").write_text(json.dumps(content))
        return claims.check(ENTRY | changes, tmp_path)

    return run


def test_the_committed_claims_stand():
    assert claims.main(["--check"]) == 0


def test_lines_are_selected_counted_and_compared(outcome):
    found = outcome()
    assert (found.holding, found.lines, found.held, found.stands) == (2, 2, True, True)
    assert not outcome(holds="> 0.9").held
    assert outcome(holds="> 0.9", any=True).held
    assert not outcome(holds="> 0.99", any=True).held
    assert outcome(where={}, holds=">= 0.1").lines == 4


@pytest.mark.parametrize("changes", [{"least": 3}, {"lines": [], "least": 1, "any": True}])
def test_too_few_lines_are_an_error_whatever_the_claim_says(outcome, changes):
    for missed in ({}, {"missed": "the lines are gone"}):
        with pytest.raises(ReportError, match="lines of claim fast"):
            outcome(**changes, **missed)


def test_a_missed_claim_must_be_missed(outcome):
    assert outcome(holds="> 0.9", missed="the tail").stands
    assert not outcome(missed="not any more").stands
    assert not outcome(holds="> 0.9").stands


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"file": "none.json"}, "file of claim fast"),
        ({"complete": False}, "incomplete"),
        ({"lines": LINES, "value": "speed"}, "speed"),
        ({"where": {"rwos": 7}}, "rwos"),
        ({"holds": "~ 1"}, "comparison"),
        ({"holds": ">="}, "comparison"),
    ],
)
def test_what_cannot_be_read_is_refused(outcome, changes, word):
    with pytest.raises(ReportError, match=word):
        outcome(**changes)


@pytest.mark.parametrize(
    "text, word",
    [
        ("[{id: a, claim: b}]", "fields of claim a"),
        (json.dumps([ENTRY | {"vlaue": 1}]), "vlaue"),
        (json.dumps([ENTRY, ENTRY]), "each once"),
        (json.dumps([ENTRY | {"least": 0}]), "1 or more"),
        (json.dumps([ENTRY | {"least": "x"}]), "1 or more"),
    ],
)
def test_a_file_of_claims_is_checked(text, word, tmp_path):
    path = tmp_path / "claims.yml"
    path.write_text(text)
    with pytest.raises(ReportError, match=word):
        claims.read_claims(path)
