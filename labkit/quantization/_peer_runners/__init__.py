"""Scripts that `labkit.quantization.peers` starts in other environments. They import no labkit, which is not there."""
