"""GPTQModel: GPTQ or AWQ on a CPU or a GPU. Runs in the environment that `make quantlibs` makes."""

import os

from job import Job

job = Job()
settings = job.settings
# With fewer workers than this GPTQModel 7.6 stops on a machine of two cores.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch  # noqa: E402
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: E402
from gptqmodel.quantization.config import FORMAT, METHOD  # noqa: E402

torch.set_num_threads(settings["threads"])
is_awq = settings["method"] == "AWQ"
device = "cuda:0" if torch.cuda.is_available() else "cpu"
options = {
    "bits": settings["bits"],
    "group_size": settings["group_size"],
    "sym": settings["sym"],
    "offload_to_disk": False,
    "device": device,
}
if is_awq:
    options |= {"method": METHOD.AWQ, "format": FORMAT.GEMM}
else:
    # v2 stores zero points as they are; v1 is its default.
    options |= {
        "method": METHOD.GPTQ,
        "format": FORMAT.GPTQ if settings["sym"] else FORMAT.GPTQ_V2,
        "desc_act": settings["desc_act"],
        "damp_percent": settings["damp_percent"],
    }
    if settings["desc_act"]:
        options["act_group_aware"] = False

model = GPTQModel.load(str(job.model), QuantizeConfig(**options), dtype=getattr(torch, settings["dtype"]))
# Only the plain kernel quantizes by AWQ without a GPU.
backend = BACKEND.AWQ_TORCH if is_awq and device == "cpu" else BACKEND.AUTO
with job.timed():
    model.quantize(job.examples(), batch_size=1, backend=backend)
model.save(str(job.checkpoint))
job.finish("gptqmodel", device=device)
