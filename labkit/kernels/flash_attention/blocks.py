"""Sizes of the kernels' tiles, by chip, form and head: a table for the forward and one for the backward pass, each row
with the chip it was tuned on."""

from dataclasses import dataclass, replace

from labkit.kernels.chips import SHARED_BYTES

# The smallest tile that the matrix unit takes.
LEAST = 16


@dataclass(frozen=True)
class Blocks:
    """Queries and keys of a tile, for heads of up to `head_dim`. `described`: read by Hopper's copy engine, through
    descriptors. `max_registers`: what the compiler may give a thread. `tuned_on` names the chip that chose the row;
    None is a guess, by counting."""

    head_dim: int
    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    described: bool = False
    max_registers: int | None = None
    tuned_on: str | None = None

    def resized(self, block_q: int, block_k: int, capability: int) -> "Blocks":
        """These for other block sizes: as many stages as then fit, down to one."""
        if (block_q, block_k) == (self.block_q, self.block_k):
            return self
        warps = 8 if block_q >= 128 else 4
        fits = shared_bytes(self.head_dim, block_q, block_k, self.num_stages) <= SHARED_BYTES[chip_class(capability)]
        stages = self.num_stages if fits else 1
        return replace(
            self,
            block_q=block_q,
            block_k=block_k,
            num_warps=warps,
            num_stages=stages,
            max_registers=None,
            tuned_on=None,
        )


# None of it has been timed. What decided, counted in the compiler's output for bfloat16:
# - Nothing spills in the loop over whole tiles (decided for sm_80, 86, 90 and 100, with a causal mask and without, with
#   padding and without).
# - 128 queries a tile: with 64, K and V would be read twice as often, more than an L2 cache gives at full rate. Heads
#   of 256 leave no room for that beside the output where it stands in the registers of mma.sync.
# - On Hopper two programs share a multiprocessor (98 KB each): in one program all warps wait at a barrier before the
#   product with V, so that only another program's products hide its softmax. For heads of 128 that leaves 255 registers
#   for 128 threads or 128 for 256. With 128 the assembler puts a wait behind every single matrix instruction ("wgmma
#   serialized", C7512), which it does not from 144 on. With 255, that is with 4 warps, it does not either, and spills
#   almost all outside of the loop over whole tiles. 128 keys a tile and 8 warps take 189 registers and 165 KB, room for
#   one program.
# - On sm_100 two as well, of half the tensor memory each. With 4 warps a thread owns a row, whose largest score and sum
#   need no exchange; by pointers that spills, and 8 warps do not.
TABLE = {
    80: (Blocks(128, 128, 64, 8, 2), Blocks(256, 64, 64, 8, 2)),
    86: (Blocks(128, 128, 64, 8, 2), Blocks(256, 64, 32, 8, 2)),
    90: (
        Blocks(64, 128, 64, 8, 2, described=True, max_registers=128),
        Blocks(128, 128, 64, 4, 2, described=True),
        Blocks(256, 128, 64, 8, 2, described=True),
        Blocks(128, 128, 64, 8, 2),
        Blocks(256, 128, 32, 8, 2),
    ),
    100: (
        Blocks(128, 128, 64, 4, 2, described=True),
        Blocks(256, 128, 64, 8, 2, described=True),
        Blocks(128, 128, 64, 8, 2),
        Blocks(256, 128, 32, 8, 2),
    ),
}


# By the chips' kind, and whether the copy engine reads: the tiles for dK and dV, and those for dQ. All are guesses: the
# largest that spill nothing in an inner loop, for the fewest bytes from the L2 cache and the fewest barriers a product.
# Keys' gradients of 128 by 128 take 128 of a thread's 255 registers, scores and dP of 64 queries another 64, pointers
# some 60, which descriptors save: on sm_90 the difference between 32 and 64 queries a tile. Where each warp feeds the
# matrix unit by itself (sm_80, 86, 89, 120), reads of shared memory a product decide between those that fit.
BACKWARD = {
    (90, True): (
        (Blocks(64, 64, 128, 8, 2), Blocks(64, 128, 128, 8, 2)),
        (Blocks(128, 64, 128, 8, 2), Blocks(128, 128, 128, 8, 2)),
        (Blocks(256, 64, 64, 8, 2), Blocks(256, 128, 32, 8, 2)),
    ),
    (90, False): (
        (Blocks(64, 64, 128, 8, 2), Blocks(64, 128, 64, 8, 2)),
        (Blocks(128, 32, 128, 8, 3), Blocks(128, 128, 64, 8, 2)),
        (Blocks(256, 16, 64, 8, 2), Blocks(256, 64, 32, 8, 2)),
    ),
    (100, True): (
        (Blocks(64, 64, 128, 8, 2), Blocks(64, 128, 128, 8, 2)),
        (Blocks(128, 64, 128, 8, 2), Blocks(128, 128, 128, 8, 2)),
        (Blocks(256, 32, 64, 8, 2), Blocks(256, 128, 32, 8, 2)),
    ),
    (100, False): (
        (Blocks(64, 64, 128, 8, 2), Blocks(64, 128, 64, 8, 2)),
        (Blocks(128, 64, 64, 8, 1), Blocks(128, 128, 64, 8, 2)),
        (Blocks(256, 16, 64, 8, 1), Blocks(256, 64, 32, 8, 2)),
    ),
    (80, False): (
        (Blocks(64, 32, 128, 8, 2), Blocks(64, 128, 64, 8, 2)),
        (Blocks(128, 64, 64, 8, 2), Blocks(128, 128, 32, 8, 3)),
        (Blocks(256, 32, 64, 8, 2), Blocks(256, 64, 32, 8, 2)),
    ),
    (86, False): (
        (Blocks(64, 32, 128, 8, 2), Blocks(64, 128, 64, 8, 2)),
        (Blocks(128, 64, 64, 8, 2), Blocks(128, 128, 32, 8, 2)),
        (Blocks(256, 32, 32, 8, 1), Blocks(256, 32, 32, 8, 2)),
    ),
}


def chip_class(capability: int) -> int:
    """The key of the table for `sm_<capability>`: 80 and 87 have more shared memory than their kin; what has neither
    Hopper's nor Blackwell's matrix unit, or is not known, is taken as the smallest."""
    if capability in (80, 87):
        return 80
    return {9: 90, 10: 100}.get(capability // 10, 86)


def padded_head(head_dim: int) -> int:
    """The power of two that a head is computed as: of 80, 96 or 100 as 128, that is 1.6, 1.33 or 1.28 times the
    products, and what is loaded and written is only what there is."""
    return max(LEAST, 1 << (head_dim - 1).bit_length())


def blocks_for(head_dim: int, capability: int, described: bool) -> Blocks:
    """The row of the table; by descriptors where asked for, and where the chip has a copy engine that reads them."""
    rows = TABLE[chip_class(capability)]
    described = described and any(row.described for row in rows)
    return next(row for row in rows if row.described == described and head_dim <= row.head_dim)


def backward_blocks_for(head_dim: int, capability: int, described: bool) -> tuple[Blocks, Blocks]:
    """The row of the backward table: for dK and dV, and for dQ. Errors: KeyError for descriptors on a chip that has no
    copy engine for them."""
    rows = BACKWARD[chip_class(capability), described]
    return next(pair for pair in rows if head_dim <= pair[0].head_dim)


def shared_bytes(head_dim: int, block_q: int, block_k: int, num_stages: int) -> int:
    """Of a program: its queries, and each stage's keys and values, in 16 bits."""
    return 2 * padded_head(head_dim) * (block_q + 2 * num_stages * block_k)
