"""Draws the next token of each row from its logits.

Temperature 0 takes the best logit. Otherwise one uniform number a token is pushed through the
inverse of the cumulative filtered probabilities, in vocabulary order, in float32: the same code on
every device, and a row's draw depends on its own logits and number alone. All rows are handled
together; a row that fails (logits that are not finite, or every id banned) fails alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.batch import RowResult, SampleSpec
from .logits import adjust, needs_adjustment

_BUCKET = 128  # ids whose probabilities are summed together before the drawn one is looked for
_NUCLEUS_CANDIDATES = 256  # best ids that top_p looks at before it sorts the whole vocabulary
_PORTION = 1 << 18  # logits that are worked on at a time on a CPU
# A divisor outside this range would be 0 or inf in float32, and 0/0 or -inf/inf are not numbers.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-37, 1e30

_NOT_FINITE = "the model gave logits that are not finite"
_NOTHING_LEFT = "no token may be drawn: the constraint, bans and biases rule out every id"


class Logprobs(NamedTuple):
    """Natural-log probabilities of chosen ids, and each row's best alternatives, best first."""

    chosen: list[float]
    top: list[tuple[tuple[int, float], ...]]


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[RowResult]:
    """Draw one token a row from `logits` [num_rows, vocab_size] (any float type, left unchanged).

    Ids in the specs must lie inside the vocabulary.
    """
    if not specs:
        return []
    raw = logits.float()
    best = _argmax(raw)
    peak = raw.gather(1, best[:, None])[:, 0].cpu().numpy()
    # The argmax of a row with a NaN is that NaN.
    errors: list[str | None] = [None if np.isfinite(value) else _NOT_FINITE for value in peak]
    token_ids = best.cpu().numpy().copy()
    drawn = [
        i
        for i, spec in enumerate(specs)
        if errors[i] is None and (needs_adjustment(spec) or _temperature(spec) > 0.0)
    ]
    for rows in _portions(drawn, raw):
        chosen, is_possible = _draw(raw[rows], [specs[i] for i in rows])
        token_ids[rows] = chosen
        for i, possible in zip(rows, is_possible, strict=True):
            errors[i] = None if possible else _NOTHING_LEFT
    return _results(raw, specs, token_ids, errors)


def log_probabilities(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """Natural-log probability of one id a row under `logits` [num_rows, vocab_size]."""
    ids = np.asarray(token_ids, np.int64)
    found: list[float] = []
    for rows in _portions(list(range(len(ids))), logits):
        found += _logprobs(logits[rows].float(), ids[rows], [0] * len(rows)).chosen
    return found


def _results(
    raw: Tensor,
    specs: Sequence[SampleSpec],
    token_ids: npt.NDArray[np.int64],
    errors: Sequence[str | None],
) -> list[RowResult]:
    results = [
        RowResult(token_id=int(token_id)) if error is None else RowResult(error=error)
        for token_id, error in zip(token_ids, errors, strict=True)
    ]
    asked = [
        i
        for i, spec in enumerate(specs)
        if errors[i] is None and (spec.options.logprobs or spec.options.top_logprobs)
    ]
    for rows in _portions(asked, raw):
        counts = [specs[i].options.top_logprobs for i in rows]
        found = _logprobs(raw[rows], token_ids[rows], counts)
        for i, chosen, top in zip(rows, found.chosen, found.top, strict=True):
            results[i] = RowResult(token_id=int(token_ids[i]), logprob=chosen, top_logprobs=top)
    return results


def _logprobs(logits: Tensor, token_ids: npt.NDArray[np.int64], counts: Sequence[int]) -> Logprobs:
    normaliser = logits.logsumexp(-1, keepdim=True)
    ids = torch.from_numpy(token_ids).to(logits.device)
    chosen = (logits.gather(1, ids[:, None]) - normaliser)[:, 0].tolist()
    most = min(max(counts, default=0), logits.shape[1])
    if most == 0:
        return Logprobs(chosen, [()] * len(chosen))
    top = logits.topk(most)
    top_ids, top_values = top.indices.tolist(), (top.values - normaliser).tolist()
    rows = zip(top_ids, top_values, counts, strict=True)
    return Logprobs(chosen, [tuple(zip(i[:count], v[:count], strict=True)) for i, v, count in rows])


def _draw(
    logits: Tensor, specs: Sequence[SampleSpec]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draw from `logits`, which it overwrites; also says which rows had an id left to draw."""
    adjusted = [i for i, spec in enumerate(specs) if needs_adjustment(spec)]
    if adjusted:
        with _selected(logits, adjusted) as part:
            adjust(part, [specs[i] for i in adjusted])
    best = _argmax(logits)
    peak = logits.gather(1, best[:, None])
    token_ids = best.cpu().numpy().copy()
    is_possible = np.isfinite(peak[:, 0].cpu().numpy())
    random = [i for i, spec in enumerate(specs) if is_possible[i] and _temperature(spec) > 0.0]
    if random:
        chosen = [specs[i] for i in random]
        with _selected(logits, random) as weights:
            _weigh(weights, peak[random], chosen)
            _filter(weights, chosen)
            uniforms = _column(weights, [spec.uniform for spec in chosen])
            token_ids[random] = _inverse_cdf(weights, uniforms)
    return token_ids, is_possible


def _weigh(logits: Tensor, peak: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Turn `logits` into unnormalised probabilities, 1 for each row's best id, in place."""
    bounds = [min(max(_temperature(s), _MIN_TEMPERATURE), _MAX_TEMPERATURE) for s in specs]
    logits.sub_(peak)
    if any(bound != 1.0 for bound in bounds):
        logits.div_(_column(logits, bounds))
    logits.exp_()


def _filter(weights: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Zero, in place, what top_k, then top_p, then min_p leave out.

    Each is a threshold on the weight, as in transformers' warpers; ids that tie with the last one
    kept are kept too, so that the outcome does not depend on how a device sorts.
    """
    vocab_size = weights.shape[1]
    ks = [min(s.options.top_k or vocab_size, vocab_size) for s in specs]
    rows = [i for i, k in enumerate(ks) if k < vocab_size]
    if rows:
        with _selected(weights, rows) as part:
            values = part.topk(max(ks[i] for i in rows)).values
            last = torch.tensor([[ks[i] - 1] for i in rows], device=weights.device)
            _keep_from(part, values.gather(1, last))
    ps = [1.0 if s.options.top_p is None else s.options.top_p for s in specs]
    rows = [i for i, p in enumerate(ps) if p < 1.0]
    if rows:
        with _selected(weights, rows) as part:
            _keep_from(part, _nucleus_cutoff(part, _column(part, [ps[i] for i in rows])))
    floors = [s.options.min_p or 0.0 for s in specs]
    if any(floors):
        # The best weight is 1, so the floor needs no scaling.
        _keep_from(weights, _column(weights, floors))


def _keep_from(weights: Tensor, cutoff: Tensor) -> None:
    """Zero, in place, the weights below their row's `cutoff` [num_rows, 1]."""
    weights.mul_(weights >= cutoff)


def _nucleus_cutoff(weights: Tensor, top_p: Tensor) -> Tensor:
    """Smallest weight [num_rows, 1] of the fewest best ids whose probabilities reach `top_p`."""
    wanted = top_p * weights.sum(-1, keepdim=True)
    for count in (min(_NUCLEUS_CANDIDATES, weights.shape[1]), weights.shape[1]):
        values = weights.topk(count).values
        sums = values.cumsum(-1)
        if count == weights.shape[1] or bool((sums[:, -1:] >= wanted).all()):
            break
    # How many proper prefixes fall short; where rounding keeps all short, the last id is the cut.
    index = (sums < wanted).sum(-1, keepdim=True).clamp_(max=count - 1)
    return values.gather(1, index)


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> npt.NDArray[np.int64]:
    """First id, in vocabulary order, at which the cumulative weight exceeds uniform x total.

    Two levels: first the bucket of ids, then the id in it. Never an id of weight 0.
    """
    num_rows, vocab_size = weights.shape
    num_buckets = -(-vocab_size // _BUCKET)
    padded = torch.nn.functional.pad(weights, (0, num_buckets * _BUCKET - vocab_size))
    buckets = padded.view(num_rows, num_buckets, _BUCKET)
    sums = buckets.sum(-1)
    upto = sums.cumsum(-1)
    target = uniform * upto[:, -1:]
    bucket = _first_above(upto, sums, target)
    rows = torch.arange(num_rows, device=weights.device)
    before = (upto[rows, bucket] - sums[rows, bucket])[:, None]
    inside = buckets[rows, bucket]
    offset = _first_above(inside.cumsum(-1), inside, target - before)
    result: npt.NDArray[np.int64] = (bucket * _BUCKET + offset).cpu().numpy()
    return result


def _first_above(sums: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """First index of positive weight whose sum exceeds `target`, else the last positive one."""
    positive = weights > 0
    index = torch.arange(sums.shape[1], device=sums.device)
    first = torch.where(positive & (sums > target), index, sums.shape[1]).amin(-1)
    last = torch.where(positive, index, 0).amax(-1)
    return torch.minimum(first, last)


def _argmax(logits: Tensor) -> Tensor:
    """Index of each row's largest logit, the first of equals; that of a NaN if there is one."""
    if logits.device.type == "cpu":
        # NumPy's is vectorised and twenty times as fast here.
        return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))
    return logits.argmax(-1)


def _portions(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    """Cut `rows` so that on a CPU the copies of a portion's logits stay in its cache."""
    size = max(1, _PORTION // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
    for start in range(0, len(rows), max(size, 1)):
        yield rows[start : start + size]


@contextmanager
def _selected(matrix: Tensor, rows: Sequence[int]) -> Iterator[Tensor]:
    """The given rows to change in place: the matrix itself when all of them are meant."""
    if len(rows) == matrix.shape[0]:
        yield matrix
        return
    part = matrix[list(rows)]
    yield part
    matrix[list(rows)] = part


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _temperature(spec: SampleSpec) -> float:
    temperature = spec.options.temperature
    return 1.0 if temperature is None else float(temperature)
