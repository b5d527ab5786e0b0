"""Whether counts follow a distribution: the test that says of a sampler that it is lossless."""

import torch

# Below this many expected counts the statistic is no longer distributed as chi-square (Cochran, 1954).
_LEAST_EXPECTED = 5.0


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The probability that draws from `probabilities` lie at least as far from them as `counts` do, by Pearson's
    chi-square test; both of one shape, of any number of dimensions, the probabilities up to a factor.

    Outcomes that are expected fewer than 5 times are counted as one. A single count where the probability is 0 gives
    0. The distribution function of chi-square is the incomplete gamma function.
    """
    counts, weights = counts.flatten().double(), probabilities.flatten().double()
    assert counts.shape == weights.shape
    if bool((counts[weights == 0] > 0).any()):
        return 0.0
    expected = weights / weights.sum() * counts.sum()
    rare = expected < _LEAST_EXPECTED
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert len(expected) > 1, "no two outcomes to tell apart"
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def counted(tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """How often each sequence of `tokens (draws, n)` came up: `(vocab,) * n`."""
    n = tokens.shape[1]
    places = torch.tensor([vocab ** (n - 1 - i) for i in range(n)])
    return torch.bincount((tokens * places).sum(1), minlength=vocab**n).view((vocab,) * n)
