"""Writes `docs/techniques.md`: claims of the sources, what runs them, what was measured: `python docs/techniques.py`.

Figures come from `benchmarks/*.json`, from the cards of trained weights and from what the solved lessons printed; none
is typed. A verdict that the figures of its line can refute has a condition: where that fails, no page is written.
`tests/test_figures.py` fails where the page differs from its sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results import EARLIER, ROOT, is_of_bundled_weights, load, ratio, row_of, table_head
from technique_figures import (
    beside,
    card,
    closest,
    counted,
    counted_steps,
    distilled,
    drafter,
    drafting,
    drafting_methods,
    figure,
    gpu_attention,
    gpu_attention_ratio,
    kl,
    lesson,
    mean,
    mean_speed_up,
    numbers,
    on_long_files,
    recalled,
    recalled_from,
    repeated_completions,
    speed_up,
    tokens_per_round,
    whole_and_without,
    zoo,
)

from minillm.bench.zoo_systems import BUDGETS

PAGE = ROOT / "docs" / "techniques.md"


@dataclass(frozen=True)
class Row:
    """One technique."""

    name: str
    claim: str
    """Quoted: what its source claims."""
    command: str
    """What runs it here."""
    figure: Callable[[], str]
    """What was measured here."""
    verdict: str
    holds: Callable[[], bool] = lambda: True
    """The condition of the verdict."""


RESULTS = ("ablations", "batch", "beside", "latency", "speculation", "zoo")
"""The results on this page that were measured with the bundled model."""

SQUEEZE = r"SqueezeLLM, engine\s+([\d.]+) bits\s+KL\s+([\d.]+)"
GROUPS_OF_32 = r"INT4, groups of 32\s+([\d.]+) bits\s+KL\s+([\d.]+)"

BOTH_IN_FOUR_BITS = r"\nboth\s+(\d+) of\s+(\d+) accepted"

SPIRE_AFTER_MAGICDEC = r"\n +MagicDec +([\d.]+)×.*\n +SPIRe +([\d.]+)×"

KL_AND_LK = r"trained by KL ([\d.]+), trained on acceptance ([\d.]+)"

LORC_AT_THREE_QUARTERS = r"\nlorc 75%\s+([\d.]+)%\s+([\d.]+)"

EDITS = r"\n +5\.0% .* ([\d.]+)×\n +50\.0% .* ([\d.]+)×\n +98\.5% .* ([\d.]+)×"
CODES_AND_INT4 = r"\ncodes, power 1 .* ([+-][\d.]+)\nINT4 .* ([+-][\d.]+)"

ROWS = (
    Row(
        "Preallocated KV buffer; growing every r tokens (BMC)",
        "on CPUs up to 3.2× over transformers, 1.36× over vLLM and 2.29× over DeepSpeed, and up to 1.39× on top of "
        "speculation",
        '`kv_cache_config={"layout": "contiguous"}` with its growth policies; lesson 2',
        lambda: lesson(
            "02",
            r"concat takes ([\d.]+) times as long, whole buffer at its best r ([\d.]+)",
            "concatenating takes {0} times as long as a preallocated buffer, the best r {1} times",
        ),
        "Growing in steps avoids what concatenation costs. Over a preallocated buffer and a view it gains nothing. "
        "Its gain on top of speculation was not measured, nor was it compared with vLLM or DeepSpeed.",
        lambda: (lambda concat, best: concat > 1.2 and best > 0.95)(
            *numbers("02", r"concat takes ([\d.]+) times as long, whole buffer at its best r ([\d.]+)")
        ),
    ),
    Row(
        "Continuous batching (Orca)",
        "up to 36.9 times the throughput of FasterTransformer",
        "`minillm bench batch`; lesson 7",
        lambda: (
            f"{ratio(row_of('batch', 'minillm continuous', 'minillm static'))} over static batching, "
            f"{counted('batch', 'minillm static', 'steps')} → {counted('batch', 'minillm continuous', 'steps')} steps; "
            f"{ratio(row_of('batch', 'minillm continuous', 'transformers padded batch'))} over a padded batch of "
            "transformers"
        ),
        "The steps are halved. Most of the distance to others is in the steps themselves. FasterTransformer was not "
        "run.",
        lambda: 0.4 < counted_steps("minillm continuous") / counted_steps("minillm static") < 0.6,
    ),
    Row(
        "Chunked prefill (Sarathi)",
        "prompts in pieces, so that requests that decode do not wait for a long one",
        "`max_num_batched_tokens`; lesson 7",
        lambda: lesson(
            "07",
            r"\n +2048 +(\d+) +(\d+) +\d+\n[^\n]*\n +64 +(\d+) +(\d+) ",
            "largest step {0} tokens whole, {2} in pieces; the long prompt's first token after {1} and {3} steps",
        ),
        "Holds (counted): no step is longer than the budget, and the long prompt itself waits longer.",
        lambda: (lambda whole, _, pieces, __: pieces < whole)(
            *numbers("07", r"\n +2048 +(\d+) +(\d+) +\d+\n[^\n]*\n +64 +(\d+) +(\d+) ")
        ),
    ),
    Row(
        "PagedAttention (vLLM)",
        "2 to 4 times the throughput of FasterTransformer and Orca, by larger batches",
        "every run; lesson 6",
        lambda: (
            lesson("06", r"paging runs (\d+) times as many at once", "{0} times as many requests in the same memory")
            + "; "
            + lesson("06", r"blocks of 16\s+([\d.]+) times the speed", "one request alone at {0} times the speed")
        ),
        "It holds for many requests, by the larger batch; a single request gains little or nothing.",
        lambda: numbers("06", r"blocks of 16\s+([\d.]+) times the speed")[0] < 1.2,
    ),
    Row(
        "FlashAttention, Flash-Decoding",
        "attention in one pass over keys and values, split over processors",
        "`minillm/ops/triton/`; lesson 9",
        lambda: (
            lesson(
                "09",
                r"gather, then attend\s+\S+ MiB\s+([\d.]+) of .*\n.*\nwalk it in 8 parts\s+\S+ MiB\s+([\d.]+)",
                "bytes moved, of the least possible: gathered first {0}, in one pass of 8 parts {1}",
            )
            + "; "
            + gpu_attention()
        ),
        "Holds, in bytes (counted) and on a GPU (measured).",
        lambda: gpu_attention_ratio() > 1.5,
    ),
    Row(
        "Grouped-query attention",
        "quality close to multi-head attention at about the speed of one KV head",
        "every bundled model; lesson 3",
        lambda: lesson(
            "03",
            r"against 6 KV heads: 2 KV ([\d.]+)× faster, 1 KV ([\d.]+)× faster",
            "attention of 8 requests at 512 tokens, against 6 KV heads: {0}× with two, {1}× with one",
        ),
        "The speed holds for many long requests. Quality is not measured here: the model was trained with two.",
    ),
    Row(
        "Prefix caching",
        "no single figure",
        "`minillm bench latency`; lesson 6",
        lambda: (
            f"{ratio(row_of('latency', 'warm', 'cold'))} for a completion of 24 tokens after a prompt of 200 "
            f"({repeated_completions()})"
        ),
        "Exact, and about half of the time of such a completion is gone.",
        lambda: 1.7 < row_of("latency", "warm", "cold")["ratio"] < 2.4,
    ),
    Row(
        "AWQ",
        "INT4 weights with little loss",
        "`minillm quantize --scheme awq`; lesson 5",
        lambda: lesson(
            "05", r"AWQ removes (\d+%), the sparse part (\d+%)", "removes {0} of INT4's KL; dense and sparse {1}"
        ),
        "Little is gained here: the bundled model has few outlier channels. A planted one shows the gain.",
        lambda: numbers("05", r"AWQ removes (\d+)%")[0] < 35,
    ),
    Row(
        "SqueezeLLM",
        "lossless down to 3 bits, with 0.4% outliers and 0.05% sensitive weights kept",
        "`minillm quantize --scheme squeezellm`; lesson 5",
        lambda: (
            lesson("05", SQUEEZE, "{0} bits per weight, KL {1} thousandths")
            + "; "
            + lesson("05", GROUPS_OF_32, "INT4 in groups of 32 at {0} bits: {1} thousandths")
        ),
        "Three bits were not measured; four are not lossless here. On matrices this small, finer groups have about the "
        "same loss in fewer bits than the codebooks.",
        lambda: (
            lambda squeezed, groups: groups[0] < squeezed[0] and groups[1] < 1.1 * squeezed[1] and squeezed[1] > 5
        )(numbers("05", SQUEEZE), numbers("05", GROUPS_OF_32)),
    ),
    Row(
        "Tensor parallelism (Megatron)",
        "two all-reduces per layer",
        "`tensor_parallel_size`; `minillm bench parallel`; lesson 16",
        lambda: (
            lesson("16", r"(\d+ steps), (\d+) all-reduces", "{1} all-reduces in {0}")
            + "; "
            + lesson(
                "16",
                r"1 request : one process +([\d.]+) ms a step, 2 processes +([\d.]+) ms, of which waiting (\d+%)",
                "a step of one request {0} ms whole, {1} ms over two processes, {2} of it waiting",
            )
        ),
        "Holds, with one more for the embedding. A model this small on a CPU only loses: its processes wait longer "
        "than they compute.",
        lambda: (
            (lambda steps, sums, layers: sums == steps * (2 * layers + 1))(
                *numbers("16", r"(\d+) steps, (\d+) all-reduces.*\n.* = 2 · (\d+) layers")
            )
            and numbers("16", r"1 request : .* of which waiting (\d+)%")[0] > 50
        ),
    ),
    Row(
        "Speculative decoding with a draft model",
        "2 to 3× (Leviathan et al.)",
        '`speculative_config={"method": "draft_model"}`; `minillm bench speculation`; lessons 10 and 11',
        lambda: speed_up("draft_model"),
        "Less than claimed: drafting four tokens takes almost half a plain step, and the rest of such a step 1.7. "
        "Equal outputs.",
        lambda: (
            1 < mean_speed_up("draft_model") < 2
            and 0.35 < mean("draft_model", "c") < 0.5
            and round(mean("draft_model", "v"), 1) == 1.7
            and all(row["outputs_equal"] for row in drafting("draft_model"))
        ),
    ),
    Row(
        "Staged speculative decoding",
        "3.16× (762M ← 40M ← n-gram)",
        '`"method": "staged"`; `minillm bench speculation`',
        lambda: speed_up("staged"),
        "No faster than the draft model alone: the same tokens per forward, and drafting them takes longer.",
        lambda: (
            abs(mean("staged", "tau") - mean("draft_model", "tau")) < 0.01
            and _drafting_time("staged") > 1.05
            and mean_speed_up("staged") < 1.05 * mean_speed_up("draft_model")
        ),
    ),
    Row(
        "Trees by dynamic programming (Sequoia)",
        "the shape with the most accepted tokens for its size",
        '`"method": "draft_tree"`, `"tree_shape": "measured"`; lesson 11',
        lambda: speed_up("draft_tree"),
        "By the acceptance measured here the best tree of four drafts is the draft model's chain, and it is drafted as "
        "fast.",
        lambda: (
            abs(mean("draft_tree", "tau") - mean("draft_model", "tau")) < 0.01
            and 0.9 < _drafting_time("draft_tree") < 1.1
        ),
    ),
    Row(
        "Prompt lookup (n-grams)",
        "no figure in the sources",
        '`"method": "ngram"`; `minillm bench speculation`; lesson 11',
        lambda: speed_up("ngram"),
        "Drafting costs almost nothing. With one request it loses on no kind of text, with four it does.",
        lambda: (
            mean("ngram", "c") < 0.05
            and all(row["interval"][1] >= 1 for row in drafting("ngram"))
            and any(row["interval"][1] < 1 for row in drafting("ngram", 4))
        ),
    ),
    Row(
        "Suffix decoding, and a model where it finds too little (Arctic; here: fewer than three tokens)",
        "HumanEval, tokens/s: plain 77, n-grams 100, suffix 148, a model beside it 217",
        '`"method": "suffix"`, `"suffix_decoding_max_cached_requests": 0`, with `"fallback_below": 3` and `"fallback": '
        '{"method": "draft_model", "min_survival": 0.1}`; `minillm bench speculation`; lesson 11',
        lambda: f"alone {speed_up('suffix')}; with the draft model {speed_up('suffix or draft_model')}",
        "The model beside it adds to it, as claimed.",
        lambda: mean_speed_up("suffix or draft_model") > mean_speed_up("suffix"),
    ),
    Row(
        "Adaptive number of drafts (DISCO)",
        "10% faster on average than with the best fixed number",
        'every drafting method, unless `"adaptive": False`; `minillm bench speculation`; lesson 11',
        lambda: "; ".join(
            f"{words}: four drafts always {mean_speed_up(method):.2f}×, adaptive "
            f"{mean_speed_up(f'{method}, adaptive'):.2f}× over plain decoding"
            for words, method in (("draft model", "draft_model"), ("heads", "heads"))
        ),
        "No gain: some per cent slower where four drafts pay. Where they lose, as with heads, it avoids the loss. "
        "Another rule than the paper's, and not compared with other fixed numbers.",
        lambda: (
            0.93 < mean_speed_up("draft_model, adaptive") / mean_speed_up("draft_model") < 0.99
            and mean_speed_up("heads") < 0.95 < mean_speed_up("heads, adaptive")
        ),
    ),
    Row(
        "Distilling the draft (DistillSpec)",
        "10 to 45% faster than with the undistilled draft",
        "`minillm train --stages distill`; lesson 11",
        distilled,
        "Holds in kind: more of its drafts are accepted, at no cost when it runs.",
        lambda: (
            card("minicoder-draft")["evaluation"]["distilled"]["code"]["overlap"]
            > card("minicoder-draft")["evaluation"]["undistilled"]["code"]["overlap"]
        ),
    ),
    Row(
        "Training on acceptance (LK losses)",
        "up to 8 to 10% more accepted tokens than after training by KL",
        "`minillm train --stages heads`; lesson 11",
        lambda: lesson(
            "11", KL_AND_LK, "Σ min(p, q) of a draft of one mode, target of two: by KL {0}, on acceptance {1}"
        ),
        "Holds in this example, which is made for it. The heads are trained on it mixed with KL, and were not compared "
        "with heads trained by KL alone.",
        lambda: (lambda by_kl, by_acceptance: by_acceptance > by_kl)(*numbers("11", KL_AND_LK)),
    ),
    Row(
        "DeFT",
        "73 to 99% less KV traffic",
        '`speculative_config={"method": "draft_tree"}`; lesson 11',
        lambda: lesson(
            "11", r"\n\s+100\s+\S+\s+\S+\s+(\d+%)", "{0} fewer keys read for three branches over 100 cached tokens"
        ),
        "The saving is 1 − 1 / branches, so it needs wide trees. Equal outputs.",
    ),
    Row(
        "Block verification",
        "never worse than token by token",
        '`"rejection_sample_method": "block"`; lesson 10',
        lambda: lesson(
            "10", r"exactly: ([\d.]+) one by one, ([\d.]+) as a block", "{0} → {1} accepted of four drafts, exactly"
        ),
        "Holds, exactly. It needs drafts that are sampled.",
        lambda: (lambda one_by_one, block: block > one_by_one)(
            *numbers("10", r"exactly: ([\d.]+) one by one, ([\d.]+) as a block")
        ),
    ),
    Row(
        "Typical acceptance (Medusa)",
        "more drafts accepted than by rejection sampling, at the same quality of text",
        '`"rejection_sample_method": "typical"`, `"lossy": True`',
        lambda: "not measured",
        "Lossy: sampled text is not distributed as the target's (a statistical test rejects it). At temperature 0 it "
        "is exact. Neither speed nor quality was measured.",
    ),
    Row(
        "MagicDec",
        "up to 2.51× at batches of 32 to 256 and long contexts",
        '`"method": "self_sparse"`; lesson 12',
        lambda: (
            lesson(
                "12",
                r"\nbudget((?:\s+\d+)+)\nsink and window((?:\s+\d+%)+)",
                "accepted with {0} tokens of 2,048 in view: {1}",
            )
            + f"; over plain decoding at 4,000 tokens {on_long_files('self_sparse', 1):.2f}× for one request, "
            + f"{on_long_files('self_sparse', 4):.2f}× for four"
        ),
        "In fp32 it holds in kind: with a long context it gains more for four requests than for one, and there about "
        "as much as the best other method. Batches of 32 were not measured.",
        lambda: (
            on_long_files("self_sparse", 4) > on_long_files("self_sparse", 1)
            and on_long_files("self_sparse", 4) > 0.9 * max(on_long_files(name, 4) for name in drafting_methods(4))
        ),
    ),
    Row(
        "QuantSpec",
        "over 90% acceptance, up to about 2.5×, 1.3 times less memory than drafting over a sparse cache",
        '`"method": "self_quant"`, layout `paged_two_level`; lesson 12',
        lambda: (
            lesson("12", BOTH_IN_FOUR_BITS, "{0} of {1} accepted with weights and cache in 4 bits")
            + "; "
            + speed_up("self_quant")
        ),
        "Acceptance holds here, on a few texts; the speed-up is far below 2.5×; memory was not compared. Its lossless "
        "reference is the INT8 cache, not the full one. Not tested as in the paper: keys are quantised by token here.",
        lambda: (
            (lambda accepted, drafted: accepted > 0.9 * drafted)(*numbers("12", BOTH_IN_FOUR_BITS))
            and mean_speed_up("self_quant") < 1.5
        ),
    ),
    Row(
        "Parallel prompt decoding",
        "up to 2.49×, 0.0002% of the parameters",
        '`"method": "prompt_tokens"`; `minillm train --stages prompt_tokens`',
        lambda: f"{drafter('prompt_tokens')}; {speed_up('prompt_tokens')}",
        "Slower than plain decoding: a round is two forwards here, and so small a model foresees little.",
        lambda: mean_speed_up("prompt_tokens") < 1,
    ),
    Row(
        "Heads (Medusa, Hydra)",
        "2.2 to 3.6×",
        '`"method": "heads"`; `minillm train --stages heads`',
        lambda: f"{drafter('heads')}; {speed_up('heads')}",
        "No forward of its own per draft, but fewer tokens per round than a draft model, and slower than plain "
        "decoding.",
        lambda: (
            float(drafter("heads").split()[0])
            < card("minicoder-draft")["evaluation"]["distilled"]["greedy_tokens_per_forward"]
            and mean_speed_up("heads") < 1
        ),
    ),
    Row(
        "SPIRe",
        "over 100% more throughput than a small draft, over 35% more than sparse self-speculation (modelled), most "
        "with contexts of unlike lengths",
        '`"method": "spire"`; `minillm train --stages spire`, `--ablations spire`; lesson 12',
        lambda: (
            whole_and_without("spire", "no feedback memory")
            + "; "
            + lesson(
                "12", SPIRE_AFTER_MAGICDEC, "modelled for 64 requests of 512 tokens: {1}× over plain, MagicDec {0}×"
            )
        ),
        "Feedback memory raises the tokens per round. Over MagicDec the claim holds by lesson 12's model for Llama, "
        "with the paper's tokens per round. The small draft and contexts of unlike lengths were not modelled, and no "
        "speed was measured. Trained for minutes here, not for days.",
        lambda: (
            tokens_per_round("spire", "spire") > tokens_per_round("spire", "no feedback memory")
            and (lambda magicdec, spire: spire > 1.35 * magicdec)(*numbers("12", SPIRE_AFTER_MAGICDEC))
        ),
    ),
    Row(
        "LongSpec",
        "up to 3.26×",
        '`"method": "long"`; `minillm train --stages long`, `--ablations long`',
        lambda: whole_and_without("long", "no cross-attention"),
        "Its memory is constant, as claimed, and it gains by reading the target's cache. Trained for minutes here; its "
        "speed is not measured.",
        lambda: tokens_per_round("long", "long") > tokens_per_round("long", "no cross-attention"),
    ),
    Row(
        "ThinK",
        "over 20% less KV memory, on top of token eviction",
        '`"layout": "think"`; `minillm bench zoo`; lesson 13',
        lambda: zoo("think"),
        "Tested alone, without eviction. With a fifth of the bytes gone it is further from the plain cache than INT4 "
        "with half of them gone.",
        lambda: kl("think", None) > kl("int4", 0.5),
    ),
    Row(
        "LoRC",
        "little loss with the KV cache at 55 to 60% of its size, no training",
        '`"layout": "lorc"`; `minillm bench zoo`; lesson 13',
        lambda: zoo("lorc") + "; " + lesson("13", LORC_AT_THREE_QUARTERS, "KL {1} at {0}%"),
        "Does not reproduce: the heads of this small model have no spare ranks. The last at every budget. Not tested "
        "as in the paper: all layers keep the same share here.",
        lambda: (
            all(kl("lorc", b) > kl(other, b) for b in BUDGETS for other in ("anchors", "commvq"))
            and numbers("13", LORC_AT_THREE_QUARTERS)[1] > 0.5
        ),
    ),
    Row(
        "CommVQ",
        "87.5% less cache at 2 bits",
        '`"layout": "commvq"`; `minillm bench zoo`; lesson 13',
        lambda: zoo("commvq"),
        "Has the claimed bytes at two bits, and there recalls clearly less than the plain cache; with a quarter of the "
        "bytes it recalls like it. From 37.5% on INT4 and KIVI are closer.",
        lambda: (
            kl("commvq", 0.375) > kl("int4", 0.375) > kl("kivi", 0.375)
            and recalled("commvq", 0.125) < 0.8 * recalled("plain", None)
            and recalled("commvq", 0.25) > 0.9 * recalled("plain", None)
        ),
    ),
    Row(
        "Squeezed Attention",
        "3.1 times fewer keys read without loss, 8 times with little",
        '`"layout": "squeezed"`; `minillm bench zoo`; lesson 13',
        lambda: zoo("squeezed"),
        "Nearly: it recalls like the plain cache even at an eighth, but by KL none of these shares is without loss. "
        "The closest at an eighth and a quarter. The share is of what is read: it stores everything.",
        lambda: (
            all(
                kl("squeezed", b) < kl(other, b)
                for b in (0.125, 0.25)
                for other in ("window", "snapkv", "commvq", "anchors")
            )
            and recalled("squeezed", 0.125) > 0.9 * recalled("plain", None)
            and kl("squeezed", 0.5) > 10 * kl("int8", 0.5)
        ),
    ),
    Row(
        "SnapKV",
        "3.6 times the generation speed at 16,000 tokens, at comparable quality",
        '`"layout": "snapkv"`; `minillm bench zoo`; lesson 12',
        lambda: zoo("snapkv"),
        "From far back it recalls more than a window of the same size at every budget, from near less. By mean KL "
        "over all tokens the window is as close or closer.",
        lambda: all(
            kl("snapkv", b) > kl("window", b)
            and recalled_from("snapkv", b, -1) > recalled_from("window", b, -1)
            and recalled_from("snapkv", b, 0) < recalled_from("window", b, 0)
            for b in BUDGETS
        ),
    ),
    Row(
        "AnchorCoder",
        "at least 70% less KV cache, after training",
        '`"layout": "anchors"`; `minillm bench zoo`',
        lambda: zoo("anchors"),
        "Line ends as anchors of a model that was not trained for them: at each budget behind a window, which fills "
        "a little more of the budget.",
        lambda: all(kl("anchors", b) > kl("window", b) for b in BUDGETS),
    ),
    Row(
        "StreamingLLM: sinks and a window",
        "stable over any length",
        '`"layout": "sinks"`; `minillm bench zoo`; lesson 12',
        lambda: zoo("sinks"),
        "A little closer than a window alone, by about one standard error, so not surely. Nothing outside the window "
        "is recalled. Texts longer than the model's context were not tested.",
        lambda: all(0.75 < kl("sinks", b) / kl("window", b) < 1 for b in BUDGETS),
    ),
    Row(
        "KIVI",
        "2 bits with little loss",
        '`"layout": "kivi"`; `minillm bench zoo`; lesson 4',
        lambda: zoo("kivi"),
        "Not tested: two bits are not built here. In four bits it is the closest at 37.5%.",
        lambda: all(
            kl("kivi", 0.375) < kl(other, 0.375) for other in ("int4", "squeezed", "commvq", "snapkv", "window")
        ),
    ),
    Row(
        "PIE",
        "over 85% less work than recomputing after an edit",
        "`minillm.reuse`; lesson 14",
        lambda: (
            lesson("14", r"rotated \(PIE\)\s+([\d.]+)\s+([\d.]+%)", "KL {0}, same argmax {1}")
            + "; "
            + lesson("14", r"not rotated\s+([\d.]+)\s+([\d.]+%)", "without the rotation {0} and {1}")
            + "; "
            + lesson("14", EDITS, "an edit at 5%, 50%, 98.5% of the text: {0}×, {1}×, {2}× as fast as recomputing")
        ),
        "Holds where much text follows the edit; where little does, it gains nothing. Nearly exact for mild edits far "
        "from the scored tokens; a renamed variable was not measured.",
        lambda: (lambda early, _, late: early > 1 / 0.15 and late < 1.2)(*numbers("14", EDITS)),
    ),
    Row(
        "MatKV",
        "half the time and half the power, at some loss of quality",
        "`minillm.reuse`; lesson 14",
        lambda: (
            lesson("14", r"\nrotated\s+([\d.]+)\s+([\d.]+%)", "KL {0}, same argmax {1}")
            + "; "
            + lesson("14", r"\nas stored\s+([\d.]+)\s+([\d.]+%)", "not rotated {0} and {1}")
            + "; "
            + lesson("14", r"\n([\d.]+) times as fast", "{0} times as fast as computing the documents")
        ),
        "Loading is faster from a few tokens on, from files that the system has in memory; neither a disk nor power "
        "was measured. The loss is real: documents do not see each other.",
    ),
    Row(
        "KVPR",
        "up to 35.8% lower latency",
        "`minillm.reuse`; lesson 14",
        lambda: lesson("14", r"saved: (\d+%)", "{0} saved with multi-head attention and a throttled link"),
        "Holds where an activation is smaller than its keys and values (hidden size < 2 · KV heads · head size): with "
        "multi-head attention. With grouped heads it seldom is, and not in the bundled model.",
        lambda: numbers("14", r"KVPR:\s+recompute (\d+)")[0] == 0,
    ),
    Row(
        "Fill in the middle (Bavarian et al.)",
        "learnt in training without harm to completion from left to right",
        "`LLM.fim_prompt`; `minillm complete`",
        lambda: (
            "{gaps} gaps from inside a line to its end: {with_suffix:.1%} exact with the suffix, {without_suffix:.1%} "
            "without".format(**card("minicoder")["alone"]["gaps"])
        ),
        "Not tested: no model was trained without it. The suffix helps here by less than chance may give.",
        lambda: (lambda gaps: 0 < gaps["with_suffix"] - gaps["without_suffix"] < 0.03)(
            card("minicoder")["alone"]["gaps"]
        ),
    ),
    Row(
        "OOMB",
        "gradients as usual, activations flat in the context",
        "`minillm bench beside`; lesson 17",
        lambda: beside("OOMB"),
        "Activations are flat; keys and values still grow. It costs a second forward.",
    ),
    Row(
        "BLAST (block low-rank)",
        "fewer parameters for the same error; with kernels for BLAST and Monarch up to 3.76× faster than dense "
        "on small GPUs (Abillama et al.)",
        "`minillm bench beside`; lesson 17",
        lambda: beside("BLAST"),
        "The error is lower, but by little on these matrices. The kernels are not built here, and speed was "
        "not measured.",
        lambda: 0.95 < figure("BLAST", 0)["value"] / figure("BLAST", 0)["plain"] < 1,
    ),
    Row(
        "Monarch",
        "as expressive, from products of blocks",
        "`minillm bench beside`; lesson 17",
        lambda: beside("Monarch"),
        "Not on these matrices, which were not trained with its structure.",
        lambda: figure("Monarch", 0)["value"] > figure("Monarch", 0)["plain"],
    ),
    Row(
        "Tiled contrastive loss (Inf-CL)",
        "two orders of magnitude less memory than other memory-efficient ways, at comparable speed",
        "`minillm bench beside`; lesson 17",
        lambda: beside("tiled contrastive loss"),
        "Neither holds at this batch, even against the dense loss: less than one order of magnitude, and slower. But "
        "what the backward pass keeps grows with the batch, no longer with its square.",
        lambda: (
            1 < figure("tiled contrastive loss", 0)["plain"] / figure("tiled contrastive loss", 0)["value"] < 10
            and figure("tiled contrastive loss", 1)["speed_max"] < 1
        ),
    ),
    Row(
        "BiMaCoSR",
        "23.8 times smaller and 27.4 times faster than full precision, for super-resolution of images: binary weights "
        "with low-rank and sparse parts",
        "`minillm bench beside`; lesson 17",
        lambda: beside("BiMaCoSR"),
        "The two parts help, but cost most of a further bit per weight in a matrix this small, which is about 18 times "
        "smaller than in float32. Speed was not measured, nor a model of images.",
        lambda: (
            figure("BiMaCoSR", 0)["value"] < figure("BiMaCoSR", 0)["plain"]
            and round(32 / figure("BiMaCoSR", 1)["value"]) == 18
        ),
    ),
    Row(
        "MEC",
        "over 50 times less memory for the tables of recommendation models",
        "`minillm bench beside`; lesson 17",
        lambda: (
            beside("MEC")
            + "; "
            + lesson("17", CODES_AND_INT4, "added loss, table as input and output layer: codes {0}, INT4 {1} nats")
        ),
        "Weighting by frequency helps what is read. The benchmark's table is about 5 times smaller than in 16 bits, "
        "that of the lesson, whose loss this is, 11 times; neither is 50. INT4 costs this model far less.",
        lambda: (
            figure("MEC", 0)["value"] < figure("MEC", 0)["plain"]
            and round(figure("MEC", 1)["plain"] / figure("MEC", 1)["value"]) == 5
            and (lambda codes, int4: codes > 5 * int4)(*numbers("17", CODES_AND_INT4))
        ),
    ),
    Row(
        "SparseTransX",
        "faster than gathers, as a sparse product",
        "`minillm bench beside`; lesson 17",
        lambda: beside("SparseTransX"),
        "Faster than gathering and summing. PyTorch's own function for sums of embeddings, which copies no rows "
        "either, is faster still, so nothing is gained over the best plain way.",
        lambda: figure("SparseTransX", 0)["speed_min"] > 1 > figure("SparseTransX", 1)["speed_max"],
    ),
)


def _drafting_time(method: str) -> float:
    """The time of drafting a round, over that of the draft model alone."""
    return mean(method, "c") / mean("draft_model", "c")


def page() -> str:
    """The text of `docs/techniques.md`."""
    lines = [
        "# Techniques: claimed, and measured here",
        "",
        "<!-- written by docs/techniques.py -->",
        "",
        "Claims are quoted; their models, hardware and batches are others than here, where everything runs on the",
        "bundled model and a CPU (machine, threads and revision: in the JSON of each figure, and in",
        "[measured.md](measured.md)), unless a line names a GPU. KL is in nats per token, against the plain cache,",
        "after prompts of nearly 2,048 tokens. Figures of lessons are what their solutions recorded; the others are in",
        "`benchmarks/*.json` and in the cards of the weights. Caches are compared on "
        f"{load('zoo')['config']['scored_tokens']} held-out tokens, recall on few definitions for each distance.",
        "Speed-ups of drafting methods are of fp32 and, where nothing else is said, one request, with four drafts in",
        'each round (`"adaptive": False`); by default the engine drafts only where it predicts a gain '
        "([all](measured.md)).",
        "In brackets after a speed-up is where the true median lies with a probability of 95%, if rounds are",
        "independent, or from fewer than six rounds the lowest and the highest. Those `by kind of text` and those of",
        "`minillm bench beside` are always the lowest and the highest.",
        *_earlier(),
        "",
        *table_head(["technique", "claimed", "runs with", "measured here", "verdict"]),
    ]
    for row in ROWS:
        if not row.holds():
            raise ValueError(f"the verdict on {row.name} is no longer true: {row.figure()}")
        lines.append(f"| {row.name} | {row.claim} | {row.command} | {row.figure()} | {row.verdict} |")
    lines += [
        "",
        "Cache techniques at equal bytes (up to 5% more), as shares of a float16 cache; mean KL ± its standard error,",
        "as if tokens were independent, against a float32 cache. For `squeezed` these are the bytes that a step reads;",
        "it stores everything.",
    ]
    lines += ["", *table_head(["budget", "closest", "then"])]
    for budget in BUDGETS:
        first, *others = closest(budget)
        lines.append(f"| {budget:.1%} | {first} | {', '.join(others[:3])} |")
    return "\n".join(lines) + "\n"


def _earlier() -> list[str]:
    """Which of the used results are of other weights than the bundled ones."""
    files = [f"`{file}.json`" for file in RESULTS if not is_of_bundled_weights(file)]
    return [f"Measured {EARLIER}: {', '.join(files)}."] if files else []


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
