"""Suffix decoding against its definition, and through the engine: the guesses may be anything, the output may not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from minillm import LLM, SamplingParams
from minillm.models import bundled
from minillm.request import Request
from minillm.speculative.suffix import (
    OutputHistory,
    OutputHistoryBySalt,
    SuffixDrafter,
    SuffixOptions,
    continuations,
    most_probable_path,
)
from minillm.speculative.suffix_trie import MAX_MATCHES, SuffixTrie
from minillm.trace import DraftProposed, RequestPreempted, TokensCommitted
from tests.conftest import TinyPair
from tests.speculative.test_suffix_trie import interrupted

ENDED = None


def request(name: str, prompt: Sequence[int], output: Sequence[int] = (), salt: str = "") -> Request:
    tokens = [*prompt, *output]
    return Request(name, "", tokens, len(prompt), SamplingParams(), max_tokens=1000, seed=0, cache_salt=salt)


def new_drafter(**options: float) -> SuffixDrafter:
    """With these options, given without their prefix."""
    return SuffixDrafter(SuffixOptions(**{f"suffix_decoding_{name}": value for name, value in options.items()}))


def guess(drafter: SuffixDrafter, request: Request, most: int = 8) -> list[int]:
    [draft] = drafter.propose([request], [most])
    assert draft.probs is None and len(draft.token_ids) <= most
    return draft.token_ids


# --- the definition --------------------------------------------------------------------------------------------------


def walk(sources: list[list[int | None]], places: list[tuple[int, int]], length: int, least: float):
    """The greedy walk from `places` (source, index), latest first; a source that is the text itself goes on with it."""
    path: list[int] = []
    score, alive = Fraction(0), places
    while len(path) < length:
        following = [(sources[s] + path)[i + len(path)] for s, i in alive]
        token = max(following, key=following.count)  # the first of equals
        alive = [place for place, then in zip(alive, following, strict=True) if then == token]
        if token is ENDED or len(alive) / len(places) < least:
            break
        path.append(token)
        score += Fraction(len(alive), len(places))
    return path, score


def by_definition(
    own: list[int], outputs: list[list[int]], most: int, depth: int, factor: Fraction, least: float
) -> list[int]:
    """What `SuffixDrafter` should propose, by looking at every place of every text."""
    best: tuple[list[int], Fraction] = ([], Fraction(0))
    for texts in ([own], [[*output, ENDED] for output in outputs]):
        for p in range(min(depth, len(own)), 0, -1):
            places = [
                (s, i) for s, text in enumerate(texts) for i in range(p, len(text)) if text[i - p : i] == own[-p:]
            ]
            if places:
                latest = places[::-1][:MAX_MATCHES]
                found = walk(texts, latest, min(most, math.floor(factor * p)), least)
                if found[1] > best[1]:
                    best = found
                break
    return best[0]


few = st.lists(st.integers(1, 3), min_size=1, max_size=60)


@settings(max_examples=400)
@given(
    few,
    st.lists(few, max_size=4),
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from([Fraction(1, 2), Fraction(1), Fraction(3, 10), Fraction(2)]),
    st.sampled_from([0.0, 0.1, 0.5, 0.6, 1.0]),
)
def test_guesses_are_those_of_the_definition(
    own: list[int], outputs: list[list[int]], most: int, depth: int, factor: Fraction, least: float
) -> None:
    """The longest match of each source, its latest places, the majority's path; of the sources, the better."""
    drafter = new_drafter(max_tree_depth=depth, max_spec_factor=float(factor), min_token_prob=least)
    for i, output in enumerate(outputs):
        drafter.request_finished(request(f"earlier {i}", [9], output))
    assert guess(drafter, request("0", own), most) == by_definition(own, outputs, most, depth, factor, least)


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=4), min_size=1, max_size=25))
def test_requests_that_grow_side_by_side_are_guessed_as_each_alone(steps: list[list[int]]) -> None:
    """What is entered bit by bit, in any order and with others around, is what is entered at once."""
    together = new_drafter(max_cached_requests=0)
    requests = [request("a", [1]), request("b", [2, 1])]
    for number, step in enumerate(steps):
        requests[number % 2].token_ids.extend(step)
        drafts = together.propose(requests, [5, 3])
        for one, most, draft in zip(requests, (5, 3), drafts, strict=True):
            assert draft.token_ids == guess(new_drafter(max_cached_requests=0), one, most)
        requests.reverse()


def test_a_request_with_its_own_seed_does_not_depend_on_what_ran_before(tiny: TinyPair) -> None:
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config={"method": "suffix"})
    params = SamplingParams(temperature=0.6, seed=7, max_tokens=40, ignore_eos=True)
    texts = [llm.generate("def add(a, b):", params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]


def test_a_request_that_lost_its_blocks_leaves_nothing_in_the_drafter() -> None:
    drafter, one = new_drafter(), request("a", [1, 2, 1, 2])
    first = guess(drafter, one)
    drafter.request_dropped(one)
    assert drafter._own == {} and drafter._earlier.num_outputs == 0
    assert guess(drafter, one) == first


# --- what the definition means ---------------------------------------------------------------------------------------


def test_new_text_is_not_guessed() -> None:
    assert guess(new_drafter(), request("0", range(1, 50))) == []
    assert guess(new_drafter(), request("0", [])) == []


def test_a_longer_match_is_trusted_further() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    for matched in range(1, 5):
        context = request("0", [*text, 0, *text[:matched]])
        for factor in (0.5, 1.0, 2.0):
            drafted = guess(new_drafter(max_spec_factor=factor), context, most=7)
            assert drafted == text[matched : matched + min(7, int(factor * matched))]


def test_a_factor_that_is_not_a_binary_fraction_loses_no_token() -> None:
    """0.29 · 100 is 28.999… in floating point."""
    text = list(range(1, 201))
    drafter = new_drafter(max_tree_depth=100, max_spec_factor=0.29)
    assert len(guess(drafter, request("0", [*text, *text[:100]]), most=60)) == 29


def test_matches_end_at_the_greatest_depth() -> None:
    text = list(range(1, 60))
    assert len(guess(new_drafter(max_tree_depth=6), request("0", [*text, *text[:40]]), most=60)) == 6


def test_the_majority_decides_and_the_latest_of_equals() -> None:
    many = [5, 1, 6, 5, 1, 7, 5, 2, 8]
    assert guess(new_drafter(), request("0", [*many, 5])) == [1]
    assert guess(new_drafter(), request("0", [5, 1, 0, 5, 2, 9, 5])) == [2]
    assert guess(new_drafter(), request("0", [5, 2, 0, 5, 1, 9, 5])) == [1]


def test_a_guess_ends_where_it_becomes_unlikely() -> None:
    """After `8 9` came `1` in three of four places, and then three different tokens: P = 3/4, 1/4, 1/4."""
    text = [8, 9, 1, 2, 2, 21, 8, 9, 1, 3, 3, 22, 8, 9, 5, 5, 5, 23, 8, 9, 1, 4, 4, 24, 8, 9]
    for least, drafted in ((0.8, []), (0.75, [1]), (0.26, [1]), (0.25, [1, 4, 4])):
        assert guess(new_drafter(max_spec_factor=1.5, min_token_prob=least), request("0", text)) == drafted


def test_a_loop_is_guessed_beyond_its_own_length() -> None:
    """The place three tokens back is three tokens from the end of the text, and the guess is eight long."""
    assert guess(new_drafter(), request("0", [0, *[1, 2, 3] * 5])) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert guess(new_drafter(max_spec_factor=8), request("0", [0, 4, 4])) == [4] * 8


def test_score_is_the_sum_of_the_paths_probabilities() -> None:
    assert most_probable_path([[1, 2, 3], [1, 2, 4], [5, 5, 5]], 0.0) == ([1, 2, 3], 5 / 3)
    assert most_probable_path([[1, 2, 3]], 1.0) == ([1, 2, 3], 3.0)
    assert continuations([7, 8, 9], [2, 1], 5) == [[9] * 5, [8, 9, 8, 9, 8]]


def test_the_source_with_the_higher_score_is_taken() -> None:
    """Earlier outputs match three tokens, the request itself one; then it is the other way round."""
    drafter = new_drafter()
    drafter.request_finished(request("a", [0], [1, 2, 3, 7, 7, 7]))
    assert guess(drafter, request("b", [3, 8, 0, 1, 2, 3])) == [7, 7, 7]
    assert guess(drafter, request("c", [9, 5, 3, 8, 8, 6, 9, 5, 3])) == [8, 8, 6]
    assert guess(drafter, request("d", [1, 2, 3, 8, 8, 8, 1, 2, 3])) == [8, 8, 8]  # of equals, its own


# --- what is shared, and what is let go ------------------------------------------------------------------------------


def test_a_finished_request_leaves_its_output_and_nothing_else() -> None:
    drafter = new_drafter()
    first = request("a", [1, 2, 3, 4], [5, 6, 7, 8])
    guess(drafter, first)
    assert guess(drafter, request("b", [5, 6])) == []
    drafter.request_finished(first)
    assert list(drafter._own) == ["b"]
    assert guess(drafter, request("c", [5, 6])) == [7, 8]
    assert guess(drafter, request("d", [1, 2])) == []  # of the prompt: not shared
    assert guess(drafter, request("e", [3, 4])) == []  # from prompt to output: not shared either


def test_a_request_that_never_drafted_is_shared_too() -> None:
    drafter = new_drafter()
    drafter.request_finished(request("aborted while it waited", [1, 2, 3]))
    drafter.request_finished(request("one token", [1], [2]))
    drafter.request_finished(request("a", [1], [4, 5, 6, 7]))
    assert guess(drafter, request("b", [4, 5])) == [6, 7]


def test_an_id_that_comes_back_starts_afresh() -> None:
    """Even if the earlier request with this id was never reported as ended."""
    drafter = new_drafter(max_cached_requests=0)
    assert guess(drafter, request("a", [1, 2, 3, 1])) == [2]
    assert guess(drafter, request("a", [1, 5, 6, 1, 5])) == [6, 1]


def known(outputs: OutputHistory, texts: list[list[int]]) -> list[bool]:
    return [any(trie.longest_match(text[:2])[0] == 2 for trie in outputs.tries) for text in texts]


@pytest.mark.parametrize("most", range(1, 9))
def test_no_more_outputs_are_kept_than_allowed(most: int) -> None:
    """And the latest half always is."""
    texts = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(1, 30)]
    outputs = OutputHistory(24, most)
    for number, text in enumerate(texts, 1):
        outputs.add(text)
        kept = known(outputs, texts)
        assert sum(kept) <= most
        latest = min(number, (most + 1) // 2)
        assert all(kept[number - latest : number]) and not any(kept[number:])
        held = sum(len(trie.tokens) for trie in outputs.tries)
        assert held <= 4 * most + 2


def test_what_a_request_said_is_found_by_its_own_salt_only() -> None:
    drafter = new_drafter()
    drafter.request_finished(request("a", [0], [1, 2, 3, 7, 8, 9], "alice"))
    drafter.request_finished(request("b", [0], [1, 2, 3, 4, 5, 6], "bob"))
    tenants = ("alice", "bob", "carol", "")
    found = {salt: guess(drafter, request(f"of {salt}", [1, 2, 3], salt=salt)) for salt in tenants}
    assert found == {"alice": [7, 8, 9], "bob": [4, 5, 6], "carol": [], "": []}


@settings(max_examples=100)
@given(st.integers(1, 9), st.lists(st.sampled_from("abcd"), max_size=60))
def test_all_salts_together_keep_no_more_than_allowed(most: int, salts: list[str]) -> None:
    """And what was said last is kept, whatever the other salts have said."""
    outputs = OutputHistoryBySalt(24, most)
    for number, salt in enumerate(salts):
        outputs.add(salt, [2 * number + 1, 2 * number + 2])
        kept = [i for i, s in enumerate(salts) if known_to(outputs, s, i)]
        assert len(kept) <= outputs.num_outputs <= most
        assert number in kept
        assert not any(known_to(outputs, other, number) for other in "abcd" if other != salt)


def known_to(outputs: OutputHistoryBySalt, salt: str, number: int) -> bool:
    text = [2 * number + 1, 2 * number + 2]
    return any(trie.longest_match(text)[0] == 2 for trie in outputs.tries(salt))


def test_the_salt_that_was_quiet_longest_is_forgotten_first() -> None:
    outputs = OutputHistoryBySalt(24, 4)
    for number, salt in enumerate("abca"):
        outputs.add(salt, [2 * number + 1, 2 * number + 2])
    outputs.add("d", [9, 10])
    assert [known_to(outputs, salt, number) for number, salt in enumerate("abcad")] == [True, False, True, True, True]


@settings(max_examples=100)
@given(few, few, st.integers(2, 60), st.integers(1, 200))
@example([1, 2, 3, 1, 2], [1, 2, 3, 1, 2], 2, 1)
def test_an_interrupt_anywhere_leaves_right_guesses(
    own: list[int], output: list[int], line_of_end: int, line_of_guess: int
) -> None:
    """In `request_finished`, after its first line, and in `propose`. An output is then kept whole or not at all."""
    files = ("suffix.py", "suffix_trie.py")
    other = [3, 1, 2, 3, 3, 1]
    drafter, first, second = new_drafter(max_tree_depth=4), request("a", [9], output), request("b", own)
    drafter.request_finished(request("c", [9], other))
    drafter.propose([first], [4])
    ended = not interrupted(lambda: drafter.request_finished(first), line_of_end, files)
    kept = ended or len(drafter._earlier.tries("")[0].tokens) > len(other) + 2
    interrupted(lambda: drafter.propose([second], [6]), line_of_guess, files)
    outputs = [other, output] if kept else [other]
    assert guess(drafter, second, 6) == by_definition(own, outputs, 6, 4, Fraction(1), 0.1)
    assert list(drafter._own) == ["b"]


# --- through the engine ----------------------------------------------------------------------------------------------

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "for line in lines:\n    print(line)\nfor line in lines:\n    print(line)\nfor line in",
    "import os\nimport sys\nimport",
]
SPECULATE = {"method": SuffixDrafter, "num_speculative_tokens": 6}


def tokens(llm: LLM, prompts: list, params: object) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


def drafted(llm: LLM, prompts: list, params: object) -> tuple[list[list[int]], int, int]:
    """The outputs, and how many guesses there were and stayed."""
    with llm.trace() as trace:
        outputs = tokens(llm, prompts, params)
    rounds = trace.of(TokensCommitted)
    assert sum(len(event.token_ids) for event in trace.of(DraftProposed)) == sum(e.num_drafts for e in rounds)
    return outputs, sum(e.num_drafts for e in rounds), sum(e.num_accepted for e in rounds)


@pytest.mark.parametrize("options", [{}, {"block_size": 1, "max_num_seqs": 8, "max_num_batched_tokens": 9}])
def test_greedy_output_is_that_of_the_target_alone(tiny: TinyPair, options: dict) -> None:
    """Together, one by one, and once more when every answer has been seen."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = tokens(LLM(str(tiny.target), **options), TEXTS, params)
    llm = LLM(str(tiny.target), speculative_config=SPECULATE, **options)
    outputs, proposed, accepted = drafted(llm, TEXTS, params)
    assert outputs == plain and proposed > accepted
    assert [tokens(llm, [text], params)[0] for text in TEXTS] == plain
    again, _, accepted_again = drafted(llm, TEXTS, params)
    assert again == plain and accepted_again > 120 > accepted  # 3 · 60 tokens, which are now known
    assert llm.engine.pool.num_used == 0 and llm.engine.drafter._own == {}


def test_the_bundled_model_says_the_same_in_fewer_steps() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    folder = str(bundled.path("minicoder"))
    plain = tokens(LLM(folder, dtype="float32"), TEXTS, params)
    llm = LLM(folder, dtype="float32", speculative_config={"method": SuffixDrafter, "num_speculative_tokens": 8})
    outputs, _, accepted = drafted(llm, TEXTS, params)
    assert outputs == plain and accepted > 40
    assert [tokens(llm, [text], params)[0] for text in TEXTS] == plain


def test_costs_are_measured_with_a_text_for_each_request(tiny: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one name the three would be one request whose text changes, and each turn would index it anew."""
    indexed: list[int] = []
    make = SuffixTrie.__init__

    def counted(self: SuffixTrie, tokens: list[int], max_depth: int) -> None:
        indexed.append(len(tokens))
        make(self, tokens, max_depth)

    monkeypatch.setattr(SuffixTrie, "__init__", counted)
    LLM(str(tiny.target), speculative_config={**SPECULATE, "adaptive": True})
    assert sum(length > 1 for length in indexed) == 3


def test_a_preempted_request_is_guessed_on(tiny: TinyPair) -> None:
    """Too few blocks for all: a request that loses its own keeps its tokens, and the drafter what it knows of them."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain = tokens(LLM(str(tiny.target)), TEXTS, params)
    llm = LLM(str(tiny.target), block_size=4, num_kv_blocks=42, speculative_config=SPECULATE)
    with llm.trace() as trace:
        assert tokens(llm, TEXTS, params) == plain
    assert trace.of(RequestPreempted)


def test_sampled_text_follows_the_target(tiny: TinyPair) -> None:
    """χ² over the second and third token of 1200 completions against plain sampling of the target.

    The guesses come from other completions of the same prompt, so that most rounds have one; still each token must be
    drawn from the target alone. A two-sample test on the 12 most likely pairs and the rest; with seeds fixed it either
    always passes or always fails, and a correct engine fails with probability 1e-6 over the choice of seeds.
    """
    counts, proposed = [], 0
    for speculative in (None, SPECULATE):
        config = speculative and {**speculative, "adaptive": False}
        llm = LLM(str(tiny.target), max_num_seqs=100, seed=int(bool(speculative)), speculative_config=config)
        # Without seeds of their own: a request with one does not draft from other completions.
        params = SamplingParams(max_tokens=4, ignore_eos=True, top_k=3)
        outputs, proposed, _ = drafted(llm, [TEXTS[2]] * 1200, params)
        counts.append([tuple(output[1:3]) for output in outputs])
    assert proposed > 1000
    pairs = sorted(set(counts[0] + counts[1]), key=(counts[0] + counts[1]).count, reverse=True)[:12]
    table = [[c.count(p) for p in pairs] + [sum(x not in pairs for x in c)] for c in counts]
    table = [[a for a, b in zip(*table, strict=True) if a + b], [b for a, b in zip(*table, strict=True) if a + b]]
    assert chi2_contingency(table).pvalue > 1e-6
