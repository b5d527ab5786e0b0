"""What chips have, as far as a kernel has to fit into it."""

# Bytes of shared memory that one program can have, by compute capability (CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability").
SHARED_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
# Columns of tensor memory, which only this one has.
TENSOR_MEMORY = 512
