"""One key head and one value head in the place of several, by principal components in the activations.

Matrices act on inputs with a 1 appended, so that a bias is their last column; everything is float64. `moments (in,
in)` is the mean of x x^T over the calibration's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of the mean eigenvalue: what no query asks of a key, and no output reads of a value, is not divided by.
_FLOOR = 1e-6


def _root(second_moment: Tensor) -> Tensor:
    """The symmetric square root of a positive matrix, its smallest eigenvalues lifted to a floor."""
    values, vectors = torch.linalg.eigh(second_moment)
    floor = (_FLOOR * values.mean()).clamp_min(torch.finfo(values.dtype).tiny)
    return (vectors * values.clamp_min(floor).sqrt()) @ vectors.mT


def _components(second_moment: Tensor, count: int) -> Tensor:
    """The `count` eigenvectors of the largest eigenvalues, as columns."""
    return torch.linalg.eigh(second_moment).eigenvectors[:, -count:]


def shared_value(values: Tensor, outputs: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """values `(old, head_dim, in)`, outputs `(old, heads, hidden, head_dim)`: the columns of o_proj for each query head
    of an old KV head. Returns the value head `(head_dim, in)` and the outputs that read it.

    A head may read the shared value through a matrix of its own, which goes into o_proj. So the shared one is the best
    head_dim-dimensional view of all old values side by side, each measured by what o_proj makes of it.
    """
    old, head_dim, _ = values.shape
    gains = [_root(torch.einsum("ncd,nce->de", out, out)) for out in outputs]
    seen = torch.cat([gain @ value for gain, value in zip(gains, values, strict=True)])
    basis = _components(seen @ moments @ seen.mT, head_dim)
    reads = [torch.linalg.solve(gain, part) for gain, part in zip(gains, basis.split(head_dim), strict=True)]
    return basis.mT @ seen, torch.stack([out @ read for out, read in zip(outputs, reads, strict=True)])


def shared_key(
    queries: Tensor, keys: Tensor, moments: Tensor, frequencies: Tensor, slow_below: float
) -> tuple[Tensor, Tensor]:
    """queries `(old, heads, head_dim, in)` of each old KV head, keys `(old, head_dim, in)`; channels i and i +
    head_dim / 2 are a rotary pair. Returns the queries' new matrices and the key head `(head_dim, in)`.

    A rotation commutes with a matrix in two cases. Within one pair, with every complex number (a turn and a factor): so
    for each frequency the old heads' complex keys become one complex key. And, nearly, with any matrix, where it hardly
    turns at all: pairs of a frequency under `slow_below` radians a token are merged together.
    """
    new_queries, new_key = torch.empty_like(queries), torch.empty_like(keys[0])
    half = keys.shape[1] // 2
    asked = queries @ moments @ queries.mT
    # Of all keys with one another: (old, channel, old, channel).
    products = (keys.flatten(0, 1) @ moments @ keys.flatten(0, 1).mT).view(*keys.shape[:2], *keys.shape[:2])
    for pair in range(half):
        channels = [pair, pair + half]
        alike = products[:, channels][:, :, :, channels]
        found = _shared_pair(queries[:, :, channels], keys[:, channels], alike, asked[..., channels, channels])
        new_queries[:, :, channels], new_key[channels] = found
    slow = frequencies < slow_below
    channels = torch.cat((slow, slow)).nonzero().flatten().tolist()
    if channels:
        energy = asked[:, :, channels][..., channels].sum(1)
        found = _shared_block(queries[:, :, channels], keys[:, channels], moments, energy, new_key[channels])
        new_queries[:, :, channels], new_key[channels] = found
    return new_queries, new_key


def _shared_pair(queries: Tensor, keys: Tensor, alike: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
    """One frequency: queries `(old, heads, 2, in)`, keys `(old, 2, in)`, the mean products of the keys `(old, 2, old,
    2)`, energy `(old, heads, 2)` of the queries."""
    weight = energy.sum((1, 2))
    weight = weight.clamp_min(_FLOOR * weight.mean() + torch.finfo(weight.dtype).tiny).sqrt()
    # Mean of k_a k_b^* for the complex keys of old heads a and b.
    real = alike[:, 0, :, 0] + alike[:, 1, :, 1]
    moments = torch.complex(real, alike[:, 1, :, 0] - alike[:, 0, :, 1]) * torch.outer(weight, weight)
    direction = _components(moments, 1)[:, 0]
    shared = (direction.conj() * weight) @ torch.complex(keys[:, 0], keys[:, 1])
    # k of an old head is nearly (direction / weight) times the shared one, and q^* k = (conj(that) q)^* k'.
    factors = (direction / weight).conj()[:, None, None]
    turned = torch.complex(queries[:, :, 0], queries[:, :, 1]) * factors
    return torch.stack((turned.real, turned.imag), dim=2), torch.stack((shared.real, shared.imag))


def _shared_block(
    queries: Tensor, keys: Tensor, moments: Tensor, energy: Tensor, guide: Tensor
) -> tuple[Tensor, Tensor]:
    """Slow channels as if they did not turn: queries `(old, heads, n, in)`, keys `(old, n, in)`, energy `(old, n, n)`.

    What is the same in every key adds the same to all of a query's scores, so keys count by how they differ. Which
    mixture of the n components stands in which channel is free, but for the little that they do turn: so they are
    brought near to `guide (n, in)`, the key that was found pair by pair.
    """
    mean = moments[-1]
    spread = moments - torch.outer(mean, mean)
    roots = [_root(second_moment) for second_moment in energy]
    seen = torch.cat([root @ key for root, key in zip(roots, keys, strict=True)])
    basis = _components(seen @ spread @ seen.mT, keys.shape[1])
    shared = basis.mT @ seen
    place = _placed(shared, guide, spread)
    reads = [torch.linalg.solve(root, part) for root, part in zip(roots, basis.split(keys.shape[1]), strict=True)]
    # What the keys are multiplied by, the queries are divided by.
    reads = [torch.linalg.solve(place.mT, read.mT) for read in reads]
    return torch.stack([read @ query for read, query in zip(reads, queries, strict=True)]), place @ shared


def _placed(shared: Tensor, guide: Tensor, spread: Tensor) -> Tensor:
    """The matrix `(n, n)` that makes of `shared (n, in)` what is nearest to `guide` with the covariance of that, so
    that it can be inverted: both made white, that is the nearest orthogonal matrix (Schönemann 1966)."""
    own, wanted = _root(shared @ spread @ shared.mT), _root(guide @ spread @ guide.mT)
    cross = torch.linalg.solve(wanted, guide @ spread @ shared.mT)
    left, _, right = torch.linalg.svd(torch.linalg.solve(own, cross.mT).mT)
    return wanted @ left @ right @ torch.linalg.inv(own)
