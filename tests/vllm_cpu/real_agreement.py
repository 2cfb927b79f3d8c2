"""Compares log-probs of a pretrained model in vLLM, the transformers engine and the learner.

    python real_agreement.py MODEL float32|bfloat16 [ADAPTER]

vLLM samples; the others score its tokens. Then the learner takes a step. Without ADAPTER its weights are sent
to vLLM; with it an adapter is trained and saved in that folder, and vLLM and peft load it from there. Prints
mean and largest differences as JSON.
"""

import asyncio
import json
import os
import sys
from typing import Any

import torch
from weight_update import SETTINGS

KINDS = ["animals", "fruits", "gems", "fabrics", "cars", "jobs", "games", "insects"]
TOKENS = 24


def sample(engine: Any, prompts: list[list[int]], adapter: str | None = None) -> list[dict[str, Any]]:
    """Return a response to each prompt, sampled by vLLM, with its log-probs."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=0, logprobs=0, detokenize=False)
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        params,
        use_tqdm=False,
        lora_request=LoRARequest("trained", 1, adapter) if adapter else None,
    )
    found = []
    for ids, output in zip(prompts, outputs, strict=True):
        response = list(output.outputs[0].token_ids)
        entries = zip(output.outputs[0].logprobs, response, strict=True)
        logprobs = [entry[token].logprob for entry, token in entries]
        found.append({"prompt": ids, "response": response, "logprobs": logprobs})
    return found


def difference(samples: list[dict[str, Any]], score: Any) -> dict[str, float]:
    """Return the mean and the largest difference of the samples' log-probs from `score`, a function from
    token ids to the log-probs of all but the first."""
    found = torch.cat(
        [
            torch.tensor(each["logprobs"]).sub(
                torch.tensor(score([*each["prompt"], *each["response"]])[-len(each["response"]) :])
            )
            for each in samples
        ]
    ).abs()
    return {"mean": float(found.mean()), "max": float(found.max()), "tokens": len(found)}


def train(policy: Any, samples: list[dict[str, Any]]) -> None:
    """Take a step with rewards that differ in each group."""
    from raylight.experience.batches.batch import TrainBatch
    from raylight.types import Trajectory

    rows = []
    for number, each in enumerate(samples):
        zeros = [0] * len(each["prompt"])
        ones = [1] * len(each["response"])
        ids, logprobs = [*each["prompt"], *each["response"]], [*map(float, zeros), *each["logprobs"]]
        versions = [-1] * len(zeros) + [0] * len(ones)
        rows.append(Trajectory(str(number), ids, zeros + ones, logprobs, versions))
    count = len(rows)
    rewards, groups = [float(i % 2) for i in range(count)], [str(i // 4) for i in range(count)]
    policy.update(TrainBatch(rewards, groups, rows, list(range(count))))


def peft_scores(path: str, adapter: str, dtype: torch.dtype) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), adapter).eval()

    def score(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()

    return score


async def engine_difference(path: str, dtype: str, samples: list[dict[str, Any]]) -> dict[str, float]:
    """Return the difference to the transformers engine."""
    from raylight.engines.transformers.engine import TransformersEngine

    engine = TransformersEngine(path, "policy", dtype=dtype, slots=8, max_model_len=256)
    rows = [[*each["prompt"], *each["response"]] for each in samples]
    scores = {tuple(ids): await engine.logprobs(ids) for ids in rows}
    engine.close()
    return difference(samples, lambda ids: scores[tuple(ids)])


def main(path: str, dtype: str, adapter: str | None = None) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM

    from raylight.config import LearnerConfig, LoraConfig
    from raylight.engines.vllm.update_repairs import load_tied_output
    from raylight.experience.settings.policy_settings import PolicySettings
    from raylight.learner.model.weights import save_model
    from raylight.learner.updates.policy import Policy
    from raylight.weights.source import WeightSource

    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [f"Write a list of three {kind}, separated by commas, nothing else." for kind in KINDS]
    prompts = [
        tokenizer.encode(text)
        if tokenizer.chat_template is None
        else tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    engine = LLM(
        path,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
        enable_lora=adapter is not None,
    )
    samples = sample(engine, prompts)
    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    settings = PolicySettings(lr=1e-4 if adapter is None else 1e-2, max_logprob_mismatch=1.0)
    lora = None if adapter is None else LoraConfig(rank=16)
    learner = LearnerConfig(dtype=dtype, lora=lora)
    policy = Policy(path, learner, settings, 2)
    figures = {
        "learner": difference(samples, policy.logprobs),
        "engine": asyncio.run(engine_difference(path, dtype, samples)),
    }
    train(policy, samples)
    figures["stale"] = difference(samples, policy.logprobs)
    if adapter is None:
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        load_tied_output(runner.get_model())
        weights = WeightSource(policy.engine.module, getattr(torch, dtype))
        runner.reload_weights(weights_iterator=iter(weights))
        engine.reset_prefix_cache()
        figures["updated"] = difference(sample(engine, prompts), policy.logprobs)
    else:
        save_model(policy.engine, adapter)
        adapter = f"{adapter}/adapter"
        samples = sample(engine, prompts, adapter)
        figures["updated"] = difference(samples, policy.logprobs)
        figures["peft"] = difference(samples, peft_scores(path, adapter, getattr(torch, dtype)))
    print(json.dumps(figures), flush=True)
    os._exit(0)  # vLLM's threads would delay the end


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    main(*sys.argv[1:])
