"""Block verification: exact by enumeration, and never fewer accepted drafts than the standard rule."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.errors import DraftError
from minillm.sampling import Draw, uniform
from minillm.speculative import block_verification, chain_drafter, rejection_sampler
from minillm.speculative.block_verification import acceptance, block_verify, kept_weights
from minillm.speculative.rejection_sampler import acceptance_probability, rejection_sample
from tests.chi_square import p_value
from tests.conftest import TinyPair

VOCAB, LENGTH = 3, 3
"""Tokens, and drafts of a round. The first `LENGTH + 1` tokens of the output are enumerated."""


def random_model(seed: int, sharpness: float = 2.0) -> dict[tuple[int, ...], Tensor]:
    """A distribution after every context of up to `LENGTH` tokens, fp64."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [c for n in range(LENGTH + 1) for c in product(range(VOCAB), repeat=n)]
    weights = (torch.rand(VOCAB, generator=generator, dtype=torch.float64).pow(sharpness) + 0.01 for _ in contexts)
    return {c: w / w.sum() for c, w in zip(contexts, weights, strict=True)}


def rows(model: dict[tuple[int, ...], Tensor], tokens: tuple[int, ...], count: int) -> Tensor:
    return torch.stack([model[tokens[:i]] for i in range(count)])


def expected(target: dict[tuple[int, ...], Tensor]) -> Tensor:
    """The target's own distribution of the first `LENGTH + 1` tokens, `[VOCAB] * (LENGTH + 1)`."""
    found = torch.zeros([VOCAB] * (LENGTH + 1), dtype=torch.float64)
    for tokens in product(range(VOCAB), repeat=LENGTH + 1):
        found[tokens] = torch.stack([target[tokens[:i]][x] for i, x in enumerate(tokens)]).prod()
    return found


def enumerated(
    monkeypatch: pytest.MonkeyPatch,
    target: dict[tuple[int, ...], Tensor],
    draft: dict[tuple[int, ...], Tensor],
    chances: Callable[[Tensor, Tensor, Tensor], Tensor] = acceptance,
) -> tuple[Tensor, float]:
    """The distribution of the first `LENGTH + 1` tokens after one round and the target's sampling, and the expected
    number of accepted drafts: `block_verify` is led through all drafts and every number of them that may be
    accepted."""
    found, mean = torch.zeros([VOCAB] * (LENGTH + 1), dtype=torch.float64), 0.0
    h: list[float] = []
    last: list[Tensor] = []

    def noted_chances(weights: Tensor, p: Tensor, q: Tensor) -> Tensor:
        decided = chances(weights, p, q)
        h[:] = [1.0, *decided.tolist()]
        return decided

    def noted_sample(p: Tensor, uniforms: object) -> Tensor:
        last[:] = p
        return torch.zeros(1, dtype=torch.int64)

    def led(seed: int, index: int, purpose: Draw, at: int) -> float:
        return 0.0 if at == accepted else 2.0  # not 1: rounding may take h above it

    for name, noted in (("acceptance", noted_chances), ("sample", noted_sample), ("uniform", led)):
        monkeypatch.setattr(block_verification, name, noted)
    for x in product(range(VOCAB), repeat=LENGTH):
        p, q = rows(target, x, LENGTH + 1), rows(draft, x, LENGTH)
        probability = float(q.gather(1, torch.tensor(x)[:, None]).prod())
        behind = 1.0  # the probability that no later draft is accepted
        for accepted in range(LENGTH, -1, -1):
            [verdict] = block_verify([x], [q], p, [0], [0])
            chance = probability * behind * h[accepted]
            behind *= 1 - h[accepted]
            mean += chance * accepted
            if chance:
                assert verdict.token_ids == [*x[:accepted], 0]
                follow(found, target, x[:accepted], chance * last[0] / last[0].sum())
    return found, mean


def follow(found: Tensor, target: dict[tuple[int, ...], Tensor], prefix: tuple[int, ...], weights: Tensor) -> None:
    """Add outputs that begin with `prefix` and a token of `weights`, and go on as the target does."""
    for rest in product(range(VOCAB), repeat=LENGTH + 1 - len(prefix)):
        tokens = (*prefix, *rest)
        later = [target[tokens[:i]][tokens[i]] for i in range(len(prefix) + 1, LENGTH + 1)]
        found[tokens] += weights[rest[0]] * (torch.stack(later).prod() if later else 1.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_output_is_distributed_as_the_targets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_model(seed), random_model(100 + seed)
    found, _ = enumerated(monkeypatch, target, draft)
    assert torch.allclose(found, expected(target), atol=1e-12)


def test_a_draft_that_is_the_target_is_always_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(5)
    found, mean = enumerated(monkeypatch, model, model)
    assert torch.allclose(found, expected(model), atol=1e-12) and mean == pytest.approx(LENGTH)


@pytest.mark.parametrize("seed", range(6))
def test_it_accepts_at_least_as_many_as_the_standard_rule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_model(seed, 4.0), random_model(100 + seed, 4.0)
    standard = 0.0
    for x in product(range(VOCAB), repeat=LENGTH):
        p, q, ids = rows(target, x, LENGTH), rows(draft, x, LENGTH), torch.tensor(x)
        chances = acceptance_probability(p, q, ids).cumprod(0)
        standard += float(q.gather(1, ids[:, None]).prod() * chances.sum())
    assert enumerated(monkeypatch, target, draft)[1] >= standard - 1e-12


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "accepts with the weight itself": lambda w, p, q: w[1:],
    "forgets 1 - w": lambda w, p, q: torch.cat((torch.ones(LENGTH - 1, dtype=torch.float64), w[-1:])),
    "looks at the residual of the row before": lambda w, p, q: acceptance(w, p.roll(1, 0), q.roll(1, 0)),
    "never accepts all": lambda w, p, q: torch.cat((acceptance(w, p, q)[:-1], torch.zeros(1, dtype=torch.float64))),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_seen_by_the_enumeration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_model(0, 4.0), random_model(100, 4.0)
    found, _ = enumerated(monkeypatch, target, draft, WRONG[name])
    assert float((found - expected(target)).abs().max()) > 1e-4


def test_the_residual_of_the_standard_rule_is_seen_by_the_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights then only decide what is accepted: the next token comes from norm(max(0, p - q))."""
    target, draft = random_model(0, 4.0), random_model(100, 4.0)
    right: list[Tensor] = []

    def all_ones(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        right[:] = [kept_weights(p, q, x)]
        return torch.ones_like(right[0])

    monkeypatch.setattr(block_verification, "kept_weights", all_ones)
    found, _ = enumerated(monkeypatch, target, draft, lambda w, p, q: acceptance(right[0], p, q))
    assert float((found - expected(target)).abs().max()) > 1e-4


def one_round(seed: int, verify: Callable[..., list], target: dict, draft: dict) -> list[int]:
    """The tokens of one round whose drafts are drawn by `seed`."""
    generator, tokens, q = torch.Generator().manual_seed(seed), (), []
    for _ in range(LENGTH):
        q.append(draft[tokens])
        tokens = (*tokens, int(q[-1].multinomial(1, generator=generator)))
    p = torch.stack([target[tokens[:i]] for i in range(LENGTH + 1)]).float()
    [verdict] = verify([list(tokens)], [torch.stack(q).float()], p, [seed], [7])
    return verdict.token_ids


def first_tokens(model: int) -> float:
    """p of a χ² test over the first token of 6,000 rounds, each with a seed of its own. In place of a rejected first
    draft, one token can come of model 1, two of model 15."""
    target, draft = random_model(model), random_model(100 + model)
    counts = torch.zeros(VOCAB)
    for seed in range(6000):
        counts[one_round(seed, block_verify, target, draft)[0]] += 1
    return p_value(counts, target[()])


@pytest.mark.parametrize("model", [1, 15])
def test_first_tokens_of_many_rounds_are_the_targets(model: int) -> None:
    """Seeds are fixed; over random ones a correct rule fails once in 1,000 runs. A wrong residual (the target's row
    itself) fails it."""
    assert first_tokens(model) > 1e-3


WRONG_UNIFORMS: dict[str, Callable[..., float]] = {
    "one for all drafts": lambda seed, index, purpose, at=0: uniform(
        seed, index, purpose, 1 if purpose is Draw.ACCEPT else at
    ),
    "one to reject and to recover": lambda seed, index, purpose, at=0: uniform(
        seed, index, *((Draw.ACCEPT, at + 1) if purpose is Draw.RECOVER else (purpose, at))
    ),
}


@pytest.mark.parametrize("name", WRONG_UNIFORMS)
def test_chi_square_sees_wrong_uniforms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test as above, which numbers that are not independent must fail."""
    monkeypatch.setattr(block_verification, "uniform", WRONG_UNIFORMS[name])
    assert min(first_tokens(1), first_tokens(15)) < 1e-6


def test_more_tokens_a_round_than_the_standard_rule() -> None:
    target, draft = random_model(2, 3.0), random_model(102, 3.0)
    block, standard = (
        sum(len(one_round(seed, verify, target, draft)) for seed in range(2000))
        for verify in (block_verify, rejection_sample)
    )
    assert block > standard


def test_without_drafts_it_samples_as_without_speculation() -> None:
    p = random_model(3)[()].float()[None]
    for seed in range(20):
        assert block_verify([[]], [None], p, [seed], [4]) == rejection_sample([[]], [None], p, [seed], [4])


def test_deterministic_drafts_and_greedy_targets_agree_with_the_standard_rule() -> None:
    greedy = torch.eye(VOCAB)[[1, 2, 0, 1]]
    for drafts in ([1, 2, 0], [1, 0, 0], [0, 2, 0]):
        assert block_verify([drafts], [None], greedy, [0], [0]) == rejection_sample([drafts], [None], greedy, [0], [0])


def test_drafts_that_their_own_q_rules_out_are_refused() -> None:
    q = torch.tensor([[1.0, 0.0, 0.0]])
    with pytest.raises(DraftError, match="probability 0 in draft_probs"):
        block_verify([[1]], [q], torch.full((2, VOCAB), 1 / VOCAB), [0], [0])
    assert block_verification.block_verify([], [], torch.empty(0, VOCAB), [], []) == []


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_no_number_is_used_twice(tiny: TinyPair, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one round decided must not bend the next. Block verification looks at numbers behind the accepted drafts,
    too, so the next round, which drafts the same positions again, needs others."""
    used: list[tuple[int, int, Draw, int]] = []

    def noted(seed: int, index: int, purpose: Draw, at: int = 0) -> float:
        used.append((seed, index, purpose, at))
        return uniform(seed, index, purpose, at)

    for module in (block_verification, chain_drafter, rejection_sampler):
        monkeypatch.setattr(module, "uniform", noted)
    drafted = {"model": str(tiny.draft), "num_speculative_tokens": 4, "rejection_sample_method": rule}
    llm = LLM(str(tiny.target), enforce_eager=True, speculative_config=drafted)
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(8)]
    llm.generate(["def f(x):"] * 8, params, use_tqdm=False)
    assert {Draw.DRAFT, Draw.ACCEPT, Draw.RECOVER} <= {purpose for _, _, purpose, _ in used}
    assert len(used) > 200 and len(set(used)) == len(used)


def test_sampled_text_follows_the_target_over_several_rounds(tiny: TinyPair) -> None:
    """χ² over the third and fourth, and the fifth and sixth token of 1,500 completions, with drafts against without.

    Both are samples, so these are two-sample tests; seeds are fixed, and a correct engine fails with probability 2e-6
    over their choice. They see gross mistakes only: numbers that are used in two rounds bend the text by less.
    """
    drafted = {
        "method": "draft_model",
        "model": str(tiny.draft),
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "block",
    }
    completions = []
    for speculative in (None, drafted):
        llm = LLM(str(tiny.target), max_num_seqs=128, speculative_config=speculative)
        first = 10_000 * bool(speculative)
        params = [SamplingParams(seed=first + i, max_tokens=7, ignore_eos=True, top_k=3) for i in range(1500)]
        outputs = llm.generate(["def f(x):"] * 1500, params, use_tqdm=False)
        completions.append([o.outputs[0].token_ids for o in outputs])
    for at in (2, 4):
        counts = [[tuple(tokens[at : at + 2]) for tokens in some] for some in completions]
        pairs = sorted(set(counts[0] + counts[1]), key=(counts[0] + counts[1]).count, reverse=True)[:12]
        table = [[c.count(p) for p in pairs] + [sum(x not in pairs for x in c)] for c in counts]
        columns = [column for column in zip(*table, strict=True) if sum(column)]
        assert chi2_contingency(list(zip(*columns, strict=True))).pvalue > 1e-6
