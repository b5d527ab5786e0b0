"""AutoAWQ 0.2.9, unmaintained, as its documents say; without CUDA with one mend.

Before it tries scales it keeps the weights by `.cpu()`, which is a copy of what lies on a GPU and the same tensor on a
CPU. What it puts back after each try is then what the try has made of it, and the checkpoint is worth nothing.
"""

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer
from job import Job
from legacy import rewrite_model

job = Job()
settings = job.settings
torch.set_num_threads(settings["threads"])
device = "cuda" if torch.cuda.is_available() else "cpu"


class CopyingQuantizer(AwqQuantizer):
    """The same, with a copy of the weights to go back to."""

    def _compute_best_scale(self, x, w_mean, x_mean, module2inspect, *rest, **named):
        whole = module2inspect.state_dict
        module2inspect.state_dict = lambda: {name: value.clone() for name, value in whole().items()}
        try:
            return super()._compute_best_scale(x, w_mean, x_mean, module2inspect, *rest, **named)
        finally:
            del module2inspect.state_dict


if device == "cpu":
    job.notes.append("patched to run without CUDA: its search for scales is given a copy of the weights to go back to")
model = AutoAWQForCausalLM.from_pretrained(
    str(rewrite_model(job)),
    torch_dtype=getattr(torch, settings["dtype"]),
    device_map=device,
    trust_remote_code=False,
)
calibration = job.tokens("calibration")
with job.timed():
    model.quantize(
        None,
        quant_config={
            "zero_point": not settings["sym"],
            "q_group_size": settings["group_size"],
            "w_bit": settings["bits"],
            "version": "GEMM",
        },
        calib_data=calibration.tolist(),
        max_calib_samples=len(calibration),
        max_calib_seq_len=calibration.shape[1],
        quantizer_cls=AwqQuantizer if device == "cuda" else CopyingQuantizer,
    )
model.save_quantized(str(job.checkpoint))
job.finish("autoawq", device=device)
