"""AutoGPTQ 0.7.1, unmaintained. It quantizes with CUDA alone; without, three of its places are put on the CPU here."""

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import _base, _utils
from auto_gptq.modeling.auto import GPTQ_CAUSAL_LM_MODEL_MAP
from job import Job
from legacy import rewrite_model
from transformers import AutoModelForCausalLM

job = Job()
settings = job.settings
torch.set_num_threads(settings["threads"])
config = BaseQuantizeConfig(
    bits=settings["bits"],
    group_size=settings["group_size"],
    sym=settings["sym"],
    desc_act=settings["desc_act"],
    damp_percent=settings["damp_percent"],
)
model = AutoModelForCausalLM.from_pretrained(
    rewrite_model(job), torch_dtype=getattr(torch, settings["dtype"]), use_safetensors=True
)
# What its own from_pretrained makes after its refusal to go on without CUDA.
wrapper = GPTQ_CAUSAL_LM_MODEL_MAP[model.config.model_type](model.eval(), False, config)
if not torch.cuda.is_available():
    cpu = torch.device("cpu")
    _base.CUDA_0 = _utils.CUDA_0 = cpu
    torch.cuda.synchronize = lambda *_, **__: None
    job.notes.append(
        "patched to run without CUDA: its wrapper built directly, CUDA_0 the CPU, torch.cuda.synchronize without effect"
    )
with job.timed():
    wrapper.quantize(job.examples(), batch_size=1)
wrapper.save_quantized(str(job.checkpoint))
job.finish("auto-gptq", device="cuda" if torch.cuda.is_available() else "cpu")
