"""A checkpoint of any layout as `transformers` loads it through GPTQModel or compressed-tensors: its logits."""

import os
from pathlib import Path

from job import Job

job = Job()
settings = job.settings
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

SAFE = {"use_safetensors": True, "trust_remote_code": False}
torch.set_num_threads(settings["threads"])
config = AutoConfig.from_pretrained(Path(settings["checkpoint"]))
stored = config.quantization_config
if stored["quant_method"] == "compressed-tensors":
    package = "compressed-tensors"
else:
    # For AWQ transformers takes the plain kernel by another name.
    plain = "torch_awq" if stored["quant_method"] == "awq" else "torch"
    package, stored["backend"] = "gptqmodel", {"torch": plain}.get(settings["backend"], settings["backend"])
device = "cuda:0" if torch.cuda.is_available() else "cpu"
model = AutoModelForCausalLM.from_pretrained(
    Path(settings["checkpoint"]), config=config, dtype=getattr(torch, settings["dtype"]), device_map=device, **SAFE
).eval()
with torch.no_grad(), job.timed():
    logits = [model(row[None].to(model.device), use_cache=False).logits[0].float().cpu() for row in job.tokens("ids")]
save_file({"logits": torch.stack(logits)}, job.folder / "logits.safetensors")
kinds = sorted({type(module).__name__ for module in model.modules() if hasattr(module, "qweight")})
job.finish(package, device=device, kernels=kinds)
