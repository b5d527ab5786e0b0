"""Quantization: weights of 2, 3, 4 or 8 bits that really take no more bytes, by several algorithms and by training."""

from labkit.quantization.api import QuantizationInterrupted, quantize_, quantize_embedding_
from labkit.quantization.awq import AWQConfig, awq_scale_
from labkit.quantization.checkpoint import save_quantized
from labkit.quantization.fp8 import FP8Config, FP8Linear
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantEmbedding, QuantLinear
from labkit.quantization.packing import PackedWeight, weight_bytes
from labkit.quantization.qat import QATConfig, QATReport
from labkit.quantization.report import MatrixReport, QuantizationReport, output_error
from labkit.quantization.rtn import RTNConfig
from labkit.quantization.serving import ServingCheck, check_vllm
from labkit.quantization.smoothquant import Int8Linear, SmoothQuantConfig, smooth_

__all__ = [
    "AWQConfig",
    "FP8Config",
    "FP8Linear",
    "GPTQConfig",
    "Int8Linear",
    "MatrixReport",
    "PackedWeight",
    "QATConfig",
    "QATReport",
    "QuantEmbedding",
    "QuantLinear",
    "QuantizationInterrupted",
    "QuantizationReport",
    "RTNConfig",
    "ServingCheck",
    "SmoothQuantConfig",
    "awq_scale_",
    "check_vllm",
    "output_error",
    "quantize_",
    "quantize_embedding_",
    "save_quantized",
    "smooth_",
    "weight_bytes",
]
