"""Quantization: weights of 2, 3, 4 or 8 bits that really take no more bytes, by several algorithms and by training."""

from labkit.quantization.api import QuantizationInterrupted, quantize_, quantize_embedding_
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantEmbedding, QuantLinear
from labkit.quantization.packing import PackedWeight, weight_bytes
from labkit.quantization.report import MatrixReport, QuantizationReport, output_error
from labkit.quantization.rtn import RTNConfig

__all__ = [
    "GPTQConfig",
    "MatrixReport",
    "PackedWeight",
    "QuantEmbedding",
    "QuantLinear",
    "QuantizationInterrupted",
    "QuantizationReport",
    "RTNConfig",
    "output_error",
    "quantize_",
    "quantize_embedding_",
    "weight_bytes",
]
