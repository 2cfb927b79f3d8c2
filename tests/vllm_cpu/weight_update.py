"""Updates a model in vLLM: python weight_update.py MODEL [float32|bfloat16 [adapter]] prints differences.

The log-probs are compared with plain transformers: of the loaded weights, of old weights after the learner's
changed, and of the weights after an update.
"""

import json
import os
import sys
from typing import Any

import torch

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


def difference(engine: Any, model: Any, ids: list[int]) -> float:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    output = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0]
    return float((torch.tensor(found) - expected).abs().max())


def main(path: str, dtype: str = "float32", adapter: str = "") -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm import LLM

    from raylight.engines.vllm.args import has_text_part
    from raylight.engines.vllm.update_repairs import load_tied_output, repair_expert_updates
    from raylight.weights.source import WeightSource

    repair_expert_updates()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine = LLM(
        path,
        dtype=dtype,
        enforce_eager=True,
        language_model_only=has_text_part(AutoConfig.from_pretrained(path)),
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
    load_tied_output(runner.get_model())
    torch.manual_seed(0)
    if adapter:  # of the packed experts, which the source merges
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], target_parameters=experts))
    ids = torch.randint(0, 250, (40,)).tolist()
    loaded = difference(engine, model, ids)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    old = difference(engine, model, ids)
    runner.reload_weights(weights_iterator=iter(WeightSource(model, getattr(torch, dtype))))
    print(json.dumps({"loaded": loaded, "old": old, "updated": difference(engine, model, ids)}), flush=True)
    os._exit(0)  # vLLM's threads would delay the end


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])
