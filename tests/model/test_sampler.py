"""Drawing tokens: against transformers' warpers, and at the edges of every option."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentkv.config import SamplingOptions
from agentkv.core.batch import RowResult, SampleSpec
from agentkv.model.sampler import log_probabilities, sample

NO_IDS = np.empty(0, np.int32)


def spec(uniform: float = 0.5, **fields: Any) -> SampleSpec:  # Any: options of several types
    extra = {name: fields.pop(name) for name in ("banned_ids", "mask") if name in fields}
    prompt = np.asarray(fields.pop("prompt_ids", NO_IDS), np.int32)
    output = np.asarray(fields.pop("output_ids", NO_IDS), np.int32)
    fields.setdefault("logprobs", "top_logprobs" in fields)
    return SampleSpec(SamplingOptions(**fields), uniform, prompt, output, **extra)


def random_logits(num_rows: int, vocab_size: int = 700, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def ids(results: list[RowResult]) -> list[int | None]:
    return [result.token_id for result in results]


def drawn_by_inverse_cdf(probabilities: Tensor, uniform: float) -> int:
    """The definition, in float64."""
    sums = probabilities.double().cumsum(0)
    return int((sums <= uniform * sums[-1]).sum())


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [5.0, 2.0, 2.0, 1.0]])
    assert ids(sample(logits, [spec(temperature=0)] * 2)) == [1, 0]


def test_no_rows_give_no_results() -> None:
    assert sample(torch.empty(0, 7), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_logits_are_left_as_they_were(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    before = logits.clone()
    sample(logits, [spec(top_k=5), spec(temperature=0, banned_ids=(1,)), spec(top_p=0.5)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 700])
def test_draws_by_inverse_cdf_in_vocabulary_order(vocab_size: int) -> None:
    uniforms = np.linspace(0, 1, 97, endpoint=False).astype(np.float32).tolist()
    logits = random_logits(1, vocab_size).expand(len(uniforms), -1)
    expected = [drawn_by_inverse_cdf(logits[0].softmax(-1), u) for u in uniforms]
    drawn = ids(sample(logits, [spec(u) for u in uniforms]))
    # A number within rounding of a border may fall on either side of it.
    assert sum(a != b for a, b in zip(drawn, expected, strict=True)) <= 1


def test_frequencies_follow_the_probabilities() -> None:
    logits = random_logits(1, 6)
    uniforms = np.random.default_rng(1).random(20_000, np.float32).tolist()
    drawn = ids(sample(logits.expand(len(uniforms), -1), [spec(u) for u in uniforms]))
    counts = np.bincount(np.asarray(drawn, np.int64), minlength=6) / len(uniforms)
    assert np.abs(counts - logits[0].softmax(-1).numpy()).max() < 0.015


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 5000},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 1e-9},
        {"min_p": 0.1},
        {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 5.0, "top_p": 0.9},
        {"temperature": 9.0, "top_p": 0.999},
    ],
)
def test_filters_keep_what_transformers_keeps(options: dict[str, float]) -> None:
    logits = random_logits(4)
    kept = logits.clone()
    if "temperature" in options:
        kept = TemperatureLogitsWarper(options["temperature"])(None, kept)
    if "top_k" in options:
        kept = TopKLogitsWarper(int(options["top_k"]))(None, kept)
    if "top_p" in options:
        kept = TopPLogitsWarper(options["top_p"])(None, kept)
    if "min_p" in options:
        kept = MinPLogitsWarper(options["min_p"])(None, kept)
    uniforms = np.linspace(0, 1, 41, endpoint=False).astype(np.float32).tolist()
    wrong = 0
    for uniform in uniforms:
        drawn = ids(sample(logits, [spec(uniform, **options)] * 4))
        expected = [drawn_by_inverse_cdf(row.softmax(-1), uniform) for row in kept]
        assert all(row[i] > -torch.inf for row, i in zip(kept, drawn, strict=True))
        wrong += sum(a != b for a, b in zip(drawn, expected, strict=True))
    assert wrong <= 2


def test_the_ids_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.zeros(1, 10)
    drawn = {ids(sample(logits, [spec(u / 16, top_k=3)]))[0] for u in range(16)}
    assert drawn == set(range(10))


def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    logits = random_logits(6)
    specs = [
        spec(0.1),
        spec(0.9, top_k=7),
        spec(0.4, top_p=0.8),
        spec(0.3, temperature=0, logprobs=True),
        spec(0.7, min_p=0.05, presence_penalty=1.0, output_ids=[3, 3, 5]),
        spec(0.6, repetition_penalty=1.3, prompt_ids=[1], output_ids=[2], top_logprobs=3),
    ]
    together = sample(logits, specs)
    alone = [sample(logits[i : i + 1], [specs[i]])[0] for i in range(len(specs))]
    assert ids(together) == ids(alone)
    assert dict(together[5].top_logprobs) == pytest.approx(dict(alone[5].top_logprobs))


@pytest.mark.parametrize("temperature", [10.0**-i for i in range(2, 39, 4)] + [1e-300])
def test_tiny_temperatures_tend_to_greedy(temperature: float) -> None:
    logits = (random_logits(8) * 20).half()
    drawn = ids(sample(logits, [spec(0.999, temperature=temperature)] * 8))
    assert drawn == logits.argmax(-1).tolist()


def test_huge_temperatures_are_uniform_over_what_is_left() -> None:
    logits = random_logits(1, 4).expand(4, -1)
    specs = [spec(u, temperature=1e300, banned_ids=(2,)) for u in (0.1, 0.4, 0.6, 0.9)]
    assert ids(sample(logits, specs)) == [0, 1, 1, 3]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_row_alone(poison: float, temperature: float) -> None:
    logits = random_logits(3)
    healthy = ids(sample(logits, [spec(temperature=temperature)] * 3))
    logits[1, 300] = poison
    results = sample(logits, [spec(temperature=temperature)] * 3)
    assert results[1].token_id is None
    assert "not finite" in (results[1].error or "")
    assert ids(results)[::2] == healthy[::2]


def test_minus_infinity_is_a_legal_logit() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    assert ids(sample(logits, [spec(0.0)])) == [1]
    assert ids(sample(logits, [spec(1 - 2**-24)])) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ruling_out_every_id_fails_the_row_alone(temperature: float) -> None:
    logits = random_logits(2, 5)
    mask = np.zeros(5, np.bool_)
    results = sample(logits, [spec(temperature=temperature, mask=mask), spec(temperature=0)])
    assert "no token may be drawn" in (results[0].error or "")
    assert results[1].token_id == int(logits[1].argmax())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn_even_with_a_bias(temperature: float) -> None:
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    banned = spec(0.0, temperature=temperature, banned_ids=(0,), logit_bias={0: 100.0})
    assert ids(sample(logits, [banned])) == [1]


def test_a_mask_shorter_than_the_embedding_allows_nothing_beyond_it() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0]])
    masked = spec(temperature=0, mask=np.array([True, True]))
    assert ids(sample(logits, [masked])) == [1]


def test_bias_moves_the_choice() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    biased = spec(temperature=0, logit_bias={0: 3.0, 2: -100.0})
    assert ids(sample(logits, [biased])) == [0]


@pytest.mark.parametrize("shift", [0.0, -20.0])
def test_repetition_penalty_is_that_of_transformers(shift: float) -> None:
    logits = random_logits(1, 30) + shift
    seen = [int(i) for i in logits[0].topk(6).indices] * 2 + [int(logits.argmin())]
    expected = RepetitionPenaltyLogitsProcessor(2.5)(torch.tensor([seen]), logits.clone())
    penalised = spec(
        temperature=0, repetition_penalty=2.5, prompt_ids=seen[:4], output_ids=seen[4:]
    )
    assert ids(sample(logits, [penalised])) == [int(expected.argmax())]


def test_presence_counts_once_and_frequency_each_time() -> None:
    logits = torch.tensor([[3.0, 2.5, 1.1]])
    presence = spec(temperature=0, presence_penalty=1.0, output_ids=[0, 0, 0])
    frequency = spec(temperature=0, frequency_penalty=0.6, output_ids=[0, 0, 1, 1, 1])
    assert ids(sample(logits, [presence])) == [1]
    assert ids(sample(logits, [frequency])) == [0]


def test_penalties_of_the_prompt_are_repetition_only() -> None:
    logits = torch.tensor([[3.0, 2.5, 1.1]])
    counted = spec(temperature=0, presence_penalty=2.0, frequency_penalty=2.0, prompt_ids=[0])
    assert ids(sample(logits, [counted])) == [0]


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = random_logits(2, 50)
    changed = spec(
        0.4, temperature=0.3, top_k=4, logit_bias={1: 50.0}, logprobs=True, top_logprobs=3
    )
    result, plain = sample(logits, [changed, spec(0.4)])
    expected = logits[0].log_softmax(-1)
    best = expected.topk(3)
    assert result.token_id == 1
    assert result.logprob == pytest.approx(expected[1].item(), abs=1e-5)
    assert [i for i, _ in result.top_logprobs] == best.indices.tolist()
    assert [v for _, v in result.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (plain.logprob, plain.top_logprobs) == (None, ())


def test_logprobs_without_alternatives_have_none() -> None:
    (result,) = sample(random_logits(1), [spec(temperature=0, logprobs=True)])
    assert result.logprob is not None
    assert result.top_logprobs == ()


def test_log_probabilities_of_targets() -> None:
    logits = random_logits(3, 40).bfloat16()
    expected = logits.float().log_softmax(-1)[torch.arange(3), torch.tensor([0, 39, 7])]
    assert log_probabilities(logits, [0, 39, 7]) == pytest.approx(expected.tolist(), abs=1e-5)
    assert log_probabilities(logits[:0], []) == []


def test_every_number_below_one_gives_an_id_that_was_kept() -> None:
    logits = random_logits(1, 49_152)
    last = float(np.nextafter(np.float32(1), np.float32(0)))
    for uniform in (0.0, last):
        (token_id,) = ids(sample(logits, [spec(uniform, top_k=3)]))
        assert token_id in logits[0].topk(3).indices.tolist()


def test_results_are_plain_python() -> None:
    (result,) = sample(random_logits(1), [spec(top_logprobs=1)])
    assert type(result.token_id) is int
    assert type(result.logprob) is float
    assert dataclasses.asdict(result)["error"] is None
