"""This package, in a process of its own with the clock around the same part of the work as the other runners have."""

import torch
from job import Job

import labkit
from labkit.models import load_model
from labkit.quantization import AWQConfig, GPTQConfig, quantize_
from labkit.quantization.checkpoint import save_quantized

job = Job()
settings = job.settings
torch.set_num_threads(settings["threads"])
device = "cuda" if torch.cuda.is_available() else "cpu"
common = {"bits": settings["bits"], "group_size": settings["group_size"]}
if settings["method"] == "AWQ":
    config, layout = AWQConfig(**common, zero_point=not settings["sym"]), "awq"
else:
    more = {name: settings[name] for name in ("sym", "desc_act", "damp_percent")}
    config, layout = GPTQConfig(**common, **more), "gptq"
loaded = load_model(job.model, device=device, dtype=settings["dtype"])
with job.timed():
    quantize_(loaded.model, config, job.tokens("calibration"), progress=False)
save_quantized(loaded, None, job.checkpoint, format=layout)
job.finish("labkit", labkit.__version__, device=device)
